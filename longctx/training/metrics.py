"""Metrics: what a step reports, to the console, metrics.jsonl, TensorBoard and Weights & Biases."""

import importlib
import importlib.util
import json
import math
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from longctx.config import Config
from longctx.config.settings import WandbSetting
from longctx.data.packing import StepBatch
from longctx.errors import UserError
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.plan import Plan
from longctx.planning.tree import NO_TREES, Trees
from longctx.training.objectives.balance import STATISTICS
from longctx.units import format_bytes

LOG = "metrics.jsonl"
RECENT = 20
"""Steps whose mean time tells how long the others take."""


def _row(group: str, over_ranks: str | None = None, default: Any = MISSING) -> Any:
    """Makes a number of the step, shown as `group`/name by TensorBoard and Weights & Biases.

    With `over_ranks` (sum, mean or max) every process has a value of it, which the step gathers;
    the others are known to all.
    """
    return field(default=default, metadata={"group": group, "over_ranks": over_ranks})


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl. Counts are sums over the domain.

    Attributes:
        loss: mean over the valid targets of the step; null in metrics.jsonl if none, or not finite.
        tokens, computed_tokens: of all documents of the step, before and after those that begin
            alike were merged; the second is None if none were. Speed counts the first, mfu the
            second.
        step_time_s, predicted_s: measured wall-clock time, including the wait for data, and the
            makespan of the plan.
        degrees: number of documents at each degree.
        balance: mean over maximum of the modelled time per rank (1 - the plan's idle share).
        gap: relative distance of the plan from its lower bound.
        bubble_share, predicted_bubble_share: mean share of the pipeline's time in which a rank
            computes nothing, and the share of the modelled step in which the pipeline fills and
            drains; 0 without a pipeline.
        padding_share: padded rows as a share of all rows.
        data_wait_s: wait for data of the rank that waited longest.
        peak_memory_bytes: peak memory of the fullest rank: of the allocator on CUDA, of the process
            on a CPU.
        attention_s, exchange_wait_s, bubble_s: mean over ranks of the time in attention, of the
            wait for K, V or their gradients, and, in a pipeline, of the time without computation.
        optimizer_s: mean over ranks of the time of the gradients' norm, clipping and optimizer.
        rest_s: remaining time of the step: matrix products, loss, collectives of sharding, waits
            for other ranks.
        mfu: model FLOP utilisation; None if the peak of the device is not known.
        validation_loss, validation_tokens, validation_s: mean loss over the targets of the
            validation documents, number of these targets, and time of the validation, not part of
            step_time_s; None in steps without a validation.
        expert_imbalance, unused_experts: with a mixture of experts, tokens of a layer's busiest
            expert over the mean, and share of experts without tokens in the step; means over
            layers.
        document_loss, z_loss: balance losses without their factors, means over layers; None if
            their factor is 0.
        skipped: True if weights and optimizer were not updated: loss or gradient was not finite, or
            there was no target.
        source_tokens: tokens by path of their store if several stores are mixed; otherwise None.
    """

    step: int
    degrees: dict[str, int]
    winner: str
    loss: float = _row("train", "sum")
    grad_norm: float = _row("train")
    lr: float = _row("train")
    tokens: int = _row("train")
    target_tokens: int = _row("train")
    documents: int = _row("plan")
    micro_batches: int = _row("plan")
    step_time_s: float = _row("time")
    predicted_s: float = _row("time")
    tokens_per_s_per_rank: float = _row("train")
    balance: float = _row("plan")
    gap: float = _row("plan")
    bubble_share: float = _row("plan", "mean")
    predicted_bubble_share: float = _row("plan")
    padding_share: float = _row("plan")
    data_wait_s: float = _row("time", "max")
    peak_memory_bytes: int = _row("memory", "max")
    attention_s: float = _row("time", "mean")
    exchange_wait_s: float = _row("time", "mean")
    bubble_s: float = _row("time", "mean")
    optimizer_s: float = _row("time", "mean")
    rest_s: float = _row("time")
    mfu: float | None = _row("train")
    validation_loss: float | None = _row("validation", default=None)
    validation_tokens: int | None = _row("validation", default=None)
    validation_s: float | None = _row("validation", default=None)
    expert_imbalance: float | None = _row("experts", "sum", default=None)
    unused_experts: float | None = _row("experts", "sum", default=None)
    document_loss: float | None = _row("experts", "sum", default=None)
    z_loss: float | None = _row("experts", "sum", default=None)
    computed_tokens: int | None = _row("train", default=None)
    skipped: bool = _row("train", default=False)
    source_tokens: dict[str, int] | None = None

    @classmethod
    def of(
        cls, batch: StepBatch, ranks: Mapping[str, torch.Tensor], step_time_s: float, **known: Any
    ) -> "StepMetrics":
        """Returns the metrics of a step.

        Args:
            ranks: values of all processes by name, float64 [world size]: `rows`, `expert_layers`,
                and every number with a reduction over ranks.
        """
        plan = batch.plan
        padded = float(ranks["rows"].sum())
        computed = sum(batch.plan.lengths)
        reductions = {
            each.name: over
            for each in fields(cls)
            if (over := each.metadata.get("over_ranks")) is not None
        }
        values = {name: float(getattr(ranks[name], over)()) for name, over in reductions.items()}
        timed = sum(
            values[name] for name in ("attention_s", "exchange_wait_s", "bubble_s", "optimizer_s")
        )
        return cls(
            **{
                **values,
                **_of_experts(values, float(ranks["expert_layers"].sum())),
                "peak_memory_bytes": int(values["peak_memory_bytes"]),
                **known,
            },
            step=batch.step,
            tokens=batch.tokens,
            target_tokens=batch.target_tokens,
            documents=len(plan.lengths),
            micro_batches=len(plan.micro_batches),
            step_time_s=step_time_s,
            predicted_s=plan.makespan_s,
            tokens_per_s_per_rank=batch.tokens / step_time_s / len(ranks["rows"]),
            degrees={str(degree): count for degree, count in plan.degrees.items()},
            winner=plan.winner,
            balance=1 - plan.idle_share,
            gap=plan.gap,
            predicted_bubble_share=plan.bubble_share,
            padding_share=(padded - computed) / max(1, padded),
            rest_s=max(0.0, step_time_s - timed - float(ranks["data_wait_s"].mean())),
            source_tokens=dict(batch.source_tokens) or None,
            computed_tokens=computed if batch.rows else None,
        )

    def console(self, steps: int, seconds_left: float) -> str:
        """Returns the line of the step in the console, of `steps`, which need `seconds_left` more,
        and a second one for a validation. metrics.jsonl and TensorBoard have the other numbers."""
        if self.target_tokens:
            learned = f"loss {self.loss:.3f} grad {self.grad_norm:.3g}"
        else:
            learned = "without targets"
        if self.mfu is None:
            speed = f"tok/s/rank {_short(self.tokens_per_s_per_rank)}"
        else:
            speed = f"mfu {self.mfu:.1%}"
        words = [
            f"step {self.step}/{steps}",
            learned,
            speed,
            f"mem {format_bytes(self.peak_memory_bytes)}",
            f"degrees {_span(self.degrees)}",
            f"time {self.step_time_s:.2f}s",
        ]
        if self.step < steps:
            words.append(f"eta {_rounded(seconds_left)}")
        if self.skipped:
            words.append("skipped")
        line = " ".join(words)
        if self.validation_loss is None:
            return line
        return (
            f"{line}\n  validation loss {self.validation_loss:.3f} on {self.validation_tokens:,} "
            f"tokens in {self.validation_s:.1f}s"
        )

    def scalars(self) -> dict[str, float]:
        """The numbers of the step by tag, such as `time/attention_s`, and
        `plan/documents_at_degree/N` for each degree N."""
        tags = {each.name: group for each in fields(self) if (group := each.metadata.get("group"))}
        numbers = {
            f"{group}/{name.removeprefix(f'{group}_')}": value
            for name, group in tags.items()
            if (value := getattr(self, name)) is not None
        }
        return numbers | {
            f"plan/documents_at_degree/{degree}": count for degree, count in self.degrees.items()
        }


def _of_experts(sums: Mapping[str, float], layers: float) -> dict[str, float | None]:
    """Returns means over all layers with experts, None without experts; losses that are 0
    everywhere are not computed."""
    means = {name: sums[name] / layers if layers else None for name in STATISTICS if name in sums}
    return {
        name: None if name.endswith("loss") and not mean else mean for name, mean in means.items()
    }


def _span(degrees: Mapping[str, int]) -> str:
    """Returns the least and the greatest degree: 1-16, or 4 if there is no other."""
    numbers = [int(degree) for degree in degrees]
    if not numbers:
        return "-"
    if len(numbers) == 1:
        return f"{numbers[0]}"
    return f"{min(numbers)}-{max(numbers)}"


def _rounded(seconds: float) -> str:
    """Returns seconds in the unit in which people wait: 40s, 6m, 3h05m, 12d."""
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes}m"
    if minutes < 100 * 60:
        return f"{minutes // 60}h{minutes % 60:02}m"
    return f"{minutes / 60 / 24:.0f}d"


def _short(number: float) -> str:
    if number >= 1000:
        return f"{number / 1000:.1f}k"
    return f"{number:.0f}"


# --- model FLOP utilisation: what an ideal implementation computes, as a share of the peak of the
# devices

FORWARD_AND_BACKWARD = 3
PEAK_FLOPS: dict[str, tuple[float, float | None]] = {
    "H100 PCIe": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "H200 NVL": (835e12, 60e12),
    "H200": (989e12, 67e12),
    "H800": (989e12, 67e12),
    "GB200": (2500e12, None),
    "B200": (2250e12, None),
    "A100-SXM4-40GB": (312e12, 19.5e12),
    "A100-PCIE-40GB": (312e12, 19.5e12),
    "A100 80GB PCIe": (312e12, 19.5e12),
    "A100": (312e12, 19.5e12),
    "A800": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "RTX 4090": (165.2e12, 82.6e12),
    "MI300X": (1307e12, 163.4e12),
}
"""Peak dense FLOP/s in bfloat16 and float32 (without TF32), by part of the device's name; from data
sheets."""


def model_flops(spec: ModelSpec, lengths: Sequence[int], trees: Trees = NO_TREES) -> int:
    """Returns the FLOPs of forward and backward over documents of these lengths, of which some may
    be `trees`.

    `spec` must have `vocab_size`. Counts two operations per matrix weight and token, attention
    inside each document (to earlier tokens, in encoders to all), and twice that in backward, less
    the gradients of frozen weights; and the scans of linear attention as in long documents that are
    not split. Recomputation and padding are not counted.
    """
    others = round((spec.scan_flops - 2 * spec.frozen_products) * sum(lengths))
    return FORWARD_AND_BACKWARD * spec.flops(lengths, trees) + others


def step_flops(spec: ModelSpec, plan: Plan) -> int:
    """Returns `model_flops` of the documents of a plan."""
    return model_flops(spec, plan.lengths, plan.trees)


def gpu_kind(device_name: str) -> str | None:
    """Returns the key of `PEAK_FLOPS` for a device name; None if not in the table."""
    return next((kind for kind in PEAK_FLOPS if re.search(rf"\b{kind}\b", device_name)), None)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Returns the peak FLOP/s of a device by its name; None if not in the table."""
    kind = gpu_kind(device_name)
    if kind is None:
        return None
    bfloat16, float32 = PEAK_FLOPS[kind]
    if dtype == "bfloat16":
        return bfloat16
    return float32


def device_peak(device: torch.device, dtype: str) -> float | None:
    """Returns the peak FLOP/s of a device; None on a CPU, and for a GPU not in the table."""
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), dtype)


