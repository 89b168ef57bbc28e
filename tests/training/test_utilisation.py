"""FLOPs match an independent counter; times of a step and its trace are correct."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from longctx.attention.inputs import Queries
from longctx.cli import main
from longctx.commands.train import parse_steps
from longctx.data.packing import StepBatch
from longctx.errors import UserError
from longctx.model.decoder import Decoder
from longctx.model.presets import PRESETS
from longctx.parallel.recompute import apply_recompute
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.planners.planner import make_plan
from longctx.training.metrics import StepMetrics, device_peak, model_flops, peak_flops
from longctx.training.trace import Tracer
from tests.training_cases import start
from tests.workers import Workers

STEP = [
    "batch.tokens_per_rank=200",
    "batch.global_tokens=700",
    "train.steps=3",
    "checkpoint.every=3",
]
ON_2 = ["context.mode=static", "context.degree=2", "data.max_length=300"]
IN_PIPELINE = [
    "parallel.pipeline_parallel_size=2",
    "context.degree=1",
    "data.max_length=200",
    "batch.global_tokens=100",
]


@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_those_that_torch_counts(tied: bool) -> None:
    """Dense attention is counted, of which a causal one needs half."""
    shape = PRESETS["tiny"].model_copy(update={"vocab_size": 300, "tie_word_embeddings": tied})
    model = Decoder(shape)
    model.initialize(0)

    def dense(queries: Queries, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        q = queries(lambda x: x)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        heads = (x.transpose(0, 1) for x in (q, k, v))
        scores = torch.matmul(
            *(x if n == 0 else x.transpose(1, 2) for n, x in enumerate(list(heads)[:2]))
        )
        return torch.matmul(F.softmax(scores, -1), v.transpose(0, 1)).transpose(0, 1)

    lengths = [40, 64]

    def count() -> int:
        with FlopCounterMode(display=False) as counter:
            for length in lengths:
                tokens = torch.arange(length)
                model(tokens, tokens, dense).sum().backward()
        return counter.get_total_flops()

    counted = count()
    attention = (
        2
        * shape.num_hidden_layers
        * shape.num_attention_heads
        * shape.head_dim
        * sum(s * s for s in lengths)
    )
    assert counted - 3 * attention == model_flops(shape.spec, lengths)
    apply_recompute(model, "full")
    last = shape.hidden_size * shape.intermediate_size
    again = (
        2 * shape.num_hidden_layers * (shape.spec.layers[0].matrix_parameters - last) * sum(lengths)
        + 2 * attention
    )
    assert count() - counted == again, "as the layout search takes it"


def test_documents_do_not_see_each_other() -> None:
    shape = PRESETS["llama-3.1-8b"].model_copy(update={"vocab_size": 128256})
    assert (
        model_flops(shape.spec, [1000, 1000])
        == 2 * model_flops(shape.spec, [1000])
        < model_flops(shape.spec, [2000])
    )


def test_peaks_by_name() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert (
        peak_flops("NVIDIA H200 NVL", "bfloat16") == 835e12 < peak_flops("NVIDIA H200", "bfloat16")
    )
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float32") == 19.5e12
    assert peak_flops("NVIDIA GB200", "bfloat16") == 2500e12
    assert peak_flops("some other device", "bfloat16") is None
    assert device_peak(torch.device("cpu"), "bfloat16") is None
    assert peak_flops("NVIDIA RTX A1000", "bfloat16") is None, "no A100"


def two_steps_at_known_peak(store: Path, run: Path, peak: float) -> list[object]:
    """Metrics of two steps on devices of so many FLOP/s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longctx.training.trainer.device_peak", lambda device, dtype: peak)
        return two_steps(store, run, [])


def two_steps(
    store: Path, run: Path, settings: list[str], traced: range | None = None, stopped: bool = False
) -> list[object]:
    """Metrics of two steps; of a traced run, whether it reached its third and last step."""
    trainer = start(store, run, [*STEP, *ON_2, *settings], traced=traced)
    trainer.stop.received = stopped
    if traced is not None:
        return [trainer.train()]
    with trainer.loader:
        return [trainer.step() for _ in range(2)]


def test_numbers_of_ranks_become_one_number() -> None:
    """Each by its reduction, with values that tell sum, mean and maximum apart."""
    plan = make_plan(
        [100, 50], ranks=2, tokens_per_rank=200, profile=HardwareProfile.load("h100-nvlink-ib")
    )
    batch = StepBatch(1, plan, ("a", "b"), 150, 148, ())
    names = (
        "bubble_share",
        "data_wait_s",
        "peak_memory_bytes",
        "attention_s",
        "exchange_wait_s",
        "bubble_s",
        "optimizer_s",
    )
    names += (
        "loss",
        "rows",
        "expert_layers",
        "expert_imbalance",
        "unused_experts",
        "document_loss",
        "z_loss",
    )
    ranks = {name: torch.tensor([1.0, 3.0], dtype=torch.float64) for name in names}
    step = StepMetrics.of(batch, ranks, 20.0, grad_norm=1.0, lr=0.1, mfu=None)
    assert step.loss == 4, "parts of a sum"
    assert (
        step.attention_s
        == step.exchange_wait_s
        == step.bubble_s
        == step.optimizer_s
        == step.bubble_share
        == 2
    ), "means"
    assert (step.data_wait_s, step.peak_memory_bytes) == (3, 3), "the slowest and the fullest rank"
    assert step.expert_imbalance == step.unused_experts == step.document_loss == step.z_loss == 1, (
        "means over layers"
    )
    assert step.rest_s == 20 - 4 * 2 - 2 and step.padding_share == (4 - 150) / 4
    none = {
        **ranks,
        **{
            name: torch.zeros(2, dtype=torch.float64) for name in ("expert_layers", "document_loss")
        },
    }
    step = StepMetrics.of(batch, none, 20.0, grad_norm=1.0, lr=0.1, mfu=None)
    assert step.expert_imbalance is None and step.document_loss is None
    tags = step.scalars()
    assert {"time/attention_s", "plan/gap", "memory/peak_memory_bytes", "train/loss"} <= tags.keys()
    assert "experts/z_loss" not in tags


