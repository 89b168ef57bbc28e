"""Rollouts: completions of prompts with rewards, in memory, and the batch of an optimizer step over them.

Every rank is given all rollouts of a step. Those that begin alike, such as the completions of one prompt, become trees, unless
`data.merge_prefixes` is false; each rank then packs the tokens that the plan gives it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from longctx.data import IGNORED_LABEL
from longctx.data.loader import Planner, names_of_merged
from longctx.data.merging import Merging
from longctx.data.packing import Ids, StepBatch, Tokens, pack_documents
from longctx.errors import UserError

Numbers = Sequence[float] | npt.NDArray[Any] | torch.Tensor
"""One number for each token of a completion."""
LEAST_DEVIATION = 1e-4
"""Added to the standard deviation of a group's rewards, as in TRL's `_generate_and_score_completions`."""


class RolloutError(UserError):
    """Rollouts that cannot be trained on.

    Attributes:
        numbers: which of them, if it is a matter of single ones.
        why: what is wrong with them, and the way out.
    """

    numbers: Sequence[int] = ()
    why: str = ""

    @classmethod
    def of(cls, numbers: Sequence[int], why: str) -> "RolloutError":
        error = cls(f"rollouts {_some(list(map(str, numbers)))}: {why}")
        error.numbers, error.why = numbers, why
        return error

    def naming(self, names: Sequence[str]) -> "RolloutError":
        """Returns the same error with names for numbers."""
        return RolloutError(f"{_some([names[number] for number in self.numbers])}: {self.why}" if self.why else str(self))


@dataclass(frozen=True)
class Rollouts:
    """The rollouts of one optimizer step, the same on all ranks. Every list has one entry for each rollout.

    Attributes:
        prompts, completions: token ids, at least one each. A completion may have several turns.
        rewards: one number each; advantages are computed from them by group if they are not given.
        advantages: one number each, or one for each token of the completion.
        groups: a number each; rollouts of a group are compared with each other. None: those of the same prompt are a group.
        masks: True for each token of the completion that the model wrote; others are read, but not learned. None: all.
        old_logps: log p of each token of the completion by the model that updates are measured from. None: the present model.
        reference_logps: log p by the reference, for the KL divergence.
        sampler_logps: log p by the sampler, whose numbers differ from those of the trainer.

    Raises RolloutError for lists that do not fit each other, and for what cannot be learned from.
    """

    prompts: Sequence[Tokens]
    completions: Sequence[Tokens]
    rewards: Sequence[float] | None = None
    advantages: Sequence[float | Numbers] | None = None
    groups: Sequence[int] | None = None
    masks: Sequence[Sequence[bool] | npt.NDArray[np.bool_]] | None = None
    old_logps: Sequence[Numbers] | None = None
    reference_logps: Sequence[Numbers] | None = None
    sampler_logps: Sequence[Numbers] | None = None

    def __post_init__(self) -> None:
        if not len(self.prompts):
            raise RolloutError("there are no prompts: a step needs at least one rollout")
        for name in (
            "completions",
            "rewards",
            "advantages",
            "groups",
            "masks",
            "old_logps",
            "reference_logps",
            "sampler_logps",
        ):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.prompts):
                raise RolloutError(f"there are {len(self.prompts)} prompts, but {len(values)} {name}: give one for each")
        for name in ("prompts", "completions"):
            _refuse([not len(tokens) for tokens in getattr(self, name)], f"{name} are empty: give each at least one token")
        for name in ("masks", "old_logps", "reference_logps", "sampler_logps"):
            values = getattr(self, name)
            each = zip(self.completions if values is None else values, self.completions, strict=True)
            _refuse(
                [np.shape(numbers) != (len(tokens),) for numbers, tokens in each],
                f"{name} have another length than their completions: give one number for each token of a completion",
            )
        _refuse(list(self.counts == 0), "masks have no token: leave these rollouts out, or mark what the model wrote")
        for name in ("rewards", "advantages", "old_logps", "reference_logps", "sampler_logps"):
            values = getattr(self, name)
            finite = [np.isfinite(np.asarray(value, np.float64)).all() for value in ([] if values is None else values)]
            _refuse([not each for each in finite], f"{name} are not finite: check what computes them, or leave them out")
        if self.advantages is None:
            if self.rewards is None:
                raise RolloutError("rollouts have neither rewards nor advantages: give one of the two")
            _refuse(
                list(np.bincount(self._group)[self._group] == 1),
                "are alone in their group, so that no reward can be compared with theirs: sample several completions of every "
                "prompt, or give advantages",
            )
        else:
            of_tokens = zip(self.advantages, self.completions, strict=True)
            _refuse(
                [np.shape(values) not in ((), (len(tokens),)) for values, tokens in of_tokens],
                "advantages have another length than their completions: give one number, or one for each token",
            )

    def check(self, entries: int | None, capacity: int) -> None:
        """Raises RolloutError for token ids that a model with so many entries does not have, and for more tokens than fit."""
        for name in ("prompts", "completions"):
            ids = [np.asarray(tokens, np.int64) for tokens in getattr(self, name)]
            wrong = [each.min() < 0 or (entries is not None and each.max() >= entries) for each in ids]
            _refuse(wrong, f"{name} have token ids outside the model's 0 to {(entries or 0) - 1:,}: use the model's tokenizer")
        lengths = [len(prompt) + len(completion) for prompt, completion in zip(self.prompts, self.completions, strict=True)]
        _refuse(
            [length > capacity for length in lengths],
            f"have up to {max(lengths):,} tokens, and {capacity:,} fit: raise batch.tokens_per_rank, use more ranks, or give "
            "advantages and leave out these rollouts",
        )

    @cached_property
    def counts(self) -> Ids:
        """Number of tokens of each completion that are learned, [rollouts]."""
        return np.array([mask.sum() for mask in self.learned], np.int64)

    @cached_property
    def learned(self) -> list[npt.NDArray[np.bool_]]:
        """Whether each token of a completion is learned: its mask, or True."""
        if self.masks is None:
            return [np.ones(len(tokens), np.bool_) for tokens in self.completions]
        return [
            np.asarray(mask).astype(np.bool_) for mask in self.masks
        ]  # copies: tensors that are sent elsewhere move their memory

    @cached_property
    def sequence(self) -> torch.Tensor:
        """Rollout of every token of the completions, one after another, int64 [completion tokens]."""
        return torch.from_numpy(np.repeat(np.arange(len(self.completions)), list(map(len, self.completions))))

    def advantages_of_tokens(self, scaled: bool) -> torch.Tensor:
        """Returns the advantage of every token, float64 [completion tokens].

        From rewards it is the reward minus the mean of its group, divided by their standard deviation if `scaled` (Shao et al.,
        2024, section 4.1.2).
        """
        if self.advantages is not None:
            each = zip(self.advantages, self.completions, strict=True)
            return flat([np.broadcast_to(np.asarray(values, np.float64), len(tokens)) for values, tokens in each])
        rewards, group = np.asarray(self.rewards, np.float64), self._group
        sizes = np.bincount(group)
        advantages = rewards - (np.bincount(group, rewards) / sizes)[group]
        if scaled:
            deviations = np.sqrt(np.bincount(group, advantages**2) / np.maximum(1, sizes - 1))
            advantages = advantages / (deviations + LEAST_DEVIATION)[group]
        return torch.from_numpy(advantages)[self.sequence]

    @cached_property
    def _group(self) -> Ids:
        keys = [np.asarray(p, np.int64).tobytes() for p in self.prompts] if self.groups is None else self.groups
        return np.unique(np.array(keys, object), return_inverse=True)[1]

    @property
    def digest(self) -> str:
        """Returns a hash of all that the loss depends on."""
        numbers = hashlib.sha256()
        for name, values in vars(self).items():
            for value in values if name in self.__dataclass_fields__ and values is not None else ():
                numbers.update(f"{name}{np.shape(value)}".encode() + np.asarray(value).astype(np.float64).tobytes())
        return numbers.hexdigest()


def _refuse(wrong: Sequence[Any], why: str) -> None:
    """Raises RolloutError that names the rollouts that are wrong."""
    numbers = [number for number, is_wrong in enumerate(wrong) if is_wrong]
    if numbers:
        raise RolloutError.of(numbers, why)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


@dataclass(frozen=True, kw_only=True)
class RolloutBatch(StepBatch):
    """Data of one rank for one optimizer step over rollouts."""

    rollouts: Rollouts


def flat(values: Sequence[Numbers]) -> torch.Tensor:
    """Returns the numbers of all tokens of the completions, one after another, float64 [completion tokens]."""
    return torch.from_numpy(np.concatenate([np.asarray(each, np.float64) for each in values]))


def pack_rollouts(
    rollouts: Rollouts, *, step: int, rank: int, planner: Planner, merging: Merging | None, pad_to_multiple_of: int = 1
) -> RolloutBatch:
    """Plans an optimizer step over rollouts, and returns this rank's share of it. Every rank gives the same rollouts."""
    sequences, labels = list[Ids](), list[Ids]()
    for prompt, completion, learned in zip(rollouts.prompts, rollouts.completions, rollouts.learned, strict=True):
        sequences.append(np.concatenate([np.asarray(prompt, np.int64), np.asarray(completion, np.int64)]))
        targets = np.where(learned, np.asarray(completion, np.int64), IGNORED_LABEL)
        labels.append(np.concatenate([np.full(len(prompt), IGNORED_LABEL), targets]))
    merged = None if merging is None else merging.merge(sequences, labels)
    names = [f"rollout {number}" for number in range(len(sequences))]
    if merged is None:
        plan = planner([len(tokens) for tokens in sequences])
        packed, _ = pack_documents(plan, rank, sequences, labels, pad_to_multiple_of=pad_to_multiple_of)
    else:
        plan = planner(merged.lengths, trees=merged.trees)
        documents = merged.tokens, merged.labels
        packed, _ = pack_documents(plan, rank, *documents, pad_to_multiple_of=pad_to_multiple_of, shift=False)
        names = names_of_merged(names, merged)
    return RolloutBatch(
        step=step,
        plan=plan,
        documents=tuple(names),
        tokens=sum(map(len, sequences)),
        target_tokens=int(rollouts.counts.sum()),
        micro_batches=tuple(packed),
        rows=() if merged is None else merged.rows,
        rollouts=rollouts,
    )
