"""The examples for other trainers, by the packages themselves where they are installed, else by
stand-ins."""

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from longctx.attention import RingAttention
from longctx.comparison.baselines import plan_placed
from longctx.comparison.mixes import load_mix, mix_names
from longctx.planning.assignment import Assignment
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import Layout, Placement
from longctx.planning.plan import PlanError
from longctx.planning.planners.planner import make_plan
from longctx.planning.planners.planning_input import PlanningInput
from rivals import RIVALS
from tests.marks import examples
from tests.workers import Workers

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "integrations"
H100 = HardwareProfile.load("h100-nvlink-ib")


def load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


# --- Megatron's scheduler


def megatron_is_installed() -> bool:
    """Whether the scheduler is; releases up to megatron-core 0.19.2 do not have it."""
    try:
        return hasattr(
            importlib.import_module("megatron.core.datasets.data_schedule"),
            "DefaultDynamicCPScheduler",
        )
    except ImportError:
        return False


def stand_in() -> dict[str, ModuleType]:
    """Modules with what the example uses of Megatron's: the constructor of its scheduler, and its
    map."""

    class DefaultDynamicCPScheduler:
        def __init__(
            self,
            max_seqlen_per_dp_cp_rank: int,
            cp_size: int,
            dp_size: int,
            microbatch_group_size_per_vp_stage: int | None,
            max_num_seqs: int | None = None,
            min_cp_size: int = 1,
        ) -> None:
            self.max_seqlen_per_dp_cp_rank, self.min_cp_size = (
                max_seqlen_per_dp_cp_rank,
                min_cp_size,
            )
            self.cp_size, self.dp_size = cp_size, dp_size
            self.microbatch_group_size_per_vp_stage, self.max_num_seqs = (
                microbatch_group_size_per_vp_stage,
                max_num_seqs,
            )

    names = [
        "megatron",
        "megatron.core",
        "megatron.core.datasets",
        "megatron.core.datasets.data_schedule",
    ]
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    schedule = modules["megatron.core.datasets.data_schedule"]
    schedule.DefaultDynamicCPScheduler, schedule.scheduler_map = DefaultDynamicCPScheduler, {}
    modules["megatron.core.datasets"].data_schedule = schedule
    return modules


@pytest.fixture(scope="module")
def megatron() -> Iterator[Any]:
    """The example, over Megatron's own scheduler if it is installed."""
    with pytest.MonkeyPatch.context() as patch:
        if not megatron_is_installed():
            for name, module in stand_in().items():
                patch.setitem(sys.modules, name, module)
        schedule = sys.modules["megatron.core.datasets.data_schedule"]
        # use_longctx replaces it.
        patch.setattr(schedule, "DefaultDynamicCPScheduler", schedule.DefaultDynamicCPScheduler)
        patch.setattr(schedule, "scheduler_map", dict(schedule.scheduler_map))
        example = load("megatron_scheduler")
        example.use_longctx(H100)
        yield example


def groups_of(row: list[list[int]]) -> list[tuple[int, list[int]]]:
    """Size and documents of each group, read as Megatron does: from rank 0 on, by the first
    document of a rank."""
    groups, rank = [], 0
    while rank < len(row):
        size = sum(row[rank][0] in documents for documents in row)
        assert size & (size - 1) == 0 and rank % size == 0, (
            "Megatron has groups of powers of two, aligned"
        )
        assert all(row[rank + other] == row[rank] for other in range(size))
        groups.append((size, row[rank]))
        rank += size
    return groups


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8, 32]),
    st.sampled_from([1, 2]),
    st.lists(st.one_of(st.integers(1, 4096), st.integers(1, 40_000)), min_size=1, max_size=60),
)
def test_megatron_gets_groups_that_it_can_run(
    megatron: Any, ranks: int, least: int, lengths: list[int]
) -> None:
    tokens_per_rank, least = 4096, min(least, ranks)
    lengths = [min(length, ranks * tokens_per_rank) for length in lengths]
    schedule = sys.modules["megatron.core.datasets.data_schedule"]
    scheduler = schedule.scheduler_map["default_dynamic_cp"](
        tokens_per_rank, 1, ranks, None, min_cp_size=least
    )
    ids = [3 * number + 1 for number in range(len(lengths))]
    rows = scheduler.get_groups_and_subsamples(list(zip(ids, lengths, strict=True)))
    assert (
        sorted(
            document for row in rows for _, documents in groups_of(row) for document in documents
        )
        == ids
    )
    for row in rows:
        assert len(row) == ranks
        for size, documents in groups_of(row):
            assert size >= least
            assert (
                sum(lengths[ids.index(document)] for document in documents)
                <= size * tokens_per_rank
            )