def test_utilisation_and_times_of_a_step(workers: Workers, shorts: Path, tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    spec = PRESETS["tiny"].model_copy(update={"vocab_size": 257, **sizes}).spec
    for step in workers.run(two_steps_at_known_peak, 2, shorts, tmp_path, 1e10)[0]:
        least = model_flops(spec, [step.tokens // step.documents] * step.documents) / (
            2 * 1e10 * step.step_time_s
        )
        assert least <= step.mfu <= model_flops(spec, [step.tokens]) / (2 * 1e10 * step.step_time_s)
        assert f" mfu {step.mfu:.1%} " in step.console(2, 1.0) and "mfu" not in replace(
            step, mfu=None
        ).console(2, 1.0)
        assert min(step.attention_s, step.exchange_wait_s, step.optimizer_s) > 0 <= step.rest_s
        of_this_step = step.attention_s + step.exchange_wait_s + step.optimizer_s + step.rest_s
        assert of_this_step <= step.step_time_s * 1.001
        assert step.bubble_s == 0


def spans_left(store: Path, run: Path) -> list[list[str]]:
    """Names of spans that are not taken after a step, and after passes without gradients."""
    trainer = start(store, run, [*STEP, *ON_2])
    names = []
    with trainer.loader:
        trainer.step()
        names.append([span[0] for span in trainer.runner.clock.spans])
        trainer.runner.log_probabilities(next(trainer.loader))
    trainer.runner.after_scoring()
    return [*names, [span[0] for span in trainer.runner.clock.spans]]


def test_a_step_has_its_own_times(workers: Workers, shorts: Path, tmp_path: Path) -> None:
    assert workers.run(spans_left, 2, shorts, tmp_path) == [[[], []]] * 2


def test_the_folder_of_traces_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        tracer = Tracer(range(1, 2), tmp_path, rank, SimpleNamespace(layers=[]))  # type: ignore[arg-type]
        tracer.before(1)
        tracer.after(1)
    assert capsys.readouterr().out == f"traces written to {tmp_path}, one file per rank\n"


@pytest.mark.slow
@pytest.mark.parametrize(("traced", "stopped"), [(range(3, 10), False), (range(1, 3), True)])
def test_a_trace_is_written_when_the_run_ends_within_its_steps(
    workers: Workers, shorts: Path, tmp_path: Path, traced: range, stopped: bool
) -> None:
    assert workers.run(two_steps, 2, shorts, tmp_path, [], traced, stopped) == [[not stopped]] * 2
    for rank in range(2):
        events = json.loads((tmp_path / "traces" / f"rank-{rank:03d}.json").read_text())[
            "traceEvents"
        ]
        assert [event.get("name") for event in events].count("optimizer") == 1


def test_traces_name_micro_batches_layers_and_documents(
    workers: Workers, shorts: Path, tmp_path: Path
) -> None:
    workers.run(two_steps, 2, shorts, tmp_path, [], range(2, 4))
    files = sorted((tmp_path / "traces").iterdir())
    assert [file.name for file in files] == ["rank-000.json", "rank-001.json"]
    for rank, file in enumerate(files):
        events = json.loads(file.read_text())["traceEvents"]
        names = [event["name"] for event in events if "name" in event]
        assert any(
            name.startswith("micro-batch 0, longest of ") and ".py" in name for name in names
        )
        for layer in (0, 1):
            wanted = {
                f"attention of layer {layer}, {which} pass" for which in ("forward", "backward")
            }
            assert {f"layer {layer}, forward pass", *wanted} <= set(names)
        assert names.count("optimizer") == 2, "one per step"
        processes = [
            event["args"]["name"] for event in events if event.get("name") == "process_name"
        ]
        assert processes and all(name.startswith(f"rank {rank}: ") for name in processes)


def test_traces_name_stages_of_a_pipeline(workers: Workers, shorts: Path, tmp_path: Path) -> None:
    workers.run(two_steps, 2, shorts, tmp_path, IN_PIPELINE, range(2, 3))
    for rank in range(2):
        events = json.loads((tmp_path / "traces" / f"rank-{rank:03d}.json").read_text())[
            "traceEvents"
        ]
        names = [event["name"] for event in events if event.get("name", "").startswith("stage ")]
        assert all(name.startswith(f"stage {rank}, ") for name in names)
        for what in ("forward pass", "backward pass"):
            assert any(
                f", {what}, micro-batch 0, longest of " in name and ".py" in name for name in names
            )
            assert f"stage {rank}, {what}, micro-batch 1, empty" in names, (
                "1f1b wants one for each stage"
            )


def test_steps_to_trace(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_steps("10:12") == range(10, 13)
    assert parse_steps("7") == range(7, 8)
    for text in ("12:10", "0:3", "a:b", "3:", ":3", ""):
        with pytest.raises(UserError, match="first and the last step"):
            parse_steps(text)
    assert main(["train", f"--data.store={store}", "--trace-steps=5:3"]) == 2
    assert "as in 10:12" in capsys.readouterr().err
