"""The cluster of modelled devices: visible pairs, ratios of the dilated profile, the table; a run
where root may make it."""

import json
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cluster
import modelled
from longctx.attention import RingSchedule, ring_pass
from longctx.attention.segments import Segment, visible
from longctx.comparison.baselines import place_fixed_static
from longctx.comparison.mixes import load_mix
from longctx.planning.cost.bounds import plan_cost
from longctx.planning.cost.model import NANOSECONDS, attention_ns, score
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import Layout, Placement
from tests.bench.test_cluster import needs_namespaces


@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.none() | st.integers(-10, 12)),
        max_size=4,
    )
)
def test_visible_pairs(shapes: list[tuple[int, int, int | None]]) -> None:
    segments = [Segment(3, 3 + queries, 5, 5 + keys, None, hi) for queries, keys, hi in shapes]
    assert modelled.pairs(segments) == sum(
        int(visible(each, torch.device("cpu")).sum()) for each in segments
    )


@pytest.mark.parametrize(("dilation", "smaller"), [(25.0, 4096.0), (3.0, 7.0)])
def test_all_ratios_are_those_of_the_profile(dilation: float, smaller: float) -> None:
    """The same plan takes `dilation` times as long."""
    h100 = replace(HardwareProfile.load("h100-nvlink-ib"), latency_s=0.0)
    here = cluster.dilated(h100, dilation, smaller, h100.kv_bytes_per_token / smaller)
    lengths = np.array(load_mix("wlb_128k").draw(64, 1))
    assignment = place_fixed_static(h100, lengths, 16, 16384, 16)
    costs = [
        plan_cost(score(profile, lengths, assignment, 16), profile, lengths, 16384)
        for profile in (h100, here)
    ]
    assert costs[0].exposed_share > 0
    for name in ("makespan_s", "lower_bound_s"):
        assert getattr(costs[1], name) == pytest.approx(
            dilation * getattr(costs[0], name), rel=1e-6
        )
    assert costs[1].exposed_share == pytest.approx(costs[0].exposed_share, rel=1e-3)


def test_every_schedule_has_its_own_time_per_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it lies at the address of one that was freed."""
    profile = HardwareProfile.load("h100-nvlink-ib")
    device = SimpleNamespace(profile=profile, layers=2, s_per_pair=0.0)
    monkeypatch.setattr(ring_pass.RingPass, "__init__", lambda *_: None)
    modelled._watch_passes(device)  # type: ignore[arg-type]
    begin: Any = ring_pass.RingPass.__init__
    for length in range(100, 4000, 100):
        schedule = RingSchedule.build(Layout.of([Placement(0, 0, 1)], [length], 0, 0))
        begin(None, SimpleNamespace(schedule=schedule))
        seconds = attention_ns(profile, np.array([length]), np.array([1])).sum() / NANOSECONDS
        assert device.s_per_pair == pytest.approx(seconds / 2 / (length * (length + 1) / 2))
        del schedule


@pytest.mark.slow
@needs_namespaces
def test_a_run_of_two_nodes() -> None:
    """Steps take about the predicted time, and the loss does not depend on the mode."""
    arguments = Namespace(
        nodes=2,
        ranks_per_node=1,
        mix="wlb_128k",
        documents_a_rank=2,
        dilation=3.0,
        rival="megatron-dev",
        seed=0,
        steps=1,
    )
    vars(arguments).update(
        warmup=1, modes="auto,bins,static:2", settings=["data.long_documents=drop"], timeout=600
    )
    with ExitStack() as stack:
        result = json.loads(json.dumps(cluster.run(arguments, stack)))
    measured = result["measured"]
    assert [mode["mode"] for mode in measured["modes"]] == ["auto", "megatron-dev", "static:2"]
    assert measured["losses_equal"]
    assert all(-0.5 < mode["prediction_error"] < 0.1 for mode in measured["modes"])
    assert "| megatron-dev |" in cluster.page([result])
