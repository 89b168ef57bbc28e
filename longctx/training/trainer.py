"""Trainer: the training loop, from plans to optimizer steps. `Trainer.step` shows one step on one
screen."""

import gc
import math
import resource
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from longctx.attention.host_to_device import copy_to
from longctx.config import Config
from longctx.data.loader import Loader
from longctx.data.packing import StepBatch
from longctx.hf.source import ModelSource
from longctx.parallel.environment import Launch
from longctx.parallel.mesh import Mesh
from longctx.parallel.pipeline import idle
from longctx.parallel.timing import Moment, Spans, now, seconds
from longctx.training import agreement
from longctx.training.agreement import PlanAgreement
from longctx.training.clock import ATTENTION, EXCHANGE, OPTIMIZER
from longctx.training.health import FiniteLoss, NonFiniteLoss
from longctx.training.metrics import MetricsLog, StepMetrics, device_peak, step_flops
from longctx.training.optimizer import (
    clip_gradients,
    learning_rate,
    leaves_out,
    set_learning_rate,
    sum_of_squares,
    unless_finite,
)
from longctx.training.runner import ModelRunner
from longctx.training.saved import checkpoint
from longctx.training.saved.run_folder import BEST
from longctx.training.saved.saving import Saver
from longctx.training.step_sums import ArrivingSums, StepSums
from longctx.training.stop_signal import StopSignal
from longctx.training.trace import Tracer
from longctx.training.validation import Validator


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """What a run has beside model, optimizer and loader.

    Attributes:
        validator, log, tracer: what validates, logs and traces steps; None for none.
        base: folder and fingerprint of the checkpoint that the run began from.
        best: step and validation loss of the best checkpoint so far.
        steps_done: steps done before, by this run or the one that it continues.
    """

    validator: Validator | None = None
    log: MetricsLog | None = None
    tracer: Tracer | None = None
    base: Mapping[str, str] | None = None
    best: Mapping[str, float] | None = None
    steps_done: int = 0


@dataclass(frozen=True, kw_only=True)
class QueuedStep:
    """A step that the device has been given, and whose numbers the host has not read.

    Attributes:
        batch: data of the step.
        losses: this rank's part of the loss in every micro-batch, on the device.
        sums: loss and gradient norm, on their way to the host.
        rate: learning rate.
        spans, schedule: spans of the step, and of its pipeline's schedule; None without a pipeline.
        start, end: when the step began, and ended.
    """

    batch: StepBatch
    losses: torch.Tensor
    sums: ArrivingSums
    rate: float
    spans: Spans
    schedule: Spans | None
    start: Moment
    end: Moment


