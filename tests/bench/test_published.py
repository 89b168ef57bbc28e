"""Published runs of other trainers: how far predictions of their time and memory are off, and where
the constants of the shipped profiles come from."""

import csv
import itertools
from dataclasses import asdict, replace

import pytest

import bench.published_fit
from bench.harness import RESULTS
from bench.published import STATED, Row, by_source, memory_rows, parts_of, stated, with_table
from bench.published_fit import (
    CAUSES,
    FITTED,
    SHEETS,
    SHIPPED,
    Constants,
    Fit,
    fitted,
    median,
    predicted_s,
    profile_of,
    unseen_errors,
)
from bench.published_memory import peak_bytes
from bench.published_runs import READ_S, Case, Run, cases, runs
from longctx.planning.hardware_profile import HardwareProfile
from longctx.training.described import read_described
from longctx.training.run_profile import FLOAT8_TIME, work_of_run


@pytest.fixture(scope="module")
def given() -> list[Case]:
    return cases()


def some(given: list[Case], source: str) -> list[Case]:
    return [case for case in given if case.run.source == source]


def test_an_error_is_positive_where_a_run_is_predicted_to_take_longer() -> None:
    slower = Row("a", "b", "tokens/s per GPU", 100, 80)
    longer = Row("a", "b", "s per step", 80, 100)
    assert slower.error == pytest.approx(0.25)
    assert longer.error == pytest.approx(0.25)
    assert Row("a", "b", "GB per GPU", 50, 40).error == pytest.approx(-0.2)
    refused = Row("a", "b", "s per step", 1, None)
    assert refused.error is None
    assert by_source([slower, longer, refused]) == {"a": pytest.approx([0.25, 0.25])}


def test_every_source_has_runs_and_what_was_assumed() -> None:
    found = runs()
    assert len(found) >= 189
    assert len({run.source for run in found}) == 13
    measured = [run for run in found if run.memory is not None]
    assert len(measured) >= 68


def one(source: str, model: str, **wanted: int) -> Run:
    (run,) = (
        r
        for r in runs()
        if (r.source, r.model) == (source, model)
        and all(getattr(r, k) == v for k, v in wanted.items())
    )
    return run


def test_a_document_of_a_million_tokens_takes_what_trl_measured(given: list[Case]) -> None:
    run = one("TRL", "qwen3-8b", gpus=8)
    (case,) = (case for case in given if case.run == run)
    shipped = HardwareProfile.load(run.gpu)
    assert case.seconds(shipped, float8=FLOAT8_TIME) == pytest.approx(364, rel=0.05)


def test_transformers_own_blocks_explain_the_memory_of_trl() -> None:
    """K and V of all ranks are counted in all runs; those of 4M tokens may have had a ring."""
    known = [each for each in runs() if each.source == "TRL" and each.memory is not None]
    assert len(known) == 6
    for each in known:
        assert each.memory is not None
        share = peak_bytes(each) / each.memory / each.memory_unit_bytes
        assert 0.98 < share < 1.16, each.what
    long = one("TRL", "qwen3-8b", gpus=8)
    other = {word: value for word, value in long.other.items() if word != "composed"}
    by_our_blocks = peak_bytes(replace(long, other=other | {"eager": ""}))
    assert by_our_blocks < 0.9 * peak_bytes(long)


def test_megatron_keeps_weights_and_gradients_whole() -> None:
    """14B on eight GPUs, tensor-parallel over four: six bytes per weight of a rank, twelve over its
    two replicas; 40 KB per token and block, 48 blocks, a quarter of 8,192 tokens' logits."""
    run = one("ms-swift", "qwen2.5-14b", tp=4)
    states = (6 + 12 / 2) * 14.77e9 / 4
    block = 4 * 5120 + 3 * 5120 + 3 * 1024 + 3 * 13824
    kept = 2 * block * 48 * 8192 / 4
    logits = 6 * 8192 * 152064 / 4
    assert peak_bytes(run) == pytest.approx(states + kept + logits, rel=0.001)
    by_full = peak_bytes(replace(run, recompute="full"))
    assert by_full == pytest.approx(states + 2 * 5120 * 48 * 8192 / 4 + logits, rel=0.001)


