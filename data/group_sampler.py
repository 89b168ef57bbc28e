"""Group sampler: steps over whole groups of documents, which are never split."""

from collections.abc import Callable

import numpy as np

from longctx.data.sampler import Numbers, Piece, Sampler, SamplerError, check_long

GROUPS = "rollouts", "they are", "which keeps the advantages of the others"


class GroupSampler(Sampler):
    """Steps over groups of documents: a `Sampler` of groups, whose cursor counts groups, and that returns their documents.

    Args are those of `Sampler`, and `groups`: the group of each document, a number. Documents that are too long are dropped
    from their group, or refused.
    """

    def __init__(
        self,
        lengths: Numbers,
        groups: Numbers,
        *,
        global_tokens: int,
        seed: int,
        max_length: int,
        long_documents: str | None,
        name: Callable[[int], str] = str,
    ) -> None:
        is_long = lengths > max_length
        if is_long.any():
            check_long(lengths, ~np.zeros_like(is_long), int(is_long.sum()), max_length, long_documents, name, GROUPS)
        documents = np.flatnonzero(~is_long)
        documents = documents[np.argsort(groups[documents], kind="stable")]
        if not len(documents):
            raise SamplerError(
                f"no rollout is left: all {len(lengths)} have more than {max_length:,} tokens: raise data.max_length"
            )
        _, starts = np.unique(groups[documents], return_index=True)
        self._members = np.split(documents, starts[1:])
        tokens = np.array([lengths[members].sum() for members in self._members], np.int64)
        super().__init__(tokens, global_tokens=global_tokens, seed=seed, max_length=int(tokens.max()))
        self._lengths = lengths
        self.longest, self.without_targets = int(lengths[documents].max()), 0
        self.long = self.dropped = int(is_long.sum())
        self.dropped_tokens = int(lengths[is_long].sum())

    def step(self, cursor: int) -> tuple[tuple[Piece, ...], int]:
        groups, cursor = super().step(cursor)
        return tuple(piece for group in groups for piece in self._pieces_of(group)), cursor

    def in_order(self) -> tuple[Piece, ...]:
        return tuple(piece for group in super().in_order() for piece in self._pieces_of(group))

    def _pieces_of(self, group: Piece) -> list[Piece]:
        return [Piece(each, 0, int(self._lengths[each]), group.epoch) for each in self._members[group.document].tolist()]
