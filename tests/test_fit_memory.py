"""`train.fit_memory`: a run that would not fit changes what costs the least time, the same on all ranks."""

from pathlib import Path

import pytest
import yaml

from longctx.cli import main
from longctx.config import Config, load
from longctx.data.store import Store
from longctx.memory import advisor
from longctx.memory.advisor import ROOM, changed, changes_said, fitted, heaviest
from longctx.memory.model import estimate

STAGES = {"batch": {"tokens_per_rank": 2000}, "stages": [{"steps": 2}, {"steps": 2, "batch": {"tokens_per_rank": 4000}}]}

SAVING = [
    *("train.recompute=full", "train.offload_activations=true", "train.offload_optimizer=true", "train.mlp_tile_tokens=2048"),
    *("context.max_remote_tokens=2000", "context.two_level_exchange=false", "parallel.reduce_after=micro_batch"),
]
"""All that saves memory."""


def settings(store: Path, *more: str) -> list[str]:
    """Settings of a run that does not keep K and V."""
    given = [
        "context.keep_kv=false",
        "batch.tokens_per_rank=2000",
        "train.steps=4",
        "data.max_length=500",
        "parallel.reshard_after=block",
    ]
    return ["train.fit_memory=true", f"data.store={store}", *given, *more]


def needs(config: Config, store: Path, ranks: int) -> int:
    opened = Store.open(store)
    spec = config.model_source(opened.tokenizer.vocab_size).spec
    return estimate(spec, config, ranks, heaviest(config, opened, ranks), fused=False).total


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_run_changes_only_as_much_as_it_must(store: Path, ranks: int) -> None:
    config = load(None, settings(store), world_size=ranks)
    assert fitted(config, ranks, None, fused=False) == config
    total = needs(config, store, ranks)
    assert fitted(config, ranks, int(total / ROOM) + 2, fused=False) == config
    seen = set()
    for share in (0.97, 0.9, 0.8, 0.7):
        room = int(total * share)
        found = fitted(config, ranks, int(room / ROOM), fused=False)
        assert needs(found, store, ranks) <= room
        said = changes_said(config, found)
        assert said.startswith("train.fit_memory: --")
        assert load(None, [*settings(store), *(word[2:] for word in said.split()[1:])], world_size=ranks) == found
        seen.add(said)
    assert len(seen) > 1


def test_received_keys_are_kept_if_that_fits(store: Path) -> None:
    rings = ["context.mode=static", "context.degree=3"]
    config = load(None, [word for word in settings(store, *rings) if "keep_kv" not in word], world_size=3)
    keeping = changed(config, [("context.keep_kv", True)])
    more, less = (needs(each, store, 3) for each in (keeping, config))
    assert more > less
    assert fitted(config, 3, int(more / ROOM) + 2, fused=False) == keeping
    assert fitted(config, 3, int(less / ROOM) + 2, fused=False) == config
    written = Config.model_validate(yaml.safe_load(config.to_yaml()))  # as finetune does
    assert fitted(written, 3, int(more / ROOM) + 2, fused=False).context.keep_kv
    explicit = load(None, settings(store, *rings), world_size=3)
    assert fitted(explicit, 3, 1 << 40, fused=False) == explicit


def test_on_gpus_by_default(store: Path) -> None:
    config = load(None, [word for word in settings(store) if word.split("=")[0] not in ("train.fit_memory", "context.keep_kv")])
    assert fitted(config, 1, 1 << 40, fused=False) == config
    assert fitted(config, 1, 1 << 40, fused=True).context.keep_kv


def test_less_room_is_better_than_a_refusal(store: Path) -> None:
    config = load(None, settings(store, *SAVING))
    least = needs(config, store, 1)
    more = changed(config, [("train.recompute", "selective")])
    assert needs(more, store, 1) > least
    assert fitted(more, 1, least, fused=False) == config  # fills all of the memory
    assert fitted(more, 1, 1000, fused=False) == more  # and the run is refused


def test_all_stages_fit(store: Path, tmp_path: Path) -> None:
    """The second stage has twice the tokens per rank."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(STAGES))
    config = load(tmp_path / "run.yaml", [word for word in settings(store) if not word.startswith(("train.steps", "batch"))])
    available = int(needs(config.at_stage(0), store, 1) / ROOM) + 2
    assert needs(config.at_stage(1), store, 1) > available
    found = fitted(config, 1, available, fused=False)
    assert all(needs(found.at_stage(number), store, 1) <= available for number in range(2))


def test_a_stage_that_sets_what_must_change(store: Path, tmp_path: Path) -> None:
    """The change is made in the stage, whose settings replace those of the run, and no other stage becomes slower."""
    slow = {"steps": 2, "batch": {"tokens_per_rank": 4000}, "train": {"mlp_tile_tokens": None}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**STAGES, "stages": [{"steps": 2}, slow]}))
    config = load(tmp_path / "run.yaml", [word for word in settings(store) if not word.startswith(("train.steps", "batch"))])
    room = int(needs(changed(config.at_stage(1), [("train.recompute", "full")]), store, 1)) + 2
    assert needs(config.at_stage(0), store, 1) <= room < needs(config.at_stage(1), store, 1)
    found = fitted(config, 1, int(room / ROOM) + 2, fused=False)
    assert needs(found.at_stage(1), store, 1) <= room and found.at_stage(0) == config.at_stage(0)
    assert changes_said(config, found) == "train.fit_memory: stage 2: train.mlp_tile_tokens=2048"


def test_copies_of_weights_are_kept(store: Path) -> None:
    """Which ranks share weights is settled before ranks can compare their memory."""
    config = load(None, settings(store, "parallel.shard_ranks=1"), world_size=2)
    total = needs(config, store, 2)
    for share in (0.9, 0.6):
        assert fitted(config, 2, int(total * share / ROOM), fused=False).parallel.shard_ranks == 1


def test_a_run_trains_with_what_fits(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(None, settings(store, "train.steps=1"), world_size=1)
    monkeypatch.setattr(advisor, "available_bytes", lambda device, ranks: int(0.8 * needs(config, store, 1)))
    words = [f"--{word}" for word in settings(store, "train.steps=1")]
    assert main(["train", *words, f"--train.run_dir={tmp_path / 'run'}"]) == 0
    said = capsys.readouterr().out
    assert "\ntrain.fit_memory: --train.recompute=" in said
    written = load(tmp_path / "run/config.yaml", [])
    assert written.train.recompute != "none" and f"--train.recompute={written.train.recompute}" in said
