"""Trainer: the training loop, from plans to optimizer steps. `Trainer.step` shows one step on one screen."""

import gc
import math
import resource
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from longctx.attention import RingAttention
from longctx.attention.host_to_device import copy_to
from longctx.config import Config
from longctx.data.loader import Loader
from longctx.data.packing import StepBatch, empty_micro_batch
from longctx.data.store import Store
from longctx.errors import UserError
from longctx.model.protocol import Model
from longctx.model.source import ModelSource
from longctx.parallel.mesh import Launch, Mesh, number_of
from longctx.parallel.pipeline import Inputs, PipelineRun
from longctx.parallel.sharding import reduce_gradients, reshard
from longctx.planning.layout import Layout
from longctx.planning.plan import Plan
from longctx.training import agreement, checkpoint
from longctx.training.balance import Balance
from longctx.training.checkpoint import Checkpoint
from longctx.training.checkpoint_io import CheckpointError
from longctx.training.clock import ATTENTION, EXCHANGE, OPTIMIZER, StepClock
from longctx.training.gradients import clip_gradients, norm_of, sum_of_squares
from longctx.training.loss import cross_entropy_sum, labelled_rows, log_probabilities, rows_with_labels
from longctx.training.metrics import MetricsLog, StepMetrics
from longctx.training.model_folder import keep_model_files
from longctx.training.multi_token import MultiTokenLoss
from longctx.training.objective import Objective, StepWeights, TokenMean, document_sums
from longctx.training.optimizer import learning_rate, make_optimizer, set_learning_rate
from longctx.training.preference import preferences
from longctx.training.reference import Reference
from longctx.training.saving import Saver
from longctx.training.setup import (
    build_loader,
    build_model,
    check_pairs,
    choose_max_length,
    computed_by,
    longest_of,
    make_attention,
)
from longctx.training.stop_signal import StopSignal
from longctx.training.trace import Tracer, micro_batch_name
from longctx.training.utilisation import model_flops, peak_flops
from longctx.training.validation import Documents, Score, Validation, documents_apart, mean_loss, mean_preference

Attend = Callable[[Plan, Layout], Any]
"""A function from a plan and this rank's layout in one micro-batch to attention."""

MOST_SKIPPED = 3
"""Steps in a row that may have no update with `train.on_nonfinite: skip`."""


class NonFiniteLoss(UserError):
    """Raised if loss or gradient is infinite or NaN. The weights of the last checkpoint are intact."""


