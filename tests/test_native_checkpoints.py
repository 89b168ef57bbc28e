"""Checkpoints of transformers in the native decoder: weights, loss and gradients for every split, and refused checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from longctx.model.checkpoint_files import CheckpointFiles, PretrainedError
from longctx.model.families import FAMILIES, NoNativeModel, canonical, expressed
from longctx.model.presets import PRESETS, ModelShape
from longctx.model.source import pretrained
from tests.marks import slow_unless
from tests.workers import Workers

transformers = pytest.importorskip("transformers")

from tests.huggingface_cases import SIZE, SPECIAL  # noqa: E402
from tests.native_cases import step  # noqa: E402
from tests.pretrained_cases import largest_error, reference  # noqa: E402
from tests.test_decoder_options import CASES, attention_of  # noqa: E402

BASE = {**SIZE, "num_hidden_layers": 4, "bos_token_id": None, "eos_token_id": 1}


def build(name: str) -> Any:
    kind, given, _ = CASES[name]
    settings = {**BASE, **SPECIAL.get(kind, {}), **given}
    config = transformers.AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too: at their first values they would hide mistakes
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in CASES:
        build(name).save_pretrained(folder / name)
    return {name: folder / name for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(checkpoints: dict[str, Path], name: str) -> None:
    tokens = torch.randint(0, BASE["vocab_size"], (61,), generator=torch.Generator().manual_seed(1))
    source = pretrained(str(checkpoints[name]), (), "native", False)
    assert source.said == "the native decoder runs it, as model.implementation says"
    ours = source.build()
    ours.initialize(0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoints[name], attn_implementation="eager")
    with torch.no_grad():
        logits = ours.double()(tokens, torch.arange(61), attention_of(ours, 61))
        torch.testing.assert_close(logits, theirs.double()(tokens[None]).logits[0], rtol=1e-4, atol=1e-5)


TP, PP = "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"
SPLITS = {
    "sharded over 2": (2, ["model.implementation=native"]),
    "sharded over 3": (3, ["model.implementation=native"]),
    "tensor 2 × domain 2": (4, [TP]),
    "pipeline 2": (2, [PP]),
}
ROPES = ("Llama 3", "linear", "YaRN")
"""These differ from Llama 2 only in their RoPE tables."""


STEPS = [(name, split) for name in CASES if name not in ROPES for split in SPLITS]
QUICK = {("Llama 2", "pipeline 2"), ("Qwen 3", "sharded over 3"), ("Gemma 3", "tensor 2 × domain 2")}


@pytest.mark.parametrize(("name", "split"), slow_unless(lambda *case: case in QUICK, STEPS))
def test_a_step_is_that_of_transformers(workers: Workers, checkpoints: dict[str, Path], name: str, split: str) -> None:
    ranks, settings = SPLITS[split]
    loss, gradients, weights = reference(checkpoints[name])
    for found_loss, found_gradients, found_weights in workers.run(step, ranks, checkpoints[name], settings):
        assert weights.keys() - found_weights.keys() <= {"lm_head.weight"}
        assert all(torch.equal(weights[key], found_weights[key]) for key in found_weights)
        assert found_loss == pytest.approx(loss, rel=1e-5)
        assert largest_error(found_gradients, gradients) < 1e-4


CHANGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "hidden_act": ("llama", {"hidden_act": "relu"}, "hidden_act is relu, and only silu, swish, gelu_pytorch_tanh are"),
    "attention_bias": ("llama", {"attention_bias": True}, "config.json has attention_bias True, which is not supported"),
    "mlp_bias": ("llama", {"mlp_bias": True}, "mlp_bias True"),
    "bias of qwen3": ("qwen3", {"attention_bias": True}, "attention_bias True"),
    "dropout": ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop 0.1"),
    "unknown": ("llama", {"residual_multiplier": 0.5}, "residual_multiplier 0.5"),
    "quantised": ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    "bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    "softcap of gemma3": ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping 5.0"),
    "type": ("olmo2", {}, "model_type is olmo2, and only llama, mistral"),
    "pattern": (
        "gemma2",
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
        "layer_types has full_attention in layers other than every n-th",
    ),
    "kind of layer": ("qwen3", {"layer_types": ["linear_attention"] * 4}, "layer_types has linear_attention"),
    "dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
        "rope_parameters has type dynamic",
    ),
    "attention_factor": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "attention_factor": 1.0,
            }
        },
        "rope_parameters has attention_factor 1.0",
    ),
    "partial": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor 0.5, which llama does not use",
    ),
    "scaled windows": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            }
        },
        "rope_parameters of sliding_attention has type linear",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_native_decoder_lacks_is_refused(tmp_path: Path, change: str) -> None:
    kind, settings, message = CHANGES[change]
    transformers.AutoConfig.for_model(kind, **{**BASE, **settings}).save_pretrained(tmp_path)
    (tmp_path / "tensors.json").write_text("{}")
    with pytest.raises(PretrainedError, match=message) as refusal:
        pretrained(str(tmp_path), (), "native", False)
    assert str(refusal.value).endswith("; choose model.implementation transformers")
    with pytest.raises(PretrainedError, match=r"set parallel\.tensor_parallel_size and parallel\.pipeline_parallel_size to 1"):
        pretrained(str(tmp_path), (), "auto", True)


def test_every_field_of_a_config_is_known_or_refused() -> None:
    """A field added by a later version of transformers is refused, unless it has its default."""
    for kind, family in FAMILIES.items():
        config = transformers.AutoConfig.for_model(kind)
        shape = family.shape(config)
        for name, value in config.to_dict().items():
            if isinstance(value, bool) and name != "tie_word_embeddings":
                changed = transformers.AutoConfig.for_model(kind)
                setattr(changed, name, not value)
                try:
                    same = family.shape(changed) == shape
                except NoNativeModel:
                    continue
                harmless = {"output_hidden_states", "return_dict", "is_encoder_decoder", "use_cache", "output_attentions"}
                assert same and name in harmless | {"use_sliding_window"}, (kind, name)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def load_all(source: str) -> None:
    pretrained.__wrapped__(source, (), "native", False).build().initialize(0)


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    build("Qwen 2").save_pretrained(tmp_path)
    files = CheckpointFiles.open(str(tmp_path))
    tensors = {name: files.read(name) for name in files.files}
    load_all(str(tmp_path))
    some = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(PretrainedError, match=f"lacks {some}: give a checkpoint of the whole"):
        load_all(rewrite(tmp_path, {name: tensor for name, tensor in tensors.items() if name != some}))
    with pytest.raises(PretrainedError, match=rf"{some} has shape \(47, 32\), not \(48, 32\); give the config"):
        load_all(rewrite(tmp_path, {**tensors, some: tensors[some][:47].clone()}))
    with pytest.raises(PretrainedError, match=r"has model\.layers\.0\.self_attn\.q_norm\.weight, which Qwen2"):
        load_all(rewrite(tmp_path, {**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(8)}))
    with pytest.raises(PretrainedError, match=r"has tie_word_embeddings, but its lm_head\.weight differs from its embedding"):
        load_all(rewrite(tmp_path, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))
    load_all(rewrite(tmp_path, {name.removeprefix("model."): tensor for name, tensor in tensors.items()}))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(PretrainedError, match="is damaged"):
        load_all(str(tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_a_shape_finds_its_family(name: str) -> None:
    """A shape made from a config of transformers gives the same family, with a config of the same shape."""
    kind = CASES[name][0]
    wanted = FAMILIES[kind].shape(build(name).config)
    family, config = expressed(wanted, longest=64)
    assert (family.kind, family.shape(config)) == (kind, wanted)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "llama"),
        ({"rope_scaling": "ntk", "rope_factor": 4.0}, "llama"),
        ({"rope_scaling": "linear", "rope_factor": 1.0}, "llama"),
        ({"sliding_window": 64}, "mistral"),
        ({"sliding_window": 64, "full_attention_every": 1}, "llama"),
        ({"qk_norm": True, "sliding_window": 64, "full_attention_every": 2}, "qwen3"),
        ({"partial_rotary_factor": 0.5}, "phi3"),
        ({"hidden_act": "gelu"}, "llama"),
    ],
)
def test_families_of_new_models(options: dict[str, Any], kind: str) -> None:
    shape = PRESETS["tiny"].model_copy(update={"vocab_size": 300, **options})
    family, config = expressed(shape, longest=64, end=7)
    assert family.kind == kind and family.shape(config) == canonical(shape)
    assert config.eos_token_id == 7 and config.max_position_embeddings == 64


def test_a_shape_of_no_family_is_refused() -> None:
    shape = ModelShape.model_validate({**PRESETS["tiny"].model_dump(), "vocab_size": 300, "qkv_bias": True, "qk_norm": True})
    with pytest.raises(NoNativeModel, match=r"no supported family .* has models of this shape \(qwen2 lacks qk_norm True\)"):
        expressed(shape, longest=64)