class Trainer:
    """A run on one rank. `training.assembly` makes its parts.

    Attributes:
        steps_done: steps done since the beginning of the run, or of the run that it continues.
        best: step and validation loss of the best checkpoint so far.
        stopping: whether a signal ends the run after this step.
        ahead: whether the optimizer leaves out updates on the device, so that the host need not
            wait for it: then the numbers of a step are read when the next one is queued.
    """

    def __init__(
        self,
        runner: ModelRunner,
        optimizer: torch.optim.Optimizer,
        loader: Loader | None = None,
        *,
        stop: StopSignal | None = None,
        parts: RunParts | None = None,
    ) -> None:
        """Joins the parts of a run on one rank.

        Args:
            runner: model of the run.
            optimizer: optimizer of the model.
            loader: steps to train on; None if batches are passed to `step`.
            stop: signal after which the run ends.
            parts: what the run has beside these; None: nothing.
        """
        parts = parts or RunParts()
        self.runner = runner
        self.config = runner.config
        self.mesh = runner.mesh
        self.model = runner.model
        self.optimizer = optimizer
        self.loader = loader
        if loader is not None:
            loader.finish = runner.make_ready
        self.stop = stop or StopSignal()
        self.validator = parts.validator
        self.log = parts.log
        self.tracer = parts.tracer
        self.base = parts.base
        self.best = parts.best
        self.steps_done = parts.steps_done
        self.stopping = False
        self.ahead = leaves_out(optimizer, self.mesh.device)
        self.finite = FiniteLoss(self.config, self.mesh)
        self.saver = Saver(
            self.config.train.run_dir,
            self.mesh.control,
            self.config.checkpoint.keep,
            beside=self.config.checkpoint.asynchronous,
            local_ranks=Launch.read().local_world_size,
        )
        self._plans = PlanAgreement(self.mesh)
        self._written = False  # whether `saver.advance` would not wait
        self._queued = deque[QueuedStep]()

    @classmethod
    def of(
        cls,
        config: Config,
        mesh: Mesh,
        source: ModelSource,
        loader: Loader | None = None,
        *,
        stop: StopSignal | None = None,
    ) -> "Trainer":
        """Builds a model with its initial weights, and its optimizer. Collective."""
        runner = ModelRunner(config, mesh, source)
        return cls(runner, runner.make_optimizer(), loader, stop=stop)

    def train(self) -> bool:
        """Runs to the last step. Returns False if a signal stopped the run before, after a
        checkpoint if the run writes any."""
        if self.mesh.peers is not None:
            self.mesh.peers.position = self.position
        try:
            return self._train()
        finally:
            gc.unfreeze()

    def _train(self) -> bool:
        assert self.loader is not None
        with (
            self.loader,
            closing(self.log) if self.log else nullcontext(),
            self.tracer or nullcontext(),
        ):
            first = self.steps_done + 1
            while self.steps_done < self.config.train.steps:
                try:
                    if self.tracer is not None:
                        self.tracer.before(self.steps_done + 1)
                    with self._placed():
                        self._queue(None)
                        metrics = self._settle_due()
                except NonFiniteLoss:  # raised on every rank
                    self.saver.finish()
                    raise
                # Later collections skip what exists now: while one rank collects, all wait.
                if self.steps_done == first:
                    gc.collect()
                    gc.freeze()
                if self._written:
                    self.saver.advance()
                if self.tracer is not None:
                    self.tracer.after(self.steps_done)
                if metrics is None:
                    continue
                improved = False
                last = self.steps_done == self.config.train.steps
                if self.validator is not None and self._is_validated(last):
                    self.runner.position.begin(f"validation after step {self.steps_done}")
                    validation = self.validator.validate()
                    metrics = replace(metrics, **validation)
                    improved = self._improves(validation["validation_loss"])
                if self.log is not None:
                    self.log.write(metrics)
                if self._is_saved(last, improved=improved):
                    self.save(wait=last or self.stopping)
                if self.stopping and not last:
                    return False
        return True

    def _settle_due(self) -> StepMetrics | None:
        """Reads the numbers of the step before the last one, and logs them; then those of the last
        one, unless the host goes ahead. Returns the metrics of the last one. Collective."""
        while len(self._queued) > 1:
            before = self._settle()
            if self.log is not None:
                self.log.write(before)
        last = self.steps_done == self.config.train.steps
        known = self._is_validated(last) or self._is_saved(last)
        if self.ahead and not (last or self.stopping or known):
            return None
        return self._settle()

    def _is_saved(self, last: bool, *, improved: bool = False) -> bool:
        every = self.config.checkpoint.every
        return every is not None and (
            last or self.stopping or improved or self.steps_done % every == 0
        )

    def _is_validated(self, last: bool) -> bool:
        every = self.config.eval.every
        return (
            every is not None
            and not (self.stopping and not last)
            and (last or self.steps_done % every == 0)
        )

    def _improves(self, loss: float) -> bool:
        """Notes a validation loss. Returns whether it is the lowest so far, and the best checkpoint
        is to be kept."""
        if not self.config.checkpoint.best or not loss < (
            math.inf if self.best is None else self.best["loss"]
        ):
            return False
        self.best = {"step": self.steps_done, "loss": loss}
        return True

    def position(self) -> str:
        """Returns where this rank is: step, micro-batch, layer and pass, or what else it does."""
        return f"step {self.steps_done + 1}, {self.runner.position.text()}"

    def step(self, batch: StepBatch | None = None) -> StepMetrics:
        """Runs one optimizer step over the whole domain, on the loader's next batch unless `batch`
        is given. Collective.

        Every rank gives its own share of a batch.
        """
        with self._placed():
            self._queue(batch)
            return self._settle()

    @contextmanager
    def _placed(self) -> Iterator[None]:
        """Adds to errors where this rank is."""
        try:
            yield
        except RuntimeError as error:
            error.add_note(f"rank {self.mesh.world_rank}: {self.position()}")
            raise

    def _queue(self, batch: StepBatch | None) -> None:
        """Runs a step, of which the device may have much left to do; its numbers are read by
        `_settle`. Collective."""
        runner = self.runner
        start = now(self.mesh.device)
        runner.position.begin("reading data")
        if batch is None:
            assert self.loader is not None
            batch = next(self.loader)
        runner.position.begin("before the first micro-batch")
        self._plans.require(batch.plan.hash, batch.step)
        losses = runner.forward_backward(batch)
        runner.position.begin("gradient norm")
        with runner.clock.span(OPTIMIZER):
            sums = self._sums(losses)
        rate = learning_rate(batch.step, self.config.schedule_steps, self.config.optimizer)
        set_learning_rate(self.optimizer, rate)
        runner.position.begin("optimizer")
        with record_function("optimizer"), runner.clock.span(OPTIMIZER):
            if batch.target_tokens > 0:
                self._update(sums)
            self.optimizer.zero_grad()
        self.steps_done = batch.step
        if batch.step % agreement.EVERY == 0:
            agreement.require_same_copies(self.model, batch.step, self.mesh.control)
        self._written = False  # not known yet
        schedule = None if runner.pipeline is None else runner.pipeline.clock.cut()
        self._queued.append(
            QueuedStep(
                batch=batch,
                losses=losses,
                sums=sums.to_host(),
                rate=rate,
                spans=runner.clock.cut(),
                schedule=schedule,
                start=start,
                end=now(self.mesh.device),
            )
        )

    def _sums(self, losses: torch.Tensor) -> StepSums:
        """Sums a step over all ranks, on the device. Tensor ranks count tokens once. Collective."""
        runner = self.runner
        copy = None if runner.pipeline is None else runner.pipeline.tied_copy
        gradients = (p.grad for p in self.model.parameters() if p is not copy)
        squares = sum_of_squares(each for each in gradients if each is not None)
        loss = losses.double().sum()
        if not self.mesh.counts:
            loss = torch.zeros_like(loss)
        mine = torch.stack([copy_to(squares, self.mesh.device), loss])
        return StepSums(self.mesh.gather_on_device(torch.cat([mine, runner.balance.end_step()])))

    def _update(self, sums: StepSums) -> None:
        """Clips the gradients and updates weights and biases, unless loss or gradient is not
        finite. The host waits to know it only if the optimizer cannot leave out an update."""
        if not self.ahead and not bool(sums.finite):
            return
        clip_gradients(
            self.model.parameters(), self.config.optimizer.clip_grad_norm, norm=sums.norm
        )
        if self.ahead:
            with unless_finite(self.optimizer, sums.finite):
                self.optimizer.step()
        else:
            self.optimizer.step()
        self.runner.balance.move_biases(sums.finite)

    def _settle(self) -> StepMetrics:
        """Reads the numbers of the step that was queued first. Collective: all processes meet on
        the host. Raises NonFiniteLoss on every rank if the run should stop."""
        step = self._queued.popleft()
        batch = step.batch
        self.runner.position.begin(f"numbers of step {batch.step}")
        grad_norm, sums = step.sums.read()
        ranks = sums | self._gather(step)
        loss = sums["loss"].sum().item()
        updates = batch.target_tokens > 0 and self.finite.check(
            batch, step.losses, loss=loss, grad_norm=grad_norm
        )
        self.stopping = bool(ranks["stop"].any())
        self._written = bool(ranks["written"].all())
        step_s = seconds(step.start, step.end)
        known = {
            "grad_norm": grad_norm,
            "lr": step.rate,
            "mfu": self._utilisation(batch, step_s),
            "skipped": not updates,
        }
        return replace(
            StepMetrics.of(batch, ranks, step_s, **known),
            loss=loss if batch.target_tokens else math.nan,
        )

    def save(self, *, wait: bool = True) -> Path:
        """Writes a checkpoint of the current step, after a check of copies. Returns its folder.
        Collective.

        Without `wait` it is published during later steps, by `saver.advance`.
        """
        self.runner.position.begin(f"checkpoint of step {self.steps_done}")
        if self.steps_done % agreement.EVERY:  # otherwise the step has compared them
            agreement.require_same_copies(self.model, self.steps_done, self.mesh.control)
        # All that is known without a loader.
        longest = {"max_length": self.config.max_length(self.mesh.world_size)}
        data = longest if self.loader is None else self.loader.state_dict()
        state: dict[str, Any] = {
            "step": self.steps_done,
            "data": data,
            "model": self.model.describe(),
            "base": self.base,
            BEST: self.best,
        }
        parts = self.mesh.gather_objects(checkpoint.without_moments(self.model, self.optimizer))
        state[checkpoint.WITHOUT_MOMENTS] = sorted({name for part in parts for name in part})
        folder = self.saver.start(self.model, self.optimizer, state)
        if wait:
            self.saver.finish()
        return folder

    def _utilisation(self, batch: StepBatch, seconds: float) -> float | None:
        """Returns the model FLOP utilization of a step; None if the devices' peak FLOP/s is not
        known."""
        peak = device_peak(self.mesh.device, self.config.dtype)
        if peak is None:
            return None
        flops = step_flops(self.model.spec, batch.plan)
        return flops / (seconds * peak * self.mesh.world_size)

    def _gather(self, step: QueuedStep) -> dict[str, torch.Tensor]:
        """Gathers what the hosts of all processes know of a step: float64 [world size] by name.

        Normally it is the only collective of a step in which all processes meet on the host: it
        carries the hash of the next step's plan. If a rank has not planned ahead, the ranks compare
        the plan when its step begins. Each takes 0.1 s at a thousand ranks, with idle GPUs unless
        another step is queued.
        """
        spent = step.spans.seconds()
        idle_s, idle_share = (0.0, 0.0) if step.schedule is None else idle(step.schedule)
        rows = 0.0
        if self.mesh.counts:
            rows = float(sum(micro_batch.rows for micro_batch in step.batch.micro_batches))
        local = {
            "rows": rows,
            "bubble_share": idle_share,
            "data_wait_s": step.batch.data_wait_s,
            "attention_s": spent[ATTENTION],
            "exchange_wait_s": spent[EXCHANGE],
            "optimizer_s": spent[OPTIMIZER],
            "bubble_s": idle_s,
            "peak_memory_bytes": float(peak_memory_bytes(self.mesh.device)),
            "stop": float(self.stop.received),
            "written": float(self.saver.written),
        }
        next_hash = None if self.loader is None else self.loader.next_hash()
        values, plans = self.mesh.gather_with_digest(list(local.values()), next_hash)
        self._plans.hear(plans)
        return dict(zip(local, values.T, strict=True))


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the peak memory of this process in bytes: of the CUDA allocator, or resident memory
    on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024
