"""Preference tuning: DPO on packed pairs is TRL's formula over unpacked documents, however the pairs are split over ranks."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from longctx.cli import main
from longctx.data.packing import StepBatch, pack_documents
from longctx.data.sampler import held_out
from longctx.data.store import Store
from longctx.planning.layout import Placement
from longctx.training.preference import Preference
from tests.data_cases import placed_plan
from tests.lora_cases import ALPHA, RANK, make_checkpoint
from tests.marks import slow_unless
from tests.preference_cases import SETTINGS, Plain, baseless, baseless_fails, make_pairs, run
from tests.training_cases import SMALL, make_store
from tests.workers import Workers

NATIVE = ["model.implementation=native", "batch.tokens_per_rank=250"]
ADAPTERS = [f"lora.rank={RANK}", f"lora.alpha={ALPHA}"]
SPLITS = {
    "alone": (1, ["batch.tokens_per_rank=500"]),
    "two ranks": (2, ["batch.tokens_per_rank=250"]),
    "three ranks": (3, ["batch.tokens_per_rank=200", "parallel.reshard_after=step"]),
    "adapters": (2, ["batch.tokens_per_rank=250", *ADAPTERS]),
    "two tensor ranks": (4, [*NATIVE, "parallel.tensor_parallel_size=2"]),
    "a pipeline": (4, [*NATIVE, "parallel.pipeline_parallel_size=2"]),
}
TOLERANCES = {"loss": 1e-5, "reward_margin": 1e-4, "reward_accuracy": 1e-9, "grad_norm": 1e-4}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def plain(checkpoint: Path, store: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    return Plain(checkpoint, store, []).train()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [(), (1.0, 1.0, 3.0, 3.0, 0.5, 0.5)])
def test_weights_give_the_gradient_of_the_loss(smoothing: float, weights: tuple[float, ...]) -> None:
    torch.manual_seed(3)
    reference = 30 * torch.randn(9, dtype=torch.float64)
    places, beta = (2, 3, 6, 7, 4, 5), 0.4
    sums = (reference[list(places)] + 5 * torch.randn(6, dtype=torch.float64)).requires_grad_()
    plan = placed_plan([2] * 6, 1, [[Placement(document, 0, 1) for document in range(6)]])
    packed, targets = pack_documents(plan, 0, [[1, 2]] * 6)
    batch = StepBatch(1, plan, tuple("abcdef"), 12, targets, tuple(packed), weights=weights, store_documents=places)
    found = Preference(beta, smoothing, reference).weights(batch, (), sums.detach())
    margin = beta * ((sums[::2] - sums[1::2]) - (reference[[2, 6, 4]] - reference[[3, 7, 5]]))
    losses = -F.logsigmoid(margin) * (1 - smoothing) - F.logsigmoid(-margin) * smoothing
    counts = torch.tensor(weights or [1.0] * 6)[::2]
    loss = (losses * counts).sum() / counts.sum()
    loss.backward()
    assert found.loss == pytest.approx(loss.item(), rel=1e-12)
    assert found.reported["reward_margin"] == pytest.approx(((margin * counts).sum() / counts.sum()).item())
    assert found.reported["reward_accuracy"] == pytest.approx(((margin > 0) * counts).sum().item() / counts.sum().item())
    assert 0 < found.reported["reward_accuracy"] < 1
    assert found.divisor == counts.sum()
    assert found.tokens is not None
    slopes = -found.tokens[0][::2] / found.divisor  # of log p, of the first token of each document
    torch.testing.assert_close(slopes.double(), sums.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("three ranks", "adapters", "a pipeline"), SPLITS))
def test_training_is_that_of_trl(
    workers: Workers,
    store: Path,
    checkpoint: Path,
    plain: tuple[list[dict[str, float]], dict[str, torch.Tensor]],
    tmp_path: Path,
    name: str,
) -> None:
    ranks, settings = SPLITS[name]
    found = workers.run(run, ranks, store, tmp_path, [f"model.from_pretrained={checkpoint}", *settings])
    wanted, gradients = plain
    if name == "adapters":
        wanted, gradients = Plain(checkpoint, store, [], adapters=found[0]["first"]).train()
    rows = found[0]["rows"]
    assert ranks == 1 or found[0]["split"], "no document was split"
    for key, tolerance in TOLERANCES.items():
        got, expected = ([row[key] for row in of] for of in (rows, wanted))
        if key == "reward_accuracy":  # all margins are 0 in the first step, but for rounding
            del got[0], expected[0]
        assert got == pytest.approx(expected, rel=tolerance, abs=tolerance), key
    if name != "adapters":  # however the weights are split, a run that resumes on other ranks finds them the same
        with np.load(tmp_path / "reference.npz") as kept:
            norm = json.loads(str(kept["about"]))["weights"]
        squares = [weight.double().square().sum() for weight in load_file(checkpoint / "model.safetensors").values()]
        assert norm == pytest.approx(float(torch.stack(squares).sum().sqrt()), rel=1e-12)
    assert rows[0]["reward_margin"] == pytest.approx(0, abs=1e-4) and rows[-1]["reward_margin"] > 0.05
    if settings[0] not in NATIVE or name == "adapters":
        assert found[0]["gradients"].keys() == gradients.keys()
        for key, gradient in gradients.items():
            error = float((found[0]["gradients"][key].double() - gradient).norm() / gradient.norm())
            assert error < 1e-4, (key, error)


def test_a_run_resumes_bit_by_bit_and_reads_the_reference(
    workers: Workers, store: Path, checkpoint: Path, tmp_path: Path
) -> None:
    settings = [f"model.from_pretrained={checkpoint}", "batch.tokens_per_rank=250"]
    whole = workers.run(run, 2, store, tmp_path / "run", settings)[0]
    assert whole["computed"]
    kept = (tmp_path / "run" / "reference.npz").read_bytes()
    shutil.copytree(tmp_path / "run", tmp_path / "others", symlinks=True)
    for folder in ("run", "others"):
        shutil.rmtree(tmp_path / folder / "checkpoints" / "step-000004")
    again = workers.run(run, 2, store, tmp_path / "run", settings, True)[0]
    assert not again["computed"] and (tmp_path / "run" / "reference.npz").read_bytes() == kept
    for key in ("loss", "reward_margin", "grad_norm"):
        assert [row[key] for row in again["rows"]] == [row[key] for row in whole["rows"]]
    assert all(torch.equal(again["last"][name], weight) for name, weight in whole["last"].items())
    split = [f"model.from_pretrained={checkpoint}", "batch.tokens_per_rank=200"]
    on_three = workers.run(run, 3, store, tmp_path / "others", split, True)[0]
    assert not on_three["computed"] and on_three["split"]
    assert [row["loss"] for row in on_three["rows"]] == pytest.approx([row["loss"] for row in whole["rows"]], rel=1e-5)


def test_pairs_that_a_longer_run_takes_are_computed_by_the_first_weights(
    workers: Workers, store: Path, checkpoint: Path, tmp_path: Path
) -> None:
    settings = [f"model.from_pretrained={checkpoint}", "batch.tokens_per_rank=500", "batch.global_tokens=200"]
    settings += ["data.max_length=300", "data.long_documents=drop"]
    wanted = workers.run(run, 1, store, tmp_path / "long", settings)[0]
    short = [*settings, "train.steps=2"]
    workers.run(run, 1, store, tmp_path / "short", short)
    reference = np.load(tmp_path / "short" / "reference.npz")["sums"]
    found = workers.run(run, 1, store, tmp_path / "short", settings, True)[0]
    after = np.load(tmp_path / "short" / "reference.npz")["sums"]
    assert "reference log-probabilities: 2 of 2 pairs" in found["said"]
    assert found["computed"] and 0 < np.isnan(after).sum() < np.isnan(reference).sum()
    np.testing.assert_array_equal(after, np.load(tmp_path / "long" / "reference.npz")["sums"])
    assert all(row["reward_margin"] is not None for row in found["rows"]) and len(found["rows"]) == len(wanted["rows"])


def test_a_reference_of_other_weights_is_refused_or_made_anew(
    workers: Workers, store: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """Runs whose checkpoints say what they began from refuse other weights before; those of earlier versions do not."""
    mine = tmp_path / "mine"
    shutil.copytree(checkpoint, mine)
    settings = [f"model.from_pretrained={mine}", "batch.tokens_per_rank=500", "train.steps=2"]
    workers.run(baseless, 1, store, tmp_path / "run", settings)
    (weights,) = mine.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["model.norm.weight"] += 0.01
    save_file(tensors, weights, metadata={"format": "pt"})
    assert not workers.run(baseless, 1, store, tmp_path / "run", settings, True)[0]["computed"], (
        "nothing is wanted of other weights"
    )
    assert (
        "the initial weights have changed: restore them"
        in workers.run(baseless_fails, 1, store, tmp_path / "run", [*settings, "train.steps=4"], True)[0]
    )
    more = [*settings, "train.steps=4", "train.dtype=bfloat16"]
    assert "train.dtype is bfloat16, but was float32" in workers.run(baseless_fails, 1, store, tmp_path / "run", more, True)[0]
    (tmp_path / "new").mkdir()
    shutil.copy(tmp_path / "run" / "reference.npz", tmp_path / "new")
    assert workers.run(baseless, 1, store, tmp_path / "new", settings)[0]["computed"]
    damaged = tmp_path / "new" / "reference.npz"
    damaged.write_bytes(damaged.read_bytes()[:100])
    shutil.rmtree(tmp_path / "new" / "checkpoints")
    (tmp_path / "new" / "latest").unlink()
    assert workers.run(baseless, 1, store, tmp_path / "new", settings)[0]["computed"]


def test_another_store_of_validation_after_a_resume(workers: Workers, store: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Its reference comes from the initial weights, which must be there, and not from those of the checkpoint."""
    mine, other = tmp_path / "mine", make_pairs(tmp_path, ((25, 31, 47), (12, 90, 33)))
    shutil.copytree(checkpoint, mine)
    settings = [f"model.from_pretrained={mine}", "batch.tokens_per_rank=500", "eval.every=2"]
    expected = workers.run(baseless, 1, store, tmp_path / "whole", [*settings, f"eval.store={other}"])[0]["rows"][-1]
    for folder, first in (("run", [*settings, f"eval.store={store}"]), ("late", settings[:2])):
        workers.run(baseless, 1, store, tmp_path / folder, first)
        shutil.rmtree(tmp_path / folder / "checkpoints" / "step-000004")
        found = workers.run(baseless, 1, store, tmp_path / folder, [*settings, f"eval.store={other}"], True)[0]["rows"][-1]
        for key in ("validation_loss", "validation_accuracy", "validation_tokens"):
            assert found[key] == expected[key]
    workers.run(baseless, 1, store, tmp_path / "refused", [*settings[:2], "train.steps=2"])
    (weights,) = mine.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["model.norm.weight"] += 0.01
    save_file(tensors, weights, metadata={"format": "pt"})
    late = [*settings, "train.steps=3", f"eval.store={other}"]
    assert "the initial weights have changed" in workers.run(baseless_fails, 1, store, tmp_path / "refused", late, True)[0]


