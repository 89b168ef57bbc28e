"""Multi-token prediction: against the formulas of DeepSeek-V3, over every kind of split, in checkpoints and in errors."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.config import ConfigError, load
from longctx.data import IGNORED_LABEL
from longctx.data.packing import pack_documents
from longctx.planning.layout import Placement
from longctx.training.metrics import StepMetrics
from longctx.training.saved.export import export
from tests.data_cases import placed_plan
from tests.marks import examples
from tests.multi_token_cases import FACTOR, TINY_MTP, decoder, document, in_one_buffer
from tests.training_cases import make_store, train, train_and_save
from tests.workers import Workers

LENGTHS = st.lists(st.integers(1, 13), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"), (100, 200, 590, 150))


@pytest.mark.parametrize("options", [{}, {"num_experts": 3, "first_dense_layers": 1, "tie_word_embeddings": True}])
@given(lengths=LENGTHS, blocks=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=examples(15), deadline=None)
def test_loss_and_gradients_are_those_of_the_paper(
    options: dict[str, object], lengths: list[int], blocks: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(23, (length,), generator=generator) for length in lengths]
    wanted = [each.where(torch.rand(len(each), generator=generator) < 0.8, IGNORED_LABEL) for each in documents]
    shifted = [torch.cat([label[1:], torch.tensor([IGNORED_LABEL])]) for label in wanted]
    made = decoder(blocks, **options)

    targets = max(1, sum(int((label != IGNORED_LABEL).sum()) for label in shifted))
    sums = [document(made, *each) for each in zip(documents, shifted, strict=True)]
    main, later = (sum(column) / targets for column in zip(*sums, strict=True))
    (main + FACTOR / blocks * later).backward()
    expected = {name: weight.grad for name, weight in made.named_parameters()}
    made.zero_grad()

    loss, mtp_loss = in_one_buffer(made, documents, wanted)
    loss.backward()
    torch.testing.assert_close(loss.detach(), main.detach())
    assert mtp_loss == pytest.approx(float(later.detach()) / blocks, abs=1e-9)
    for name, weight in made.named_parameters():
        gradient = torch.zeros_like(weight) if expected[name] is None else expected[name]
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-7, atol=1e-9, msg=name)


@given(lengths=LENGTHS, ranks=st.integers(1, 4), ahead=st.integers(0, 3), multiple=st.integers(1, 5))
@settings(max_examples=examples(50), deadline=None)
def test_later_tokens_are_those_of_the_document(lengths: list[int], ranks: int, ahead: int, multiple: int) -> None:
    documents = [torch.arange(length) + 100 * number for number, length in enumerate(lengths, start=1)]
    plan = placed_plan(lengths, ranks, [[Placement(number, 0, ranks)] for number in range(len(lengths))])
    for rank in range(ranks):
        batches, _ = pack_documents(plan, rank, documents, pad_to_multiple_of=multiple, ahead=ahead)
        for batch in batches:
            assert batch.later_tokens.shape == batch.later_labels.shape == (len(batch.tokens), ahead)
            owned = batch.tokens > 0
            for further in range(ahead):
                there = batch.positions + further + 1 < torch.tensor(lengths)[(batch.tokens // 100 - 1).clamp(min=0)]
                later = batch.tokens + further + 1
                assert torch.equal(batch.later_tokens[:, further], later.where(owned & there, 0))
                labelled = batch.later_tokens[:, further].where(owned & there, IGNORED_LABEL)
                expected = batch.labels if further == 0 else None
                if further:  # the label of a token is the next token
                    assert torch.equal(batch.later_labels[:, further - 1], labelled)
                else:
                    assert expected is not None and torch.equal(expected, labelled)


SPLITS = {
    "2 auto": (2, ["batch.tokens_per_rank=400"]),
    "3 static": (3, ["context.mode=static", "context.degree=3", "batch.tokens_per_rank=300", "train.recompute=selective"]),
    "2 tensor ranks": (2, ["parallel.tensor_parallel_size=2", "batch.tokens_per_rank=602", "train.recompute=norms"]),
    "2 tiles, gathered all step": (
        2,
        ["batch.tokens_per_rank=400", "parallel.reshard_after=step", "train.mlp_tile_tokens=64", "train.recompute=full"],
    ),
}
MOE = ["model.num_experts=4", "model.moe_intermediate_size=24", "model.num_key_value_heads=2"]


@pytest.fixture(scope="module")
def alone(workers: Workers, store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[StepMetrics]]:
    """Two steps of one process, without and with experts."""
    one = [*TINY_MTP, "batch.tokens_per_rank=600", "context.mode=static", "model.num_key_value_heads=2"]
    folder = tmp_path_factory.mktemp("alone")
    return {
        experts: workers.run(train, 1, store, folder / str(experts), [*one, *MOE * experts], 2)[0] for experts in (False, True)
    }


def assert_same(steps: list[StepMetrics], alone: list[StepMetrics]) -> None:
    for mine, right in zip(steps, alone, strict=True):
        assert right.mtp_loss is not None
        assert mine.loss == pytest.approx(right.loss, rel=1e-5)
        assert mine.mtp_loss == pytest.approx(right.mtp_loss, rel=1e-5)
        assert mine.grad_norm == pytest.approx(right.grad_norm, rel=1e-4)


@pytest.mark.parametrize("name", SPLITS)
def test_training_is_the_same_however_it_is_split(
    workers: Workers, store: Path, alone: dict[bool, list[StepMetrics]], tmp_path: Path, name: str
) -> None:
    ranks, changed = SPLITS[name]
    given = [*TINY_MTP, "model.num_key_value_heads=2", *changed]
    assert_same(workers.run(train, ranks, store, tmp_path, given, 2)[0], alone[False])


def test_training_with_experts_on_other_ranks(
    workers: Workers, store: Path, alone: dict[bool, list[StepMetrics]], tmp_path: Path
) -> None:
    given = [*TINY_MTP, *MOE, "batch.tokens_per_rank=400", "parallel.expert_parallel_size=2"]
    assert_same(workers.run(train, 2, store, tmp_path, given, 2)[0], alone[True])


def test_exports_are_without_the_blocks(workers: Workers, store: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    workers.run(train_and_save, 1, store, tmp_path / "run", [*TINY_MTP, "batch.tokens_per_rank=600", "train.steps=1"])
    done = export(tmp_path / "run", tmp_path / "out")
    assert done.said.endswith("; 2 of multi-token prediction left out")
    _, found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]


def test_learned_positions_are_refused() -> None:
    with pytest.raises(ConfigError, match="position_embeddings to rope"):
        load(None, ["model.preset=tiny-gpt", "model.num_nextn_predict_layers=1"])