@pytest.mark.parametrize(
    ("gpu", "gpus", "model", "adapted", "counted"),
    [
        ("h100-nvlink-ib", 1, "qwen3-0.6b", True, 140_200),
        ("h100-nvlink-ib", 1, "qwen3-0.6b", False, 148_200),
        ("h100-nvlink-ib", 8, "qwen3-4b", True, 394_400),
        ("h100-nvlink-ib", 8, "qwen3-4b", False, 409_600),
        ("h100-nvlink-ib", 8, "qwen3-30b-a3b", True, 618_100),
        ("h200-nvlink-ib", 8, "qwen3-30b-a3b", False, 634_600),
    ],
)
def test_a_token_takes_the_bytes_that_prime_rls_blocks_took(
    gpu: str, gpus: int, model: str, adapted: bool, counted: int
) -> None:
    """Its blocks ran forward and backward on tensors without values, whose bytes were counted; a
    row of the residual stream per block comes to that."""
    peaks = {}
    for run in runs():
        if (run.source, run.gpu, run.gpus, run.model) != ("prime-rl", gpu, gpus, model):
            continue
        if ("lora" in run.other) != adapted or {"offload", "whole_logits"} & set(run.other):
            continue
        peaks[run.length] = peak_bytes(run)
    per_token = (peaks[65536] - peaks[16384]) / (65536 - 16384)
    assert per_token == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize(
    ("source", "least"), [("prime-rl", 0.86), ("ms-swift", 0.80)], ids=lambda each: str(each)
)
def test_what_stacks_keep_explains_what_they_reserved(source: str, least: float) -> None:
    """Allocators reserve more than is in use, never less."""
    known = [each for each in runs() if each.source == source and each.memory is not None]
    assert len(known) >= 7
    for each in known:
        assert each.memory is not None
        share = peak_bytes(each) / each.memory / each.memory_unit_bytes
        assert least < share < 1, each.what


@pytest.mark.parametrize("gpu", SHEETS)
def test_shipped_profiles_have_the_fitted_shares_of_data_sheets(gpu: str) -> None:
    profile, described = read_described(gpu)
    assert described is not None
    by_shares = profile_of(gpu, SHIPPED, described.work)
    for name in FITTED:
        assert getattr(profile, name) == pytest.approx(getattr(by_shares, name), rel=5e-3), name
    assert SHIPPED.float8 == FLOAT8_TIME


def test_each_cause_makes_a_narrow_model_slower(given: list[Case]) -> None:
    """Without causes, a run of prime-rl is predicted to take half of its time."""
    narrow = [case for case in some(given, "prime-rl") if case.run.model == "qwen3-30b-a3b"]
    case = next(case for case in narrow if "lora" in case.run.other)
    predicted = [predicted_s(case, SHIPPED, CAUSES[:count]) for count in range(len(CAUSES) + 1)]
    assert all(later > earlier for earlier, later in itertools.pairwise(predicted))
    assert predicted[0] < 0.5 * case.measured_s < predicted[-1] < case.measured_s


