"""`train.fit_memory`: a run that would not fit changes what costs the least time, the same on all
ranks."""

from pathlib import Path

import pytest
import yaml

from longctx.cli import main
from longctx.config import Config, load
from longctx.data.store.store import Store
from longctx.memory import fitting
from longctx.memory.changes import changes_between
from longctx.memory.fitting import ROOM, RunMemory

SAVING = [
    *(
        "train.recompute=full",
        "train.offload_activations=true",
        "train.offload_optimizer=true",
        "train.mlp_tile_tokens=2048",
    ),
    *(
        "context.max_remote_tokens=2000",
        "context.two_level_exchange=false",
        "parallel.reduce_after=micro_batch",
    ),
]
"""All that saves memory."""


def settings(store: Path, *more: str) -> list[str]:
    """Settings of a run that does not keep K and V."""
    given = [
        "context.keep_kv=false",
        "batch.tokens_per_rank=2000",
        "train.steps=4",
        "data.max_length=500",
    ]
    return [
        "train.fit_memory=true",
        f"data.store={store}",
        "parallel.reshard_after=block",
        *given,
        *more,
    ]


def fit(config: Config, store: Path, ranks: int, available: int) -> Config:
    opened = Store.open(store)
    spec = config.model_source(opened.tokenizer.vocab_size).spec
    return RunMemory(spec, opened, ranks, False).fitted(config, available)


def needs(config: Config, store: Path, ranks: int) -> int:
    opened = Store.open(store)
    spec = config.model_source(opened.tokenizer.vocab_size).spec
    return RunMemory(spec, opened, ranks, False).peak(config).total


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_changes_only_as_much_as_it_must(store: Path, ranks: int) -> None:
    config = load(None, settings(store), world_size=ranks)
    total = needs(config, store, ranks)
    assert fit(config, store, ranks, int(total / ROOM) + 2) == config
    seen = set()
    for share in (0.97, 0.9, 0.8, 0.7):
        room = int(total * share)
        found = fit(config, store, ranks, int(room / ROOM))
        assert needs(found, store, ranks) <= room
        said = changes_between(config, found)
        assert said.startswith("train.fit_memory: --")
        assert (
            load(
                None, [*settings(store), *(word[2:] for word in said.split()[1:])], world_size=ranks
            )
            == found
        )
        seen.add(said)
    assert len(seen) > 1


def test_received_keys_are_kept_if_that_fits(store: Path) -> None:
    rings = ["context.mode=static", "context.degree=3"]
    config = load(
        None, [word for word in settings(store, *rings) if "keep_kv" not in word], world_size=3
    )
    keeping = config.changed({"context.keep_kv": True})
    more, less = (needs(each, store, 3) for each in (keeping, config))
    assert more > less
    assert fit(config, store, 3, int(more / ROOM) + 2) == keeping
    assert fit(config, store, 3, int(less / ROOM) + 2) == config
    written = Config.model_validate(yaml.safe_load(config.to_yaml()))  # as finetune does
    assert fit(written, store, 3, int(more / ROOM) + 2).context.keep_kv
    explicit = load(None, settings(store, *rings), world_size=3)
    assert fit(explicit, store, 3, 1 << 40) == explicit


@pytest.mark.parametrize(
    ("setting", "device", "fits"), [(None, "cpu", False), (None, "cuda", True), (True, "cpu", True)]
)
def test_on_gpus_by_default(setting: bool | None, device: str, fits: bool) -> None:
    config = Config().changed({"train.fit_memory": setting})
    assert (
        RunMemory(config.model_source().spec, None, 1, device == "cuda").may_change(config) == fits
    )


def test_less_room_is_better_than_a_refusal(store: Path) -> None:
    config = load(None, settings(store, *SAVING))
    least = needs(config, store, 1)
    more = config.changed({"train.recompute": "selective"})
    assert needs(more, store, 1) > least
    assert fit(more, store, 1, least) == config  # fills all of the memory
    assert fit(more, store, 1, 1000) == more  # and the run is refused


@pytest.mark.slow
def test_copies_of_weights_are_kept(store: Path) -> None:
    """Which ranks share weights is settled before ranks can compare their memory."""
    config = load(None, settings(store, "parallel.shard_ranks=1"), world_size=2)
    assert (
        fit(config, store, 2, int(0.6 * needs(config, store, 2) / ROOM)).parallel.shard_ranks == 1
    )


def test_a_run_trains_with_what_fits(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = settings(store, "train.steps=1", "batch.global_tokens=2000")
    config = load(None, short, world_size=1)
    monkeypatch.setattr(
        fitting, "available_bytes", lambda device, ranks: int(0.8 * needs(config, store, 1))
    )
    words = [f"--{word}" for word in short]
    assert main(["train", *words, f"--train.run_dir={tmp_path / 'run'}"]) == 0
    said = capsys.readouterr().out
    assert "\ntrain.fit_memory: --train.recompute=" in said
    header = (tmp_path / "run/config.yaml").read_text().splitlines()[1]
    assert header.startswith("# train.fit_memory: --train.recompute="), (
        "what was changed stands above the settings"
    )
    written = load(tmp_path / "run/config.yaml", [])
    assert (
        written.train.recompute != "none" and f"--train.recompute={written.train.recompute}" in said
    )
