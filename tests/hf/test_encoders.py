"""Encoders of transformers in a loop of one's own: masked tokens, packed and split over ranks,
against transformers alone."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import transformers

from longctx.config import load
from longctx.errors import UserError
from longctx.hf.attention import HuggingFaceError, model_inputs
from longctx.hf.attention import prepare as prepare_model
from longctx.hf.model import block_name
from longctx.hf.spec import spec_of
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.cost.work import work_of
from longctx.training.metrics import model_flops
from tests.encoder_cases import KINDS, batches, build_encoder, reference, step
from tests.huggingface_cases import build_model
from tests.marks import slow_unless
from tests.pretrained_cases import largest_error
from tests.workers import Workers


@pytest.mark.parametrize(
    ("kind", "ranks"), slow_unless(lambda _, ranks: ranks == 3, product(KINDS, (1, 2, 3)))
)
def test_a_step_is_that_of_transformers(workers: Workers, kind: str, ranks: int) -> None:
    """Degrees 1 to 3, lengths from 1 token."""
    loss, expected = reference(kind)
    for found, gradients in workers.run(step, ranks, kind):
        assert found == pytest.approx(loss, rel=1e-5)
        assert largest_error(gradients, expected) < 1e-4


def spec_of_encoder(kind: str) -> ModelSpec:
    model = build_encoder(kind)
    return spec_of(model, model.get_submodule(block_name(model)), causal=False)


def test_attention_in_both_directions_costs_twice() -> None:
    spec = spec_of_encoder("bert")
    causal = replace(spec, causal=True)
    matrices = 6 * spec.multiplied_parameters * 500
    assert model_flops(spec, [500]) - matrices == 2 * (model_flops(causal, [500]) - matrices)
    # Every query and key: 2 operations for the score, 2 for the value, times 3 with backward.
    pairs = 500 * 500
    assert model_flops(spec, [500]) - matrices == 12 * pairs * sum(
        x.num_attention_heads * x.head_dim for x in spec.layers
    )
    assert work_of(spec, "float32").attention == 2 * work_of(causal, "float32").attention
    assert {layer.window for layer in spec_of_encoder("modernbert").layers} == {None, 9}


def test_own_loops_prepare_encoders_only_as_such() -> None:
    bert = build_encoder("bert")
    with pytest.raises(HuggingFaceError, match="uses a mask of bidirectional_mask_function"):
        prepare_model(bert)
    with pytest.raises(
        HuggingFaceError,
        match="uses a mask of causal_mask_function: encoders are supported only with",
    ):
        prepare_model(build_model("llama", "eager"), causal=False)
    with pytest.raises(
        HuggingFaceError, match=r"pools the first row only.*add_pooling_layer=False"
    ):
        prepare_model(bert.bert.__class__(bert.config), causal=False)
    prepare_model(bert, causal=False)
    batch = batches(1, 0)[0][0]
    with pytest.raises(
        HuggingFaceError,
        match="target_tokens is 7, but BertForMaskedLM is an encoder, whose own loss",
    ):
        model_inputs(bert, batch, 7)
    bert.set_attn_implementation("longctx")  # as if it were causal
    with pytest.raises(HuggingFaceError, match="uses a mask of bidirectional_mask_function"):
        bert(**model_inputs(bert, batch))


def test_longctx_train_says_where_they_are_trained(tmp_path: Path) -> None:
    build_encoder("bert").save_pretrained(tmp_path / "bert")
    build_encoder("modernbert").save_pretrained(tmp_path / "modernbert")
    part = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "head_dim": 8,
    }
    transformers.T5GemmaConfig(encoder=part, decoder=part).save_pretrained(tmp_path / "t5gemma")
    (tmp_path / "t5gemma" / "model.safetensors").write_bytes(
        (tmp_path / "bert" / "model.safetensors").read_bytes()
    )
    places = {
        "bert": "transformers.Trainer",
        "modernbert": "transformers.Trainer",
        "t5gemma": "Seq2SeqTrainer",
    }
    for name, trainer in places.items():
        with pytest.raises(
            UserError,
            match=rf"trained .*inside {trainer}, by dynamic_context_parallel \(docs/trainers.md\)",
        ):
            load(None, [f"model.from_pretrained={tmp_path / name}"], world_size=1)
