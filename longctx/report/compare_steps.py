"""The steps that a comparison plans: documents from a length mix, a file or a store, for every number of ranks.

Documents longer than all ranks together hold are split, dropped or refused, as in training, and what was done is said in words.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from longctx.data.sampler import Sampler
from longctx.data.store import Store
from longctx.planning.layout import longest_document
from longctx.planning.mixes import load_mix
from longctx.planning.plan import PlanError
from longctx.planning.profile import HardwareProfile
from longctx.planning.request import check_lengths, check_settings
from longctx.report.compare import Case, cut

LONG_DOCUMENTS = ("split", "drop", "error")


@dataclass(frozen=True)
class Source:
    """Where lengths come from: in words, and for a number of ranks and the longest document that fits, a list for each step."""

    words: str
    draw: Callable[[int, int], list[list[int]]]
    seed: int = 0


def mix_source(name: str, documents: int | None, documents_a_rank: int, seed: int, steps: int) -> Source:
    """Steps drawn from a named mix, with `documents` each, or so many a rank."""
    mix = load_mix(name)

    def draw(ranks: int, _: int) -> list[list[int]]:
        count = documents_a_rank * ranks if documents is None else documents
        return [mix.draw(count, seed + i) for i in range(steps)]

    return Source(f"documents drawn from the length mix {name}, seed {seed}", draw, seed)


def list_source(lengths: Sequence[int], words: str) -> Source:
    """The same documents on any number of ranks."""
    return Source(words, lambda ranks, longest: [list(lengths)])


def store_source(path: Path, global_tokens: Callable[[int], int], seed: int, steps: int, long_documents: str) -> Source:
    """The first steps that training on a store would take."""
    store = Store.open(path)

    def draw(ranks: int, longest: int) -> list[list[int]]:
        sampler = Sampler(
            store.lengths,
            global_tokens=global_tokens(ranks),
            seed=seed,
            max_length=longest,
            long_documents=long_documents,
            name=store.name,
        )
        result, cursor = [], 0
        for _ in range(steps):
            pieces, cursor = sampler.step(cursor)
            result.append([piece.length for piece in pieces])
        return result

    return Source(f"the first steps of {path}, {len(store):,} documents, seed {seed}", draw, seed)


def make_cases(
    source: Source,
    ranks: Sequence[int],
    tokens_per_rank: int,
    profile: HardwareProfile,
    long_documents: str,
    all_must_fit: bool,
) -> tuple[list[Case], list[str]]:
    """The steps on every number of ranks, and what was done to documents that are too long.

    Numbers of ranks that cannot hold the documents are left out and named, unless all must fit. Raises PlanError if one must
    and does not, or if none does.
    """
    cases: list[Case] = []
    words: list[str] = []
    refused: list[PlanError] = []
    for n in ranks:
        check_settings(n, tokens_per_rank, "auto", None, None, None)
        longest = longest_document(n, tokens_per_rank) or n * tokens_per_rank
        drawn = source.draw(n, longest)
        try:
            fitted = [_fit(lengths, longest, long_documents) for lengths in drawn]
            for lengths in fitted:
                check_lengths(lengths, n, tokens_per_rank, profile)
        except PlanError as error:
            if all_must_fit:
                raise
            refused.append(error)
            words.append(f"{n} ranks are left out: {error}")
            continue
        cases += [Case(lengths, n, tokens_per_rank, seed=source.seed + i) for i, lengths in enumerate(fitted)]
        long = sum(length > longest for lengths in drawn for length in lengths)
        if long:
            done = {"split": "split into pieces", "drop": "left out"}[long_documents]
            words.append(f"{long} longer than {longest:,} tokens, more than {n} ranks hold, {done}")
    if not cases:
        raise refused[-1]
    return cases, words


def sweeps(cases: Sequence[Case], budgets: Sequence[int], longest: Sequence[int]) -> list[Case]:
    """The same steps with other budgets, and with documents cut to other lengths."""
    varied = [
        replace(case, lengths=cut(case.lengths, most), tokens_per_rank=budget, sweep="budget")
        for budget in budgets
        for case in cases
        if (most := longest_document(case.ranks, budget))
    ]
    varied += [
        replace(case, lengths=cut(case.lengths, most), max_length=most, sweep="longest") for most in longest for case in cases
    ]
    return varied


def _fit(lengths: list[int], longest: int, long_documents: str) -> tuple[int, ...]:
    if long_documents == "split":
        return cut(lengths, longest)
    if long_documents == "drop":
        kept = tuple(length for length in lengths if length <= longest)
        if not kept:
            raise PlanError(f"every document is longer than the {longest:,} tokens that fit: split them, or take more ranks")
        return kept
    return tuple(lengths)