class MetricsLog:
    """Writes every step to the console and metrics.jsonl, and to TensorBoard and Weights & Biases
    if set. Rank 0 has one."""

    def __init__(self, config: Config, after_step: int) -> None:
        """Continues after `after_step`: lines of later steps, which an interrupted run left, are
        removed."""
        folder = config.train.run_dir
        self.path = folder / LOG
        self._every = config.log.every
        self._steps = config.train.steps
        self._times: deque[float] = deque(maxlen=RECENT)
        self._shown = {after_step + 1, config.train.steps}
        lines = list(read_log(self.path))
        kept = [line for step, line in lines if step is not None and step["step"] <= after_step]
        # A kill may cut the last one short.
        if damaged := sum(step is None for step, _ in lines[:-1]):
            print(f"{damaged} damaged lines of {self.path} are left out", file=sys.stderr)
        new = self.path.with_suffix(".partial")
        new.write_text("".join(f"{line}\n" for line in kept), "utf-8")
        new.replace(self.path)
        self.stream = self.path.open("a", encoding="utf-8")
        self.events = None
        if config.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(str(folder / "tensorboard"), purge_step=after_step + 1)
        if config.log.wandb is None:
            self.wandb_run = None
        else:
            self.wandb_run = _start_wandb(config, config.log.wandb, resumes=after_step > 0)

    def write(self, metrics: StepMetrics) -> None:
        notable = metrics.skipped or metrics.validation_loss is not None
        self._times.append(metrics.step_time_s)
        if metrics.step % self._every == 0 or metrics.step in self._shown or notable:
            step_s = sum(self._times) / len(self._times)
            line = metrics.console(self._steps, step_s * (self._steps - metrics.step))
            print(line, flush=True)
        numbers = {
            name: None if isinstance(n, float) and not math.isfinite(n) else n
            for name, n in asdict(metrics).items()
        }
        self.stream.write(json.dumps(numbers) + "\n")
        self.stream.flush()
        if self.events is not None:
            for tag, value in metrics.scalars().items():
                self.events.add_scalar(tag, value, metrics.step)
        if self.wandb_run is not None:
            self.wandb_run.log(metrics.scalars(), step=metrics.step)

    def close(self) -> None:
        self.stream.close()
        if self.events is not None:
            self.events.close()
        if self.wandb_run is not None:
            self.wandb_run.finish()


