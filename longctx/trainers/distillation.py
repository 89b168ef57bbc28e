"""Distillation: TRL's `DistillationTrainer` and `GKDTrainer`, whose loss is the divergence of a
student from its teacher, by token.

A rank runs both models on its tokens of a planned call, and takes the divergence there, by TRL's
own function, from hidden states: chunk by chunk, of tokens with a loss alone. Two numbers a token
go to the rank of the row. What a teacher has said is kept where the student is computed again.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from longctx.attention.host_to_device import copy_to
from longctx.data import IGNORED_LABEL
from longctx.data.packing import MicroBatch
from longctx.hf.exactness import evaluating, replaced
from longctx.trainers.kinds import Traits, inner_model, is_of_peft
from longctx.trainers.planned_call import PlannedCall, whole_rows
from longctx.trainers.refusals import TrainerError

FUNCTION = "ChunkedDivergenceFunction"
"""TRL's function, by its name in the module of its trainer."""
PROBED = 8
"""Tokens that two models are tried on."""


@dataclass
class PlannedDivergence(PlannedCall):
    """Plans the calls of a student and of its teacher.

    Attributes:
        trainer: the trainer of both.
        bases: base models of student and teacher.
        temperature: that of the divergence.
    """

    trainer: Any = None
    bases: tuple[Any, Any] = (None, None)
    temperature: float = 1.0
    _hidden: Callable[[Any], torch.Tensor] | None = field(default=None, init=False)
    """Returns the hidden states of a model that TRL asks for."""

    def loss(
        self,
        student: Any,
        batch: Mapping[str, torch.Tensor],
        divisor: torch.Tensor | int | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the loss of this rank's rows, the sum of the student's entropies, and the number
        of tokens with a loss. Collective.

        Args:
            student: the model that is trained, unwrapped.
            batch: token ids, mask, and labels, -100 for tokens without a loss [rows, tokens].
            divisor: of the sum over tokens; None: their number.
        """
        said: dict[int, torch.Tensor] = {}
        compute = functools.partial(self._divergences, student, said)
        read = functools.partial(whole_rows, self.exchange.family, batch)
        values = self.values_of(read, batch["attention_mask"], compute)
        has_loss = batch["labels"][:, 1:] != IGNORED_LABEL
        divergences, entropies = values[:, :-1].unbind(-1)  # a token's label is the next one
        count = has_loss.sum()
        total = (divergences * has_loss).sum()
        entropy = (entropies * has_loss).sum().detach()
        if divisor is None:
            divisor = count.clamp(min=1)
        return total / divisor, entropy, count

    def _divergences(
        self, student: Any, said: dict[int, torch.Tensor], batch: MicroBatch, call: int
    ) -> torch.Tensor:
        """Returns divergence from the teacher and entropy of the tokens of a micro-batch, 0 where
        they have no loss [tokens, 2]. `said` are the teacher's hidden states, by micro-batch."""
        places = torch.nonzero(batch.labels != IGNORED_LABEL)[:, 0]
        rows = copy_to(places, self.exchange.attention.device)

        def hidden_of(model: Any) -> torch.Tensor:
            of_student, of_teacher = self.bases
            if model is student:
                return self._states(of_student, batch, call)[rows]
            if id(batch) not in said:
                said[id(batch)] = self._states(of_teacher, batch, call)[rows]
            return said[id(batch)]

        with replaced(self, "_hidden", hidden_of):
            values = self.by_trl(student, len(rows))
        tokens = max(1, batch.layout.tokens)
        return values.new_zeros(tokens, 2).index_copy(0, rows, values)

    def _states(self, base: Any, batch: MicroBatch, call: int) -> torch.Tensor:
        """Returns the last hidden states of a base model for a micro-batch [tokens, hidden]."""
        inputs = self.exchange.inputs(base, batch, call)
        for name in ("labels", "shift_labels"):
            inputs.pop(name, None)
        states: torch.Tensor = base(**inputs).last_hidden_state[0]
        return states

    def by_trl(self, student: Any, tokens: int) -> torch.Tensor:
        """Returns divergence and entropy of so many tokens, whose hidden states TRL asks for, as
        its own loss computes them [tokens, 2]."""
        from trl.trainer.distillation_trainer import DistillationTrainer

        module = sys.modules[DistillationTrainer.__module__]
        function = getattr(module, FUNCTION)
        found: list[torch.Tensor] = []

        def watched(*given: Any) -> Any:
            output = function.apply(*given)
            found.append(torch.stack(output, -1))
            return output

        def hidden(model: Any, *_: Any, **__: Any) -> torch.Tensor:
            assert self._hidden is not None
            return self._hidden(model)[None]

        loss = SimpleNamespace(
            accelerator=self.trainer.accelerator,
            teacher_model=self.trainer.teacher_model,
            beta=self.trainer.beta,
            temperature=self.temperature,
            _forward_redirection=redirection(),
            _get_last_hidden_state=hidden,
        )
        ones = torch.ones(1, tokens, dtype=torch.int64, device=self.exchange.attention.device)
        inputs = {
            "prompt_ids": ones[:, :0],
            "prompt_mask": ones[:, :0],
            "completion_ids": ones,
            "completion_mask": ones,
        }
        with replaced(module, FUNCTION, SimpleNamespace(apply=watched)):
            DistillationTrainer._compute_loss(loss, student, inputs, None)
        return found[0]


def redirection() -> Any:
    """Returns TRL's way to call a function within the forward of a wrapped model."""
    from trl.models.utils import _ForwardRedirection

    return _ForwardRedirection()


class Distilling:
    """Mixin before the class of a trainer: its loss is planned."""

    divergence: PlannedDivergence

    def _compute_loss(self: Any, unwrapped_student: Any, inputs: Any, num_items: Any) -> Any:
        """Returns the loss of `DistillationTrainer`, which calls it within the student's forward,
        and what it logs. Collective."""
        completions = inputs["completion_ids"]
        ids = torch.cat([inputs["prompt_ids"], completions], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        trained = inputs["completion_mask"]
        if "tool_mask" in inputs:
            trained = trained * inputs["tool_mask"]
        labels = torch.full_like(ids, IGNORED_LABEL)
        start = ids.shape[1] - completions.shape[1]
        labels[:, start:] = completions.masked_fill(trained == 0, IGNORED_LABEL)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        self.teacher_model.eval()
        return self.divergence.loss(unwrapped_student, batch, num_items)


class DistillingRows:
    """The same for `GKDTrainer`, which has whole logits of both models."""

    divergence: PlannedDivergence

    def compute_loss(
        self: Any,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Collective. There are no outputs beside the loss."""
        names = ("input_ids", "attention_mask", "labels")
        batch = {name: inputs[name] for name in names}
        self.teacher_model.eval()
        student = self.accelerator.unwrap_model(model)
        within = functools.partial(self.divergence.loss, student, batch, num_items_in_batch)
        loss, _, _ = redirection()(model, student, within)
        return (loss, {}) if return_outputs else loss


def distilled(traits: Traits, planned: PlannedCall) -> tuple[type, PlannedDivergence]:
    """Returns the mixin of a trainer that distils, and its loss, given how calls are planned.
    Raises TrainerError for heads that are no matrix of hidden states."""
    divergence = PlannedDivergence(**vars(planned))
    divergence.trainer = traits.trainer
    divergence.bases = traits.model.base_model, teacher_of(traits.trainer).base_model
    if traits.trl_class == "GKDTrainer":
        _check_heads(traits, divergence)
        return DistillingRows, divergence
    divergence.temperature = traits.trainer.temperature
    return Distilling, divergence


def _check_heads(traits: Traits, divergence: PlannedDivergence) -> None:
    """Raises TrainerError unless the loss of `GKDTrainer`, from logits, is that from hidden
    states."""
    trainer = traits.trainer
    student = trainer.accelerator.unwrap_model(trainer.model)
    teacher = trainer.accelerator.unwrap_model(trainer.teacher_model)
    if is_of_peft(traits.model.get_output_embeddings()):
        raise TrainerError(
            "the head of the student has adapters, which a divergence from hidden states would "
            "leave out: take lm_head from target_modules and modules_to_save"
        )
    ids = torch.arange(PROBED, device=traits.args.device)[None]
    with torch.no_grad(), evaluating(student), evaluating(teacher):
        logits = {model: model(ids).logits[0] for model in (student, teacher)}
        states = {}
        for model, base in zip((student, teacher), divergence.bases, strict=True):
            states[model] = base(ids).last_hidden_state[0]
        with replaced(divergence, "_hidden", states.__getitem__):
            ours = divergence.by_trl(student, PROBED)[:, 0].sum()
        plain = trainer.generalized_jsd_loss(
            logits[student], logits[teacher], beta=trainer.beta, reduction="sum"
        )
    if not torch.allclose(ours, plain, rtol=1e-3):
        raise TrainerError(
            f"logits of {type(traits.model).__name__} or its teacher are not those of their last "
            "hidden states and a matrix as TRL knows it: use DistillationTrainer"
        )


def teacher_of(trainer: Any) -> Any:
    """Returns the model of transformers that teaches."""
    return inner_model(trainer, trainer.teacher_model)
