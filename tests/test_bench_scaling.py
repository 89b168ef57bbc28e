"""bench/scaling.py: a small setting, and the page of its rows."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import pytest

import scaling
from longctx.comparison.baselines import fixed_degree, place_fixed_static
from longctx.comparison.mixes import load_mix
from longctx.comparison.splits.cost import Machine, profile_of
from longctx.comparison.splits.search import memory_of, possible_splits
from longctx.errors import UserError
from longctx.planning.cost.model import score
from longctx.planning.cost.rounds import choose_rounds
from longctx.planning.plan import PlanError

pytestmark = pytest.mark.slow


def test_a_node_of_eight() -> None:
    machine = Machine.load(scaling.PROFILE)
    row = scaling.predict(machine, "8B", 8, seeds=2)
    assert row.tp * row.pp * row.domain == row.gpus == 8
    assert row.documents == 32
    assert 0.3 < row.static_mfu <= row.mfu < 0.55
    assert row.static_step_s / row.step_s == pytest.approx(row.mfu / row.static_mfu), "the same documents"
    assert row.static_degree * row.tokens_per_rank >= load_mix(scaling.MIX).longest, "also of documents that are not drawn"
    assert row.static_step_s == pytest.approx(min(static_times_s(machine)))
    with pytest.raises(UserError, match="no split of 8 GPUs can hold this model"):
        scaling.predict(machine, "1T", 8)
    found = {name: str(value) for name, value in asdict(row).items()} | {"refused": ""}
    page = scaling.page([{**found, "model": "1T", "refused": "too large"}, found], {"command": "python ..."})
    assert f"| 8B | 8 | 0.1M | {row.tp} × {row.pp} × {row.domain} |" in page
    assert f"**{row.speedup:.2f}×**" in page
    assert "Too few GPUs, whatever the split: 1T on 8." in page


def static_times_s(machine: Machine) -> Iterator[float]:
    """Times of fixed static for the 8B model on every split of 8 GPUs that fits."""
    spec = scaling.MODELS["8B"].model_copy(update={"vocab_size": scaling.LLAMA_3_VOCABULARY}).spec
    mix = load_mix(scaling.MIX)
    steps = [np.array(mix.draw(32, seed), dtype=np.int64) for seed in range(2)]
    for split in possible_splits(spec, 8, 8):
        with contextlib.suppress(PlanError):
            degree = fixed_degree(mix.longest, split.domain, split.tokens_per_rank)
            profile = profile_of(machine, spec, split)
            times = []
            for lengths in steps:
                plan = place_fixed_static(profile, lengths, split.domain, split.tokens_per_rank, degree)
                if memory_of(machine, spec, split, mix.longest, plan.micro_batches).total <= machine.memory_bytes:
                    plain = score(profile, lengths, plan, split.domain, split.pipeline)
                    times.append(choose_rounds(profile, lengths, plan, plain, split.max_remote_tokens)[1].makespan_ns / 1e9)
            if len(times) == len(steps):
                yield sum(times) / len(times)