@pytest.mark.parametrize("mix", mix_names())
@pytest.mark.parametrize(("ranks", "documents_a_rank"), [(8, 4), (8, 16), (32, 4), (64, 8)])
def test_plans_for_megatron_are_no_slower_than_its_own(
    megatron: Any, mix: str, ranks: int, documents_a_rank: int
) -> None:
    """By our cost model, against our reading of its scheduler (bench/rivals.py), which makes the
    same plans."""
    most = 16384
    lengths = load_mix(mix).draw(ranks * documents_a_rank, seed=0)
    places = Assignment.alternating(
        *placed(megatron.scheduled(lengths, ranks, most, H100), len(lengths))
    )
    ours = (
        PlanningInput(H100, np.array(lengths), ranks, most, None, None, None)
        .score(places)
        .makespan_ns
        / 1e9
    )
    theirs = plan_placed(
        "megatron-dev",
        RIVALS["megatron-dev"],
        lengths,
        ranks=ranks,
        tokens_per_rank=most,
        profile=H100,
    )
    assert ours <= theirs.makespan_s
    plan = make_plan(lengths, ranks=ranks, tokens_per_rank=most, profile=H100)
    assert ours <= 1.21 * plan.makespan_s


def placed(rows: Any, documents: int) -> Any:
    """Micro-batch, first rank and degree of every document."""
    micro_batch, first_rank, degree = np.zeros((3, documents), dtype=np.int64)
    for index, groups in enumerate(rows):
        first = 0
        for size, members in groups:
            micro_batch[members], first_rank[members], degree[members] = index, first, size
            first += size
    return micro_batch, first_rank, degree


def test_what_megatrons_groups_cannot_be_is_refused(megatron: Any) -> None:
    scheduler = megatron.LongctxScheduler(4096, 2, 3, None)
    with pytest.raises(ValueError, match="6 ranks: Megatron's groups need a power of two"):
        scheduler.get_groups_and_subsamples([(0, 100)])
    with pytest.raises(PlanError, match="20000 tokens"):
        megatron.LongctxScheduler(4096, 2, 2, None).get_groups_and_subsamples([(0, 20000)])
    with pytest.raises(ValueError, match="thd_max_packed_sequences is 8"):
        megatron.LongctxScheduler(4096, 2, 2, None, max_num_seqs=8)
    with pytest.raises(ValueError, match="a multiple of 2 micro-batches"):
        megatron.LongctxScheduler(4096, 2, 2, 2)


def test_verl_runs_the_plan(megatron: Any) -> None:
    """By verl's own code: it finds the scheduler, and takes the groups apart as it needs them."""
    if not megatron_is_installed():
        pytest.skip("Megatron-LM's dev branch is not installed")
    scheduler = pytest.importorskip(
        "verl.utils.dynamic_cp_scheduler", reason="verl is not installed"
    )
    tensordict = pytest.importorskip("tensordict", reason="tensordict is not installed")
    lengths = load_mix("wlb_128k").draw(64, seed=1)
    ids = torch.nested.as_nested_tensor(
        [torch.full((length,), length) for length in lengths], layout=torch.jagged
    )
    batch = tensordict.TensorDict({"input_ids": ids}, batch_size=[len(lengths)])
    groups = [SimpleNamespace(size=lambda: 16, rank=lambda rank=rank: rank) for rank in range(16)]
    by_rank = [
        scheduler.DynamicCPScheduler(16384, 8, 2).schedule(batch, group, tp_size=1)
        for group in groups
    ]
    (rows,) = {len(micro_batches) for micro_batches in by_rank}
    assert rows == len(megatron.scheduled(lengths, 16, 16384, H100))
    runs = Counter(
        length
        for each in by_rank
        for row in each
        for length in row["input_ids"].offsets().diff().tolist()
    )
    assert set(runs) == set(lengths)