def check_wandb(setting: WandbSetting | None) -> None:
    """Raises UserError if Weights & Biases is to be logged to and its package is not installed."""
    if setting is not None and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"log.wandb is {setting.project}, and the package wandb is not installed: pip install "
            "wandb, or set log.wandb null"
        )


def _start_wandb(config: Config, setting: WandbSetting, *, resumes: bool) -> Any:
    """Starts a run of Weights & Biases, or continues the one that the run was logged to before."""
    folder = config.train.run_dir
    identity = folder / "wandb_id"
    known = identity.read_text("utf-8") if resumes and identity.exists() else None
    run = importlib.import_module("wandb").init(
        project=setting.project,
        name=setting.name or folder.name,
        entity=setting.entity,
        tags=setting.tags,
        id=known,
        resume="allow",
        dir=str(folder),
        config=config.model_dump(mode="json"),
    )
    identity.write_text(run.id, "utf-8")
    return run


def read_log(path: Path) -> Iterator[tuple[dict[str, Any] | None, str]]:
    """Yields step and text of every line; None for the step if the line is damaged or was cut short
    by a kill."""
    if path.exists():
        for line in path.read_text("utf-8", errors="replace").splitlines():
            step: dict[str, Any] | None = None
            with suppress(ValueError, KeyError, TypeError, OverflowError):
                values = json.loads(line)
                step = {**values, "step": int(values["step"])}
            yield step, line


def mean_speed(folder: Path) -> str:
    """Returns the mean tokens per second over all steps in a run folder, in total and per rank, for
    people."""
    used = ("tokens", "step_time_s", "tokens_per_s_per_rank")
    steps = [
        step
        for step, _ in read_log(folder / LOG)
        if step and all(isinstance(step.get(n), (int, float)) for n in used)
    ]
    seconds = sum(step["step_time_s"] for step in steps)
    if not seconds:
        return "no steps"
    tokens = sum(step["tokens"] for step in steps)
    per_rank = sum(step["tokens_per_s_per_rank"] * step["step_time_s"] for step in steps)
    computed = sum(step.get("computed_tokens") or step["tokens"] for step in steps)
    merged = f", {tokens:,} tokens merged to {computed:,}" * (computed < tokens)
    speed = f"{_short(tokens / seconds)} tokens/s, {_short(per_rank / seconds)} per rank"
    return f"{speed}, {seconds / len(steps):.2f} s per step{merged}"
