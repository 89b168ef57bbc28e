"""Steps of a comparison: documents from a length mix, a file or a store, for every number of ranks.

Steps from a file are drawn as training draws from a store, because a whole file is no realistic
step. Documents longer than all ranks can hold are split, dropped or refused by the sampler of
training, and reported.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longctx.comparison.baselines import best_single_degree, check_fixed_degree
from longctx.comparison.mixes import load_mix
from longctx.comparison.modelled import Case
from longctx.data.pieces import SamplerError
from longctx.data.sampler import Sampler
from longctx.data.store.store import Store
from longctx.errors import UserError
from longctx.planning.check import check_lengths, check_settings
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import longest_document
from longctx.planning.plan import PlanError


class Drawn(NamedTuple):
    """Lengths of every step, and a remark or empty text."""

    lengths: list[list[int]]
    remark: str = ""


@dataclass(frozen=True)
class LengthSource:
    """A source of document lengths.

    Attributes:
        draw: function from number of ranks and maximum document length to steps.
        longest: tokens of the longest document that steps can be drawn from, whether or not it is
            drawn. A run must hold it.
        data_set: lengths of all documents that steps are drawn from; None for a mix, of which only
            a histogram is known.
    """

    words: str
    draw: Callable[[int, int], Drawn]
    longest: int
    seed: int = 0
    data_set: NDArray[np.int64] | None = None

    def longest_kept(self, most: int, long_documents: str) -> int:
        """Returns tokens of the longest document that is left if those of more than `most` are
        split or dropped."""
        if long_documents == "drop" and self.data_set is not None:
            return int(self.data_set[self.data_set <= most].max())
        return min(self.longest, most)


def mix_source(
    name: str, documents: int | None, documents_per_rank: int, seed: int, steps: int
) -> LengthSource:
    """Returns steps of `documents` documents drawn from a length mix (None: `documents_per_rank` ×
    ranks)."""
    mix = load_mix(name)

    def draw(ranks: int, _: int) -> Drawn:
        count = documents_per_rank * ranks if documents is None else documents
        return Drawn([mix.draw(count, seed + i) for i in range(steps)])

    return LengthSource(
        f"{_steps(steps)} of documents drawn from the length mix {name}, seed {seed}",
        draw,
        mix.longest,
        seed,
    )


def file_source(
    lengths: Sequence[int],
    name: str,
    global_tokens: Callable[[int], int],
    seed: int,
    steps: int,
    long_documents: str,
) -> LengthSource:
    """Returns steps of `global_tokens(ranks)` tokens, drawn from the lengths as training draws from
    a store.

    If all documents have fewer tokens, they are one step.
    """

    def draw(ranks: int, longest: int) -> Drawn:
        tokens = global_tokens(ranks)
        pieces = fit(lengths, longest, long_documents)
        if sum(pieces) < tokens:
            why = f"they have {sum(pieces):,} tokens, fewer than {tokens:,} per step"
            return Drawn([list(pieces)], f"on {ranks:,} ranks all documents are one step: {why}")
        sampler = Sampler(np.array(pieces), global_tokens=tokens, seed=seed, max_length=max(pieces))
        return Drawn(first_lengths(sampler, steps))

    words = f"{_steps(steps)} of the {len(lengths):,} documents of {name}, seed {seed}"
    return LengthSource(words, draw, longest=max(lengths), seed=seed, data_set=np.array(lengths))


def store_source(
    path: Path, global_tokens: Callable[[int], int], seed: int, steps: int, long_documents: str
) -> LengthSource:
    """Returns the steps of a store, as a run with these settings would draw them."""
    store = Store.open(path)

    def draw(ranks: int, longest: int) -> Drawn:
        sampler = Sampler(
            store,
            global_tokens=global_tokens(ranks),
            seed=seed,
            max_length=longest,
            long_documents=long_documents,
        )
        return Drawn(first_lengths(sampler, steps))

    words = (
        f"the first {'step' if steps == 1 else _steps(steps)} of {path}, a store of "
        f"{len(store):,} documents, seed {seed}"
    )
    return LengthSource(words, draw, longest=store.longest, seed=seed, data_set=store.lengths)


def first_lengths(sampler: Sampler, count: int) -> list[list[int]]:
    lengths = []
    cursor = sampler.start
    for _ in range(count):
        pieces, cursor = sampler.step(cursor)
        lengths.append([piece.length for piece in pieces])
    return lengths


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count > 1)}"


def fit(lengths: Sequence[int], longest: int, long_documents: str = "split") -> tuple[int, ...]:
    """Splits or drops documents of more than `longest` tokens, as training does; `error` leaves
    them, for `check_lengths`.

    Raises SamplerError if none is left.
    """
    if long_documents == "error":
        return tuple(lengths)
    sampler = Sampler(
        np.array(lengths),
        global_tokens=1,
        seed=0,
        max_length=longest,
        long_documents=long_documents,
    )
    return tuple(piece.length for piece in sampler.in_order())


def make_cases(
    source: LengthSource,
    ranks: Sequence[int],
    tokens_per_rank: int,
    profile_on: Callable[[int], HardwareProfile],
    long_documents: str,
    all_must_fit: bool,
    fixed_degree: int | None = None,
) -> tuple[list[Case], list[str]]:
    """Returns the steps for every number of ranks, and remarks on documents that are too long.

    `profile_on` returns the profile of a number of ranks. Numbers of ranks that cannot hold the
    documents, or not at `fixed_degree`, are skipped with a remark, or with `all_must_fit` refused.
    Raises UserError for a refused number of ranks, or if all are skipped.
    """
    cases: list[Case] = []
    words: list[str] = []
    refused: list[UserError] = []
    for n in ranks:
        check_settings(
            n, tokens_per_rank, mode="auto", degree=None, bins=None, max_remote_tokens=None
        )
        try:
            steps, remarks = _cases(
                source,
                n,
                tokens_per_rank=tokens_per_rank,
                profile=profile_on(n),
                long_documents=long_documents,
                fixed_degree=fixed_degree,
            )
        except (PlanError, SamplerError) as error:
            if all_must_fit:
                raise
            refused.append(error)
            words.append(f"{n} ranks are skipped: {error}")
            continue
        cases += steps
        words += remarks
    if not cases:
        raise refused[-1]
    return cases, words


def _cases(
    source: LengthSource,
    ranks: int,
    tokens_per_rank: int,
    profile: HardwareProfile,
    long_documents: str,
    fixed_degree: int | None,
) -> tuple[list[Case], list[str]]:
    """Returns the steps for one number of ranks, and remarks on them."""
    longest = longest_document(ranks, tokens_per_rank) or ranks * tokens_per_rank
    if (
        long_documents == "error"
        and source.data_set is not None
        and int(source.data_set.max()) > longest
    ):
        try:
            check_lengths(source.data_set.tolist(), ranks, tokens_per_rank, profile)
        except PlanError as error:
            raise PlanError(f"{error} (--long-documents split, or drop)") from error
    drawn, remark = source.draw(ranks, longest)
    fitted = [fit(lengths, longest, long_documents) for lengths in drawn]
    for lengths in fitted:
        check_lengths(lengths, ranks, tokens_per_rank, profile)
    longest_kept = source.longest_kept(longest, long_documents)
    if fixed_degree is not None:
        check_fixed_degree(fixed_degree, longest_kept, ranks, tokens_per_rank)
    single = None
    with suppress(PlanError):  # the rows say the reason
        single = best_single_degree(
            fitted, longest_kept, ranks=ranks, tokens_per_rank=tokens_per_rank, profile=profile
        )
    cases = [
        Case(
            lengths,
            ranks,
            tokens_per_rank=tokens_per_rank,
            seed=source.seed + i,
            longest=longest_kept,
            fixed_degree=fixed_degree,
            single_degree=single,
        )
        for i, lengths in enumerate(fitted)
    ]
    words = [remark] if remark else []
    data_set = np.concatenate(drawn) if source.data_set is None else source.data_set
    if long := int((data_set > longest).sum()):
        done = {"split": "split", "drop": "dropped"}[long_documents]
        words.append(
            f"{long} documents longer than {longest:,} tokens, the maximum of {ranks} ranks, {done}"
        )
    return cases, words