APART = ["eval.every=1", "train.steps=2", "data.held_out=0.4"]


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [pytest.param(1, ["batch.tokens_per_rank=500"], marks=pytest.mark.slow), (3, ["batch.tokens_per_rank=200"])],
    ids=["alone", "three ranks"],
)
def test_pairs_that_are_set_apart_are_validated_by_the_same_loss(
    workers: Workers, store: Path, checkpoint: Path, tmp_path: Path, ranks: int, settings: list[str]
) -> None:
    source = f"model.from_pretrained={checkpoint}"
    names = list(Store.open(store).names)
    chosen = [number for number in range(0, len(names), 2) if held_out([names[number].removesuffix("#chosen")], 0.4)[0]]
    assert 1 < len(chosen) < len(names) // 2 - 1
    apart = held_out(names, 0.4)
    assert apart.nonzero()[0].tolist() == sorted([*chosen, *(number + 1 for number in chosen)])
    found = workers.run(run, ranks, store, tmp_path / "own", [source, *settings, *APART])[0]
    rows = [row for row in found["rows"] if row["validation_loss"] is not None]
    assert [row["step"] for row in rows] == [1, 2]
    expected = Plain(checkpoint, store, []).after(found["last"], chosen)
    assert [rows[-1][key] for key in ("validation_loss", "validation_accuracy")] == pytest.approx(expected, rel=1e-5)
    assert rows[-1]["validation_tokens"] == int(Store.open(store).trained_tokens[apart].sum())
    other = [source, *settings, "eval.every=2", "train.steps=2", f"eval.store={store}", "eval.documents=3"]
    found = workers.run(run, ranks, store, tmp_path / "other", other)[0]
    expected = Plain(checkpoint, store, []).after(found["last"], [0, 2])
    row = found["rows"][-1]
    assert [row[key] for key in ("validation_loss", "validation_accuracy")] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["dpo.beta=null", "dpo.label_smoothing=0"], "contains preference pairs, but dpo.beta is null"),
        (["data.store={texts}"], "contains no preference pairs"),
        (["eval.every=1", "eval.store={texts}"], "eval.store {texts} contains no preference pairs"),
        (["dpo.beta=null"], "it has no effect without DPO"),
        (["data.max_length=150"], "set data.long_documents to drop"),
    ],
)
@pytest.mark.parametrize("command", [["train"], ["train", "--dry-run"]])
def test_what_cannot_be_is_refused_before_anything_starts(
    store: Path, tmp_path: Path, command: list[str], settings: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = make_store(tmp_path, (60, 110))
    run_dir = tmp_path / "run"
    given = [*SMALL, *SETTINGS[5:], f"data.store={store}", f"train.run_dir={run_dir}", "batch.tokens_per_rank=500"]
    given += [one.format(texts=texts) for one in settings]
    assert main([*command, *(f"--{one}" for one in given)]) == 2
    assert words.format(texts=texts) in capfd.readouterr().err
    assert not list(run_dir.glob("*.npz"))


def test_other_commands_on_pairs(store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path, "llama", vocab_size=257)
    assert main(["plan", "--lengths", str(store), "--ranks", "2", "--tokens-per-rank", "250"]) == 0
    assert main(["compare", "--lengths", str(store), "--ranks", "2", "--tokens-per-rank", "250"]) == 0
    assert main(["eval", str(folder), "--store", str(store)]) == 2
    assert "contains preference pairs, which `longctx eval` does not support" in capfd.readouterr().err
    (tmp_path / "run.yaml").write_text(f"data: {{store: {store}}}\ndpo: {{beta: 0.1}}\n")
    assert main(["measure", str(tmp_path / "run.yaml")]) == 2
    assert "`longctx measure` does not support DPO" in capfd.readouterr().err
