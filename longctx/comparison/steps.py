"""The steps that a comparison plans: documents from a length mix, a file or a store, for every number of ranks.

Steps of a file are drawn as training draws those of a store: a whole file as one step would be a batch that nobody trains on.
Documents longer than all ranks together hold are split, dropped or refused, as in training, and what was done is said in words.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longctx.comparison.baselines.fixed_static import check_fixed_degree
from longctx.comparison.mixes import load_mix
from longctx.comparison.modelled import Case, cut
from longctx.data.sampler import Sampler, first_lengths
from longctx.data.store import Store
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.layout import longest_document
from longctx.planning.plan import PlanError
from longctx.planning.validation import check_lengths, check_settings


@dataclass(frozen=True)
class Source:
    """Where lengths come from.

    Attributes:
        words: the source in words.
        draw: from a number of ranks and the longest document that fits, the lengths of every step, and what must be said of
            them (empty if nothing).
        data_set: lengths of all documents, of which steps are drawn; None if only those drawn are known.
    """

    words: str
    draw: Callable[[int, int], tuple[list[list[int]], str]]
    seed: int = 0
    data_set: NDArray[np.int64] | None = None


def mix_source(name: str, documents: int | None, documents_a_rank: int, seed: int, steps: int) -> Source:
    """Steps drawn from a named mix, with `documents` each, or so many a rank."""
    mix = load_mix(name)

    def draw(ranks: int, _: int) -> tuple[list[list[int]], str]:
        count = documents_a_rank * ranks if documents is None else documents
        return [mix.draw(count, seed + i) for i in range(steps)], ""

    return Source(f"documents drawn from the length mix {name}, seed {seed}", draw, seed)


def file_source(
    lengths: Sequence[int], name: str, global_tokens: Callable[[int], int], seed: int, steps: int, long_documents: str
) -> Source:
    """Steps of `global_tokens` drawn from these documents as training draws from a store; all at once if they hold fewer."""

    def draw(ranks: int, longest: int) -> tuple[list[list[int]], str]:
        pieces, wanted = _fit(lengths, longest, long_documents), global_tokens(ranks)
        tokens = sum(pieces)
        if tokens < wanted:
            why = f"their {tokens:,} tokens are fewer than its {wanted:,}"
            return [list(pieces)], f"on {ranks:,} ranks all documents are one step: {why}"
        sampler = Sampler(np.array(pieces), global_tokens=wanted, seed=seed, max_length=max(pieces))
        return first_lengths(sampler, steps), ""

    return Source(f"{len(lengths):,} documents of {name}, seed {seed}", draw, seed, np.array(lengths))


def store_source(path: Path, global_tokens: Callable[[int], int], seed: int, steps: int, long_documents: str) -> Source:
    """The first steps that training on a store would take."""
    store = Store.open(path)

    def draw(ranks: int, longest: int) -> tuple[list[list[int]], str]:
        sampler = Sampler(
            store.lengths,
            global_tokens=global_tokens(ranks),
            seed=seed,
            max_length=longest,
            long_documents=long_documents,
            name=store.name,
            pairs=store.pairs,
        )
        return first_lengths(sampler, steps), ""

    return Source(
        f"the first step{'s' * (steps > 1)} of {path}, {len(store):,} documents, seed {seed}", draw, seed, store.lengths
    )


def make_cases(
    source: Source,
    ranks: Sequence[int],
    tokens_per_rank: int,
    profile: HardwareProfile,
    long_documents: str,
    all_must_fit: bool,
    fixed_degree: int | None = None,
) -> tuple[list[Case], list[str]]:
    """The steps on every number of ranks, and what was done to documents that are too long.

    Numbers of ranks that cannot hold the documents, or not at `fixed_degree`, are left out and named, unless all must fit.
    Raises PlanError if one must and does not, or if none does.
    """
    cases: list[Case] = []
    words: list[str] = []
    refused: list[PlanError] = []
    for n in ranks:
        check_settings(n, tokens_per_rank, "auto", None, None, None)
        try:
            found, said = _cases(source, n, tokens_per_rank, profile, long_documents, fixed_degree)
        except PlanError as error:
            if all_must_fit:
                raise
            refused.append(error)
            words.append(f"{n} ranks are left out: {error}")
            continue
        cases += found
        words += said
    if not cases:
        raise refused[-1]
    return cases, words


def _cases(
    source: Source,
    ranks: int,
    tokens_per_rank: int,
    profile: HardwareProfile,
    long_documents: str,
    fixed_degree: int | None,
) -> tuple[list[Case], list[str]]:
    """The steps on so many ranks, and what must be said of them."""
    longest = longest_document(ranks, tokens_per_rank) or ranks * tokens_per_rank
    if long_documents == "error" and source.data_set is not None and int(source.data_set.max()) > longest:
        check_lengths(source.data_set.tolist(), ranks, tokens_per_rank, profile)  # says which
    drawn, remark = source.draw(ranks, longest)
    fitted = [_fit(lengths, longest, long_documents) for lengths in drawn]
    for lengths in fitted:
        check_lengths(lengths, ranks, tokens_per_rank, profile)
    data_set = np.concatenate(drawn) if source.data_set is None else source.data_set
    kept = data_set[data_set <= longest] if long_documents == "drop" else np.minimum(data_set, longest)
    if fixed_degree is not None:
        check_fixed_degree(fixed_degree, int(kept.max()), ranks, tokens_per_rank)
    cases = [
        Case(lengths, ranks, tokens_per_rank, seed=source.seed + i, longest=int(kept.max()), fixed_degree=fixed_degree)
        for i, lengths in enumerate(fitted)
    ]
    words = [remark] if remark else []
    if long := int((data_set > longest).sum()):
        done = {"split": "split into pieces", "drop": "left out"}[long_documents]
        words.append(f"{long} longer than {longest:,} tokens, more than {ranks} ranks hold, {done}")
    return cases, words


def steps_drawn(cases: Sequence[Case]) -> str:
    """How many steps were drawn, in words."""
    by_count: dict[int, list[str]] = {}
    for ranks, count in Counter(case.ranks for case in cases).items():
        by_count.setdefault(count, []).append(f"{ranks:,}")
    parts = [f"{count} step{'s' * (count > 1)} drawn" for count in by_count]
    if len(parts) > 1:
        parts = [f"{part} on {', '.join(ranks)} ranks" for part, ranks in zip(parts, by_count.values(), strict=True)]
    return ", ".join(parts)


def sweeps(cases: Sequence[Case], budgets: Sequence[int], longest: Sequence[int]) -> list[Case]:
    """The same steps with other budgets, and with documents cut to other lengths."""
    varied = [
        replace(_cut(case, most), tokens_per_rank=budget, sweep="budget")
        for budget in budgets
        for case in cases
        if (most := longest_document(case.ranks, budget))
    ]
    varied += [replace(_cut(case, most), max_length=most, sweep="longest") for most in longest for case in cases]
    return varied


def _cut(case: Case, most: int) -> Case:
    """The step, and the data set that it is of, with documents cut to at most so many tokens."""
    return replace(case, lengths=cut(case.lengths, most), longest=None if case.longest is None else min(case.longest, most))


def _fit(lengths: Sequence[int], longest: int, long_documents: str) -> tuple[int, ...]:
    if long_documents == "split":
        return cut(lengths, longest)
    if long_documents == "drop":
        kept = tuple(length for length in lengths if length <= longest)
        if not kept:
            raise PlanError(f"every document is longer than the {longest:,} tokens that fit: split them, or take more ranks")
        return kept
    return tuple(lengths)
