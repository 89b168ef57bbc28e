"""Checks before a start: whatever is wrong is refused in words, alone and in pairs, by dry runs,
estimates and trainings."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longctx import cli
from longctx.errors import UserError
from longctx.training.checks import check_exportable
from tests.training_cases import SMALL
from tests.weight_cases import make_store, records

BROKEN = {
    "weights of tokens": (
        ["data.merge_prefixes=true"],
        "data.merge_prefixes is true, but data.store",
    ),
    "a group that matches nothing": (
        ["optimizer.groups=[{match: nothing}]"],
        "optimizer.groups has match nothing",
    ),
    "no family": (
        [
            "checkpoint.export={run}/out",
            "model.overrides.qkv_bias=true",
            "model.overrides.qk_norm=true",
            "model.overrides.num_experts=2",
        ],
        "no supported family of transformers has models of this shape",
    ),
    "W&B": (["log.wandb=project"], "wandb"),
    "a kernel of GPUs": (["context.kernel=triton"], "triton runs on GPUs"),
    "too little memory": (["model.vocab_size=2000000000"], "peak memory would be"),
}
"""Settings that a check refuses on a store with weights of tokens, and what it says."""
OF_THIS_MACHINE = ("W&B", "a kernel of GPUs", "too little memory")
"""Of these a dry run says nothing."""


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("checks"), records())


def said(
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    store: Path,
    run: Path,
    names: tuple[str, ...],
) -> str:
    """Returns what a command with these broken settings prints to standard error; it must refuse
    them."""
    settings = [setting for name in names for setting in BROKEN[name][0]]
    everything = [*SMALL, f"data.store={store}", f"train.run_dir={run}", *settings]
    overrides = [f"--{setting}".replace("{run}", str(run)) for setting in everything]
    status = cli.main([*command, *overrides])
    printed = capsys.readouterr()
    assert status == 2, (names, printed.out)
    assert not run.exists()
    return printed.err


@pytest.mark.parametrize("names", list(itertools.combinations(BROKEN, 2)), ids=" and ".join)
def test_pairs_are_refused_in_words(
    capsys: pytest.CaptureFixture[str], weighted: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Memory, which plans steps, comes last, and only if nothing else is wrong."""
    text = said(capsys, ["train"], weighted, tmp_path / "run", names)
    for name in names:
        told = BROKEN[name][1] in text
        assert told == (name != "too little memory"), text
    seen = tuple(name for name in names if name not in OF_THIS_MACHINE)
    if seen:
        text = said(capsys, ["train", "--dry-run"], weighted, tmp_path / "run", names)
        assert all(BROKEN[name][1] in text for name in seen), text


@pytest.mark.parametrize("name", BROKEN)
def test_each_alone_is_refused_in_words(
    capsys: pytest.CaptureFixture[str], weighted: Path, tmp_path: Path, name: str
) -> None:
    assert BROKEN[name][1] in said(capsys, ["train"], weighted, tmp_path / "run", (name,))


def test_adapters_with_another_rope_have_no_export() -> None:
    config: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(export=Path("out")),
        lora=SimpleNamespace(rank=4),
        model=SimpleNamespace(changed_rope={"rope_theta": 1e6}),
        train=SimpleNamespace(run_dir=Path("run")),
    )
    with pytest.raises(
        UserError, match=r"adapters cannot carry the changed RoPE .*longctx export run OUT --merge"
    ):
        check_exportable(config)


def test_an_estimate_of_a_store_with_weights_is_refused_alike(
    capsys: pytest.CaptureFixture[str], weighted: Path, tmp_path: Path
) -> None:
    """It plans the first steps of the store."""
    text = said(capsys, ["estimate"], weighted, tmp_path / "run", ("weights of tokens",))
    assert BROKEN["weights of tokens"][1] in text