# --- torchtitan's inner attention


def titan_steps(documents: list[torch.Tensor]) -> tuple[float, list[torch.Tensor], dict[int, int]]:
    """On each rank: loss, gradients and degrees of a step of the example, with torchtitan's own
    model."""
    example = load("torchtitan_attention")
    model = example.build_model()
    loss, plan = example.forward_backward(model, documents)
    return loss, [parameter.grad for parameter in model.parameters()], plan.degrees


@pytest.mark.parametrize("lengths", [None, [1, 70, 1]])
def test_torchtitan_equals_one_unpacked_process(
    workers: Workers, lengths: list[int] | None
) -> None:
    titan = pytest.importorskip(
        "torchtitan.models.common.attention", reason="torchtitan is not installed"
    )
    example = load("torchtitan_attention")
    model = example.build_model()
    for layer in model.layers.values():
        layer.attention.inner_attention = titan.ScaledDotProductAttention(None)
    documents = example.read_documents(0)
    if lengths is not None:
        documents = [torch.arange(length) for length in lengths]
    targets, loss = sum(len(document) - 1 for document in documents), 0.0
    for document in documents:
        logits = model(document.unsqueeze(0), positions=torch.arange(len(document)).unsqueeze(0))[0]
        part = F.cross_entropy(logits[:-1], document[1:], reduction="sum") / targets
        part.backward()
        loss += part.item()
    for ring_loss, gradients, degrees in workers.run(titan_steps, 2, documents):
        assert lengths or set(degrees) == {1, 2}
        assert ring_loss == pytest.approx(loss, abs=1e-5)
        torch.testing.assert_close(
            gradients, [parameter.grad for parameter in model.parameters()], atol=1e-5, rtol=0
        )


def stand_in_for_titan() -> dict[str, ModuleType]:
    """Modules with what the example imports of torchtitan's: its base class of modules, and configs
    of models (none)."""

    class Module(torch.nn.Module):
        class Config:
            pass

    names = [
        "torchtitan",
        "torchtitan.models",
        "torchtitan.models.llama3",
        "torchtitan.protocols",
        "torchtitan.protocols.module",
    ]
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules["torchtitan.models.llama3"].llama3_configs = {}
    modules["torchtitan.protocols.module"].Module = Module
    return modules


def test_torchtitans_inner_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchtitan: the layer against dense attention, and what it refuses."""
    for name, module in stand_in_for_titan().items():
        monkeypatch.setitem(sys.modules, name, module)
    layer = load("torchtitan_attention").RingInnerAttention(None)
    attention = RingAttention(Layout.of([Placement(0, 0, 1), Placement(1, 0, 1)], (9, 5), 0, 0))
    q, k, v = (torch.randn(1, 14, heads, 8) for heads in (4, 2, 2))
    out = layer(q, k, v, attention_masks=attention, scale=8**-0.5, enable_gqa=True)
    for part in (slice(0, 9), slice(9, 14)):
        heads_first = (tensor[:, part].transpose(1, 2) for tensor in (q, k, v))
        expected = F.scaled_dot_product_attention(
            *heads_first, is_causal=True, enable_gqa=True
        ).transpose(1, 2)
        torch.testing.assert_close(out[:, part], expected)
    with pytest.raises(ValueError, match="got NoneType for 1 rows"):
        layer(q, k, v, attention_masks=None)
    with pytest.raises(ValueError, match=r"scale is 0\.5"):
        layer(q, k, v, attention_masks=attention, scale=0.5)