@dataclass
class Trainer:
    """A run on one rank. `Trainer.start` makes a trainer; `train` runs it to the last step."""

    config: Config
    mesh: Mesh
    model: Model
    optimizer: torch.optim.Optimizer
    pipeline: PipelineRun | None = None
    loader: Loader = field(init=False)
    documents: Documents | None = None
    """Validation documents."""
    objective: Objective = field(default_factory=TokenMean)
    preference_apart: Objective | None = None
    """Objective of the validation documents, with DPO."""
    log: MetricsLog | None = None
    stage: int = 0
    """Stage of the run, counted from 0."""
    until: int = field(init=False)
    """Last step of this stage, or of a run without stages."""
    steps_done: int = 0
    stop: StopSignal = field(default_factory=StopSignal)
    stopping: bool = False
    agreed: float | None = None
    """First bits of the hash of the next step's plan, if all ranks have said that it is theirs."""
    written: bool = True
    """Whether `saver.advance` would not wait."""
    skipped: int = 0
    """Number of last steps in a row without an update, because loss or gradient was not finite."""
    base: dict[str, str] | None = None
    """Folder and fingerprint of the checkpoint that the run began from."""
    tracer: Tracer | None = None
    attend: Attend | None = None
    """Replaces the attention of the settings, for measurements."""

    doing: str | Callable[[], str] = "starting"
    """What this rank is doing in the step, for those who wait for it."""

    def __post_init__(self) -> None:
        self.clock = StepClock(self.mesh.device)
        self.balance = Balance.of(self.model, self.config, self.mesh)
        self.multi_token = MultiTokenLoss(self.model.spec.predictions, self.config.train.mtp_loss)
        self.until = self.config.train.steps
        local_ranks, settings = Launch.read().local_world_size, self.config.checkpoint
        self.saver = Saver(
            self.config.train.run_dir,
            self.mesh.control,
            settings.keep,
            beside=settings.asynchronous,
            local_ranks=local_ranks,
        )

    @classmethod
    def build(cls, config: Config, mesh: Mesh, source: ModelSource) -> "Trainer":
        """Builds a trainer with model and optimizer, but without a loader: batches are passed to `step`."""
        model, pipeline = build_model(source, config, mesh)
        return cls(config, mesh, model, make_optimizer(model, config.optimizer, mesh.device), pipeline)

    @classmethod
    def start(
        cls,
        config: Config,
        mesh: Mesh,
        store: Store,
        resume_from: Checkpoint | None = None,
        stop: StopSignal | None = None,
    ) -> "Trainer":
        """Builds model, optimizer and loader, and loads a checkpoint if given. Rank 0 writes config, model files and log.

        In a run with stages the trainer is for the stage of the next step, and `store` must be the store of that stage.
        The run stops after the current step if `stop` has received its signal on any rank.
        """
        run, stage = config, config.stage_after(resume_from.step if resume_from is not None else 0)
        config = run.at_stage(stage)
        check_pairs(config, store)
        source = config.model_source(store.tokenizer.vocab_size)
        trainer = cls.build(config, mesh, source)
        trainer.stage, trainer.until = stage, run.stage_ends[stage]
        if source.files is not None:
            trainer.base = {"folder": str(source.files.folder), "fingerprint": source.files.fingerprint}
        same_stage = resume_from is not None and resume_from.stage == stage
        found = resume_from if same_stage else None
        max_length = choose_max_length(config, mesh.world_size, found, longest_of(config, store))
        trainer.loader = build_loader(store, config, mesh, max_length)
        if config.eval.every is not None:
            trainer.documents = documents_apart(config, store, max_length)
        trainer.stop = stop or StopSignal()
        if resume_from is not None:
            trainer._go_to(resume_from, run)
        if config.dpo.beta is not None:  # before the checkpoint replaces the initial weights
            trainer._prefer(store, resumes=resume_from is not None)
        if resume_from is not None:
            checkpoint.load(resume_from, trainer.model, trainer.optimizer, mesh.control)
        if mesh.world_rank == 0:
            run_dir = config.train.run_dir
            keep_model_files(run_dir, source, store, stage)
            computed = computed_by(config, source.spec, mesh.device.type)
            (run_dir / "config.yaml").write_text(f"# {mesh.world_size} ranks: {computed}\n{run.to_yaml()}", "utf-8")
            trainer.log = MetricsLog(
                run_dir,
                after_step=trainer.steps_done,
                tensorboard=config.log.tensorboard,
                wandb=config.log.wandb,
                settings=run.model_dump(mode="json"),
            )
        return trainer

    def train(self) -> bool:
        """Runs to the last step. Returns False if a signal stopped the run before, after a checkpoint if the run writes any."""
        if self.mesh.peers is not None:
            self.mesh.peers.position = self.position
        try:
            finished = self._train()
        finally:
            gc.unfreeze()
        if self.mesh.peers is not None:
            self.mesh.peers.position = None  # otherwise it would keep the weights of this stage
        return finished

    def _train(self) -> bool:
        with self.loader, closing(self.log) if self.log else nullcontext(), self.tracer or nullcontext():
            first = self.steps_done + 1
            while self.steps_done < self.until:
                try:
                    if self.tracer is not None:
                        self.tracer.before(self.steps_done + 1)
                    metrics = self.step()
                except NonFiniteLoss:  # raised on every rank
                    self.saver.finish()
                    raise
                if self.steps_done == first:  # later collections skip what exists now: while one rank collects, all wait
                    gc.collect()
                    gc.freeze()
                if self.written:
                    self.saver.advance()
                if self.tracer is not None:
                    self.tracer.after(self.steps_done)
                last, every = self.steps_done == self.until, self.config.checkpoint.every
                if self._is_validated(last):
                    metrics = replace(metrics, **asdict(self.validate()))
                if self.log is not None:
                    self.log.write(metrics)
                if every is not None and (last or self.stopping or self.steps_done % every == 0):
                    self.save(wait=last or self.stopping)
                if self.stopping and not last:
                    return False
        return True

    def _is_validated(self, last: bool) -> bool:
        every = self.config.eval.every
        return every is not None and not (self.stopping and not last) and (last or self.steps_done % every == 0)

    def position(self) -> str:
        """Returns where this rank is: step, micro-batch, layer and pass, or what else it does."""
        return f"step {self.steps_done + 1}, {self.doing if isinstance(self.doing, str) else self.doing()}"

    def step(self, batch: StepBatch | None = None) -> StepMetrics:
        """Runs one optimizer step over the whole domain, on the loader's next batch unless `batch` is given. Collective."""
        try:
            return self._step(batch)
        except RuntimeError as error:
            error.add_note(f"rank {self.mesh.world_rank}: {self.position()}")
            raise

    def _step(self, batch: StepBatch | None) -> StepMetrics:
        started = time.perf_counter()
        self.doing = "reading data"
        batch = next(self.loader) if batch is None else batch
        self.doing = "before the first micro-batch"
        if self.agreed != number_of(batch.plan.hash):
            self.mesh.agree(batch.plan.hash, f"the plan of step {batch.step}")
        weights = self.weigh(batch, self.objective)
        losses = self._forward_backward(batch, weights)
        copy = self.pipeline.tied_copy if self.pipeline is not None else None
        self.doing = "gradient norm"
        with self.clock.span(OPTIMIZER):
            squares = sum_of_squares(p.grad for p in self.model.parameters() if p is not copy and p.grad is not None)
        domain = self._share(batch, losses, squares)
        grad_norm = norm_of(domain["squares"])
        loss = domain["loss"].sum().item() if weights.loss is None else weights.loss
        if batch.target_tokens:
            self._count_skipped(batch, losses, loss, grad_norm)
        updates = batch.target_tokens > 0 and not self.skipped
        rate = learning_rate(batch.step, self.config.train.steps, self.config.optimizer)
        set_learning_rate(self.optimizer, rate)
        self.doing = "optimizer"
        with record_function("optimizer"), self.clock.span(OPTIMIZER):
            if updates:
                clip_gradients(self.model.parameters(), self.config.optimizer.clip_grad_norm, grad_norm)
                self.optimizer.step()
                self.balance.move_biases()
            self.optimizer.zero_grad()
        domain["optimizer_s"] += self.clock.take()[OPTIMIZER]
        self.steps_done = batch.step
        if batch.step % agreement.EVERY == 0:
            agreement.require_same_copies(self.model, batch.step, self.mesh.control)
        self.stopping, self.written = bool(domain["stop"].any()), bool(domain["written"].all())
        seconds = time.perf_counter() - started
        metrics = StepMetrics.of(batch, domain, grad_norm, rate, seconds, self._utilisation(batch, seconds))
        return replace(metrics, loss=loss if batch.target_tokens else math.nan, skipped=not updates, **weights.reported)

    def save(self, *, wait: bool = True) -> Path:
        """Writes a checkpoint of the current step, after a check of copies. Returns its folder. Collective.

        Without `wait` it is published during later steps, by `saver.advance`.
        """
        self.doing = f"checkpoint of step {self.steps_done}"
        if self.steps_done % agreement.EVERY:  # otherwise the step has compared them
            agreement.require_same_copies(self.model, self.steps_done, self.mesh.control)
        state = {"step": self.steps_done, "data": self.loader.state_dict(), "model": self.model.describe(), "stage": self.stage}
        state["base"] = self.base
        folder = self.saver.start(self.model, self.optimizer, state)
        if wait:
            self.saver.finish()
        return folder

    def _forward_backward(self, batch: StepBatch, weights: StepWeights) -> torch.Tensor:
        """Returns this rank's part of the loss in every micro-batch; gradients are summed over the domain."""
        if self.pipeline is None:
            return torch.stack([self.micro_batch(batch, number, weights) for number in range(len(batch.micro_batches))])
        self.doing = self.pipeline.where
        return self.pipeline.forward_backward(len(batch.micro_batches), partial(self._inputs, batch, weights))

    def weigh(self, batch: StepBatch, objective: Objective) -> StepWeights:
        """Returns the weights of the tokens of a step, after a pass without gradients if the objective needs one."""
        if not objective.needs_log_probabilities:
            return objective.weights(batch)
        seen = self.look(batch, log_probabilities)
        return objective.weights(batch, seen, document_sums(batch, seen, self.mesh))

    @torch.no_grad()
    def look(self, batch: StepBatch, score: Score) -> list[torch.Tensor]:
        """Returns the `score` of every label, [T] for each of this rank's micro-batches, by a pass without gradients.

        Pipeline ranks without the head return zeros. Collective.
        """

        what = self.doing.split(", micro-batch")[0] if isinstance(self.doing, str) else "a pass without gradients"

        def inputs(number: int) -> Inputs:
            self.doing = f"{what}, micro-batch {number}"
            labels, device = batch.micro_batches[number].labels, self.mesh.device
            rows = copy_to(labelled_rows(labels), device)
            head = partial(score, labels=copy_to(labels, device), softcap=self.model.spec.logit_softcap, rows=rows)
            return replace(self._inputs(batch, StepWeights(1.0), number), head=head)

        if self.pipeline is not None:
            return self.pipeline.forward(len(batch.micro_batches), inputs)
        every_input = map(inputs, range(len(batch.micro_batches)))
        return [self.model(given.tokens, given.positions, given.attention, given.head) for given in every_input]

    def validate(self) -> Validation:
        """Returns the mean loss of the validation documents. Does not affect training. Collective."""
        assert self.documents is not None
        self.doing = f"validation after step {self.steps_done}"
        planner, apart = self.loader.planner, self.preference_apart
        if apart is None:
            found = mean_loss(self.documents, self.look, planner, self.mesh)
        else:
            found = mean_preference(self.documents, partial(self.weigh, objective=apart), planner, self.mesh)
        self._after_looking()
        return found

    def _prefer(self, store: Store, *, resumes: bool) -> None:
        """Switches the objective to DPO, and makes the reference log-probabilities of the store's pairs."""
        copy = self.pipeline.tied_copy if self.pipeline is not None else None
        weights = [weight.detach() for weight in self.model.parameters() if weight is not copy]
        reference = Reference(self.config, self.mesh, self.model, weights, self.look, self.loader.planner, resumes)
        coming = self.loader.coming(self.until)
        self.objective, self.preference_apart = preferences(reference, self.config.dpo, store, coming, self.documents)
        self._after_looking()

    def _after_looking(self) -> None:
        """Cleans up after passes without gradients: reshards the model and resets the clock."""
        reshard(self.model)  # otherwise blocks that stay gathered until backward would stay so until the next backward
        self.clock.take()

    def micro_batch(self, batch: StepBatch, number: int, weights: StepWeights) -> torch.Tensor:
        """Runs forward and backward of a micro-batch; gradients are reduced in the last one, or in each."""
        last = number == len(batch.micro_batches) - 1
        parallel = self.config.parallel
        reduce_gradients(
            self.model,
            in_this_backward=last or parallel.reduce_after == "micro_batch",
            keep_gathered=not last and parallel.reshard_after == "step",
        )
        given = self._inputs(batch, weights, number)
        later = {} if given.later is None else {"later": given.later}
        attention = given.attention
        self.doing = lambda: f"micro-batch {number}, attention last in {attention.last}"
        with record_function(given.name):
            loss: torch.Tensor = self.model(
                given.tokens, given.positions, given.attention, given.head, given.documents, **later
            )
            loss.backward()
        return loss.detach()

    def _inputs(self, batch: StepBatch, weights: StepWeights, number: int) -> Inputs:
        """Returns the inputs of this rank for a micro-batch; after the batch's last micro-batch, those of an empty one."""
        device, counted = self.mesh.device, None
        if number < len(batch.micro_batches):
            micro_batch = batch.micro_batches[number]
            attend = self.attend or self._attend
            attention = attend(batch.plan, micro_batch.layout)
            counted = None if weights.tokens is None else copy_to(weights.tokens[number], device)
        else:
            micro_batch = empty_micro_batch(number, self.mesh.rank)
            context = self.config.context
            attention = RingAttention(
                micro_batch.layout, kernel=context.kernel, deterministic=context.deterministic, device=device
            )
        rows = rows_with_labels(micro_batch.labels)
        head = partial(
            cross_entropy_sum,
            labels=copy_to(micro_batch.labels, device),
            divisor=weights.divisor,
            weights=counted,
            softcap=self.model.spec.logit_softcap,
            rows=None if rows is None else copy_to(rows, device),
            compiled=self.config.compiles(device.type, self.model.spec),
        )
        tokens, positions = copy_to(micro_batch.tokens, device), copy_to(micro_batch.positions, device)
        documents = self.balance.documents(batch.plan, micro_batch.layout, len(tokens))
        later = self.multi_token.later(micro_batch, head, weights.divisor, device)
        return Inputs(micro_batch_name(batch, number), tokens, positions, attention, head, documents, later)

    def _attend(self, plan: Plan, layout: Layout) -> Any:
        """Makes the attention of a micro-batch, as configured."""
        return self.model.attention(make_attention(self.config, self.mesh, self.model.spec, plan, layout, self.clock))

    def _utilisation(self, batch: StepBatch, seconds: float) -> float | None:
        """Returns the model FLOP utilization of a step; None if the devices' peak FLOP/s is not known."""
        peak, device = self.config.train.peak_flops, self.mesh.device
        if peak is None and device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(device), self.config.dtype)
        if peak is None:
            return None
        return model_flops(self.model.spec, batch.plan.lengths) / (seconds * peak * self.mesh.world_size)

    def _share(self, batch: StepBatch, losses: torch.Tensor, squares: float) -> dict[str, torch.Tensor]:
        """Gathers numbers on this step from all processes: float64 [world size] by name. Tensor ranks count tokens once.

        It is the only gather of a step over all processes if the next step is prepared on every rank, as the plan's hash comes
        along; otherwise the next step compares the hashes itself. Each takes 0.1 s at a thousand ranks, with idle GPUs.
        """
        counts, spent = self.mesh.counts, self.clock.take()
        idle_s, idle_share = self.pipeline.clock.idle() if self.pipeline is not None else (0.0, 0.0)
        coming = self.loader.next_hash() if hasattr(self, "loader") else None
        local = {
            "squares": squares,
            "plan": math.nan if coming is None else number_of(coming),
            "loss": float(losses.double().sum()) if counts else 0.0,
            "rows": float(sum(len(micro_batch.tokens) for micro_batch in batch.micro_batches)) if counts else 0.0,
            "bubble_share": idle_share,
            "data_wait_s": batch.data_wait_s,
            "attention_s": spent[ATTENTION],
            "exchange_wait_s": spent[EXCHANGE],
            "optimizer_s": spent[OPTIMIZER],
            "bubble_s": idle_s,
            "peak_memory_bytes": float(peak_memory_bytes(self.mesh.device)),
            "stop": float(self.stop.received),
            "written": float(self.saver.written),
            **self.balance.end_step(),
            **self.multi_token.end_step(),
        }
        local["mtp_loss"] *= counts
        domain = dict(zip(local, self.mesh.gather(list(local.values())).T, strict=True))
        plans = domain.pop("plan")
        self.agreed = plans[0].item() if (plans == plans[0]).all() else None
        return domain

    def _count_skipped(self, batch: StepBatch, losses: torch.Tensor, loss: float, grad_norm: float) -> None:
        """Counts the steps in a row whose loss or gradient is not finite, and names the documents of their micro-batches.

        Raises NonFiniteLoss on every rank if the run should stop.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.skipped = 0
            return
        self.skipped += 1
        stops = self.config.train.on_nonfinite == "stop" or self.skipped > MOST_SKIPPED
        affected = {
            batch.documents[shard.document]
            for micro_batch, part in zip(batch.micro_batches, losses, strict=True)
            if not part.isfinite()
            for shard in micro_batch.layout.shards
        }
        gathered = self.mesh.gather_objects(sorted(affected))
        named = sorted({name for names in gathered for name in names}) or sorted(batch.documents)
        more = f" and {len(named) - 20} more" if len(named) > 20 else ""
        intact = "" if self.config.checkpoint.every is None else "; the last checkpoint is intact"
        what = f"step {batch.step}: loss is {loss}, gradient norm is {grad_norm}"
        documents = f"Documents in the affected micro-batches: {', '.join(named[:20])}{more}"
        if stops:
            before = f", after {MOST_SKIPPED} skipped steps" if self.skipped > MOST_SKIPPED else ""
            raise NonFiniteLoss(f"{what}{before}{intact}. {documents}. Check these documents, or lower optimizer.learning_rate")
        if self.mesh.world_rank == 0:
            print(f"longctx train: {what}: no update. {documents}", file=sys.stderr, flush=True)

    def _go_to(self, found: Checkpoint, run: Config) -> None:
        """Sets the step and the position in the data to those of a checkpoint; reads no weights.

        The checkpoint must be of this stage, or of the end of an earlier one, whose RoPE may differ. Raises CheckpointError.
        """
        stage, model = found.stage, self.model
        if stage < self.stage and found.step == run.stage_ends[stage]:
            with torch.device("meta"):
                model = run.at_stage(stage).model_source(self.model.spec.vocab_size).build()
        elif stage != self.stage:
            raise CheckpointError(
                f"{found.folder} belongs to stage {stage + 1}, but with these stages step {found.step} belongs to stage "
                f"{self.stage + 1}: use the stages of that run"
            )
        different = model.differences(found.state["model"])
        if different:
            raise CheckpointError(f"{found.folder} contains another model: {'; '.join(different)}. Use the model of that run")
        began = found.state.get("base")  # None in earlier versions; a folder that is gone may be replaced by an export
        if began and self.base and began["fingerprint"] != self.base["fingerprint"] and Path(began["folder"]).is_dir():
            raise CheckpointError(
                f"{found.folder} belongs to a run that began from {began['folder']}, whose weights differ from those of "
                f"{self.base['folder']}: give that checkpoint, or choose another run folder (finetune: --out)"
            )
        data = found.state["data"]
        self.loader.load_state_dict(data) if stage == self.stage else self.loader.begin_stage(data)
        self.steps_done = found.step


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the peak memory of this process in bytes: of the CUDA allocator, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
