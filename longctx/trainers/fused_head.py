"""The trainers of TRL whose loss needs whole sequences: DPO, GRPO, RLOO and KTO.

All of them call `model(input_ids=.., attention_mask=.., labels=.., fused_lm_head=True)` and read values per token, of shape
[rows, tokens - 1]. This call is planned: the rows of all ranks are shared like documents of a step, every rank runs its
micro-batches, and sends the values to the ranks whose rows they are of. Each rank computes its own loss from them, and DDP or
FSDP averages the gradients, as before. A call is balanced, not a step.

Rows of a rank that begin alike, such as the completions of a prompt, become trees, which are computed once.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from longctx.data.packing import MicroBatch
from longctx.data.trees import merge_prefixes
from longctx.trainers.documents import Document, rows_of
from longctx.trainers.refusals import TrainerError
from longctx.trainers.step import Sharing

LEAST_SHARED = 16
"""First tokens that rows must share to be merged: plans with fewer, larger documents have less freedom."""
PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""Fields of the head's output with a value per token; those that a trainer did not ask for are None."""


@dataclass(frozen=True)
class PlannedHead:
    """Plans the calls of a model to which TRL has added a fused head; for `replaced_method`.

    `merged`, if it is given, is called with the share of a batch's tokens that are left after merging; None: rows stay apart.
    """

    sharing: Sharing
    merged: Callable[[float], None] | None = None
    calls: Iterator[int] = field(default_factory=itertools.count)

    def __call__(self, own: Callable[..., Any], model: Any, *arguments: Any, **named: Any) -> Any:
        if not named.get("fused_lm_head") or "ring_attention" in named:
            return own(model, *arguments, **named)
        return self._values(functools.partial(own, model), model, **named)

    def _values(
        self, own: Any, model: Any, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **others: Any
    ) -> Any:
        """Returns the head's output for this rank's rows. Collective."""
        from trl.trainer.utils import FusedCausalLMOutput

        if unknown := sorted(
            name for name, value in others.items() if value is not None and name not in ("use_cache", "fused_lm_head")
        ):
            raise TrainerError(f"the trainer passes {', '.join(unknown)} to its model, which splitting sequences would lose")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows = rows_of({"input_ids": input_ids, "attention_mask": mask, "labels": labels})
        if any(len(row) != 1 for row in rows):
            raise TrainerError("a row of the trainer's batch has no token: every row must have one sequence")
        documents, places = self._merged([document for (document,) in rows])
        # Every row: a rank whose rows have no target takes part in the backward of the others.
        share = self.sharing.share([documents], every=True)
        # One graph is kept as it is; of several, each keeps only its inputs.
        recompute = len(share.micro_batches) > 1 and torch.is_grad_enabled()
        head = functools.partial(self._head, own, model, next(self.calls))
        computed = [checkpoint(head, batch, use_reentrant=False) if recompute else head(batch) for batch in share.micro_batches]
        result: dict[str, Any] = {}
        for name in computed[0]:
            values = self.sharing.rows_of_batch(share, [of_batch[name] for of_batch in computed], mask, places)
            result[name] = values[:, :-1]  # a token's label is the next one
        if "is_top1" in result:
            result["is_top1"] = result["is_top1"].bool()
        return FusedCausalLMOutput(label_mask=(labels[:, 1:] != -100) & mask[:, 1:].bool(), **result)

    def _merged(self, rows: list[Document]) -> tuple[list[Document], torch.Tensor | None]:
        """Returns the documents of a batch, and the rows there of its tokens; None if each row is a document."""
        if self.merged is None:
            return rows, None
        together = merge_prefixes(
            [row.tokens for row in rows],
            [np.roll(row.labels, 1) for row in rows],  # not shifted; the last one is -100
            most_tokens=self.sharing.ranks * self.sharing.tokens_per_rank,
            tokens_per_rank=self.sharing.tokens_per_rank,
            least_shared=LEAST_SHARED,
        )
        self.merged(sum(together.lengths) / sum(len(row.tokens) for row in rows))
        parts = enumerate(zip(together.tokens, together.labels, strict=True))
        starts = np.cumsum([0, *together.lengths])
        places = np.concatenate([starts[document] + rows_there for document, rows_there in together.rows])
        return [Document(*part, together.trees.get(number)) for number, part in parts], torch.from_numpy(places)

    def _head(self, own: Any, model: Any, call: int, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Returns the head's values for the tokens of a micro-batch, float32 [tokens]."""
        noise = self.sharing.noise
        output = own(fused_lm_head=True, **self.sharing.inputs(model, batch, call))
        values = {name: value[0].float() for name in PER_TOKEN if (value := getattr(output, name)) is not None}
        if noise is not None and values["log_probs"].requires_grad:  # layers may be recomputed after other calls
            values["log_probs"].register_hook(functools.partial(lambda rows, _: setattr(noise, "rows", rows), noise.rows))
        return values