def test_a_stack_is_taken_by_its_own_code(given: list[Case]) -> None:
    """prime-rl reads every token's position on the CPU; NeMo AutoModel sends a row once to a GPU,
    and its kernels move less of adapters; torchtitan casts to float8."""
    reads = next(case for case in given if "log_probabilities" in case.run.other)
    alone = replace(reads, loss_work=reads.loss_work._replace(host_s=0.0))
    micro_batches = reads.run.documents / reads.run.at_once / reads.run.gpus
    more = predicted_s(reads, SHIPPED) - predicted_s(alone, SHIPPED)
    assert more == pytest.approx(micro_batches * reads.run.tokens_per_rank * READ_S, rel=1e-6)

    experts = next(case for case in given if "expert_ranks" in case.run.other)
    ours = work_of_run(experts.config, experts.spec, experts.run.gpus, "cuda")
    assert experts.work.expert_bytes == ours.expert_bytes / 8

    rows = next(case for case in given if case.run.other.get("rows") == "titan")
    ours = work_of_run(rows.config, rows.spec, rows.run.gpus, "cuda")
    moved = rows.work.traffic.elementwise - ours.traffic.elementwise
    assert moved == 2 * 48 * 8 * 2048 * (2 * 21 + 34 - 4 * 4)

    outputs, inputs = 43008 * 32, 38912 * 32  # of the matrices of an 8B
    lora = next(case for case in given if "triton_lora" in case.run.other)
    ours = work_of_run(lora.config, lora.spec, lora.run.gpus, "cuda")
    assert ours.traffic.adapters == 2 * (10 * outputs + 6 * inputs)
    assert lora.work.traffic.adapters == 2 * (6 * outputs + 7 * inputs)

    float8 = next(case for case in given if "casts" in case.run.other)
    ours = work_of_run(float8.config, float8.spec, float8.run.gpus, "cuda")
    casts = float8.work.traffic.products - ours.traffic.products
    assert casts > 10 * inputs + 5 * outputs
    assert casts < 10 * inputs + 5 * outputs + 4 * inputs


def test_a_source_sets_no_constant_by_which_it_is_predicted(
    given: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of a source that take twice as long change the constants of the others, not its own."""
    monkeypatch.setattr(bench.published_fit, "BOUNDS", dict.fromkeys(asdict(SHIPPED), (0.1, 2.0)))
    few = [*some(given, "TRL"), *some(given, "torchtune"), *some(given, "torchtitan")]
    slower = [
        replace(case, measured_s=2 * case.measured_s) if case.run.source == "TRL" else case
        for case in few
    ]
    fits = [Fit(each, Constants()) for each in (few, slower)]
    own, own_slower = (fit.without("TRL") for fit in fits)
    assert own == own_slower
    others, others_slower = (fit.without("torchtune") for fit in fits)
    assert others_slower.attention_hopper < 0.7 * others.attention_hopper


def test_runs_state_the_errors_of_the_table() -> None:
    with (RESULTS / "published.csv").open(encoding="utf-8", newline="") as file:
        written = list(csv.DictReader(file))
    times = [
        Row(row["who"], row["what"], row["unit"], float(row["measured"]), float(row["predicted"]))
        for row in written
        if row["kind"] and row["predicted"]
    ]
    kinds = [row["kind"] for row in written if row["kind"] and row["predicted"]]
    rows = [replace(row, kind=kind) for row, kind in zip(times, kinds, strict=True)]
    timed = [row for row in rows if not row.unit.startswith("G")]
    table = STATED.read_text("utf-8")
    time_table = stated(timed).partition("MEMORY")[0]
    assert time_table in table
    assert len(parts_of(rows)["memory"]) >= 69


@pytest.mark.slow
def test_runs_state_the_errors_of_memory(given: list[Case]) -> None:
    """As estimated now, without what allocators of other stacks reserved."""
    rows = list(memory_rows(given, reserved=False))
    memory_table = stated(rows).partition("MEMORY")[2]
    assert memory_table and memory_table in STATED.read_text("utf-8")


@pytest.mark.slow
def test_unseen_sources_are_predicted_within_a_seventh_in_the_median(given: list[Case]) -> None:
    fit = fitted(given)
    for name, value in asdict(fit.without(None)).items():
        # Less is not worth other profiles, plans and pages.
        assert getattr(SHIPPED, name) == pytest.approx(value, rel=0.03), name
    medians = []
    for source, rows in unseen_errors(fit).items():
        off = [error for case, error in rows if "float8" not in case.run.other]
        if off:
            medians.append(median(off))
            assert len(off) < 8 or medians[-1] < 0.18, source
    assert sorted(medians)[len(medians) // 2] < 0.12


def test_a_table_replaces_the_one_before() -> None:
    text = "a\n# Begin of the table.\nold\n# End of the table.\nb\n"
    assert with_table(text, "new\n") == text.replace("old", "new")
