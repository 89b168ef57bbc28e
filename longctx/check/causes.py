"""Causes: why the first part of a layer whose output is wrong is so, where that can be told."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from .attended import (
    ALONE,
    MANY,
    WAYS,
    Heads,
    Run,
    heads_of,
    of_heads,
    runs,
    with_scores,
    with_slope,
)
from .changes import change_of_order, change_of_rows, change_of_sizes
from .contexts import Sequence
from .looked import INPUT, OUTPUT
from .objectives import nearest
from .probe import Tokens
from .reference import Reference
from .variants import variants

PART_CHANGED = "hidden states are changed on their way"
TOKENS_SWAPPED = "tokens have the hidden states of other tokens"
KEYS = "tokens see other keys than they should"
SCALE_OF_SCORES = "scores of attention have another scale"
SINKS = "sinks of attention are ignored, or there is one too many"
HEADS = "heads of keys belong to other heads of queries"
DISTANCES = "scores of attention fall with the distance of keys"
KINDS = (PART_CHANGED, TOKENS_SWAPPED, KEYS, SCALE_OF_SCORES, SINKS, HEADS, DISTANCES)
FACTORS = 1 / 256, 256.0
"""Between which that of scores is looked for."""
SLOPES = 1e-4, 16.0
"""Between which the fall of scores with a token of distance is looked for."""
FEW = 3
"""Sequences on which variants are tried, the longest ones."""


class Cause(NamedTuple):
    """A kind of fault, always the same words, and what shows it."""

    kind: str
    details: str


class FirstOff(NamedTuple):
    """The first part of a layer whose output is wrong.

    Attributes:
        part: words for it: its input or output, and its name.
        numbers: of the tokens of the step that have a place in `sequences`.
        found, right: its output in the step and in the reference [tokens, width].
        wrong: which of these tokens have a wrong output.
        sequences: what the tokens should have seen.
        limit: largest relative difference of equal outputs.
    """

    part: str
    numbers: list[int]
    found: torch.Tensor
    right: torch.Tensor
    wrong: list[int]
    sequences: list[Sequence]
    limit: float

    def rows(self, of_sequences: torch.Tensor) -> torch.Tensor:
        """Returns the rows of these tokens, of rows of all tokens of the sequences."""
        held = (number for sequence in self.sequences for number in sequence.numbers)
        place = {number: at for at, number in enumerate(held)}
        return of_sequences[[place[number] for number in self.numbers]]

    def in_words(self, tokens: Tokens) -> str:
        """Returns which tokens are wrong."""
        first = self.numbers[self.wrong[0]]
        count = f"{len(self.wrong)} of {len(self.numbers)} tokens"
        place = f"token {tokens.place[first]} of document {tokens.document[first]}"
        return f"{count}, first {place}, in the {self.part}"


def cause_of(off: FirstOff, tokens: Tokens, reference: Reference) -> Cause | None:
    """Returns why a part is wrong; None where that is not known."""
    return (
        _by_change(off, tokens, change_of_rows)
        or _by_order(off, tokens)
        or _by_variant(off, tokens, reference)
        or _by_attention(off, tokens, reference)
        or _by_share(off, tokens, reference)
        or _by_change(off, tokens, change_of_sizes)
    )


def _by_change(off: FirstOff, tokens: Tokens, change_of: Callable[..., str]) -> Cause | None:
    wrong = torch.tensor(off.wrong)
    changed = change_of(off.found[wrong], off.right[wrong], limit=off.limit)
    if not changed:
        return None
    return Cause(PART_CHANGED, f"{changed}: {off.in_words(tokens)}")


def _by_order(off: FirstOff, tokens: Tokens) -> Cause | None:
    wrong = torch.tensor(off.wrong)
    order = change_of_order(off.found[wrong], off.right, limit=off.limit)
    if 2 * order.count(-1) > len(order):
        return None
    return Cause(TOKENS_SWAPPED, _in_order(off, order, tokens))


def _by_share(off: FirstOff, tokens: Tokens, reference: Reference) -> Cause | None:
    """Tells a part of a layer that is added to what the layer returns another number of times."""
    layer = off.part.removeprefix(OUTPUT)
    wrong = torch.tensor(off.wrong)
    lacking = (off.found - off.right)[wrong]
    rightly = [reference.parts(sequence) for sequence in off.sequences]
    for part in rightly[0]:
        if not part.startswith((f"{OUTPUT}{layer}.", f"{INPUT}{layer}")):
            continue
        added = off.rows(torch.cat([each[part] for each in rightly]))[wrong].double()
        times = float((lacking * added).sum() / added.square().sum())
        apart = (lacking - times * added).norm()
        if float(apart) <= 10 * off.limit * float(off.right[wrong].norm()):
            words = f"the {part} is added {1 + times:.4g} times"
            return Cause(PART_CHANGED, f"{words}: {off.in_words(tokens)}")
    return None


def _in_order(off: FirstOff, order: list[int], tokens: Tokens) -> str:
    """Returns whose output tokens have."""
    pairs = [
        (off.numbers[mine], off.numbers[theirs])
        for mine, theirs in zip(off.wrong, order, strict=True)
        if theirs >= 0
    ]
    moved = Counter(mine - theirs for mine, theirs in pairs)
    by, count = moved.most_common(1)[0]
    first, theirs = pairs[0]
    words = (
        f"token {tokens.place[first]} of document {tokens.document[first]} has that of token "
        f"{tokens.place[theirs]} of document {tokens.document[theirs]}"
    )
    if count == len(order) and abs(by) == 1:
        words = f"each has that of the one {'before' if by == 1 else 'after'} it"
    return f"{words}: {off.in_words(tokens)}"


def _by_variant(off: FirstOff, tokens: Tokens, reference: Reference) -> Cause | None:
    """Returns the variant of the model that is nearest to what the part returned, if it explains
    it."""
    found = None
    least = off.limit
    for variant in variants(reference, off.part.partition(" of ")[2]):
        with variant.done():
            apart = _largest_difference(off, reference)
        if apart < least:
            least = apart
            found = Cause(variant.kind, f"{variant.details}: {off.in_words(tokens)}")
    return found


def _largest_difference(off: FirstOff, reference: Reference) -> float:
    """Returns the largest relative difference of the part's output from that of the reference, in a
    few sequences."""
    index_of = {number: index for index, number in enumerate(off.numbers)}
    wrong = {off.numbers[index] for index in off.wrong}
    several = [each for each in off.sequences if not wrong.isdisjoint(each.numbers)]
    longest = sorted(several, key=lambda each: len(each.numbers), reverse=True)
    largest = 0.0
    for sequence in longest[:FEW]:
        held = [at for at, number in enumerate(sequence.numbers) if number in index_of]
        rows = [index_of[sequence.numbers[at]] for at in held]
        right = reference.parts(sequence)[off.part][held]
        differences = (off.found[rows] - right).norm(dim=1) / right.norm(dim=1).clamp_min(1e-300)
        largest = max(largest, float(differences.max()))
    return largest


def _by_attention(off: FirstOff, tokens: Tokens, reference: Reference) -> Cause | None:
    """Returns what attention did otherwise: scores, sinks, groups of heads, or keys."""
    if not off.part.startswith(OUTPUT):
        return None
    heads = heads_of(reference, off.part.removeprefix(OUTPUT), off.sequences)
    if heads is None:
        return None
    outputs = torch.cat([reference.parts(sequence)[off.part] for sequence in off.sequences])
    own = heads._replace(
        queries=off.rows(heads.queries),
        keys=off.rows(heads.keys),
        values=off.rows(heads.values),
        returned=off.rows(heads.returned),
        numbers=off.numbers,
    )
    returned = of_heads(own, off.rows(outputs).double(), off.found, limit=off.limit)
    if returned is None:
        return None
    looked = _Attention(off, own, returned=returned, tokens=tokens, window=reference.window)
    return looked.heads_swapped() or looked.scores() or looked.keys() or looked.distances()


class _Attention:
    """What heads returned in a step, against what they should have."""

    def __init__(
        self,
        off: FirstOff,
        heads: Heads,
        *,
        returned: torch.Tensor,
        tokens: Tokens,
        window: int | None,
    ) -> None:
        self.off = off
        self.heads = heads
        self.returned = returned
        self.tokens = tokens
        self.limit = 10 * off.limit  # what heads returned is solved for
        numbers = torch.tensor(heads.numbers)
        documents = torch.tensor([tokens.document[number] for number in heads.numbers])
        self.seen = (numbers[:, None] >= numbers) & (documents[:, None] == documents)
        as_it_is = with_scores(heads, self.seen, 1.0, heads.sinks)
        if window is not None and not self._near(as_it_is, heads.returned):
            self.seen &= numbers[:, None] - numbers < window

    def _near(self, found: torch.Tensor, right: torch.Tensor) -> bool:
        return bool(float((found - right).norm()) <= self.limit * float(right.norm()))

    def heads_swapped(self) -> Cause | None:
        """Tells heads of keys and values that are assigned to others of queries."""
        heads = self.heads
        count = heads.queries.shape[1]
        orders = dict[str, list[int]]()
        for of_keys in range(2, count):
            if count % of_keys == 0:
                words = f"{of_keys} of keys are tiled, and not repeated"
                orders[words] = [(head % of_keys) * (count // of_keys) for head in range(count)]
        orders["in the opposite order"] = list(range(count))[::-1]
        for words, order in orders.items():
            other = heads._replace(keys=heads.keys[:, order], values=heads.values[:, order])
            found = with_scores(other, self.seen, 1.0, heads.sinks)
            if self._near(found, self.returned):
                return Cause(HEADS, f"{words}: {self.off.in_words(self.tokens)}")
        return None

    def scores(self) -> Cause | None:
        """Tells scores that are multiplied, or another denominator."""
        zeros = torch.zeros(self.heads.queries.shape[1], dtype=torch.float64)
        for words, sinks in (("ignored", None), ("one too many", zeros)):
            if self._near(with_scores(self.heads, self.seen, 1.0, sinks), self.returned):
                return Cause(SINKS, f"{words}: {self.off.in_words(self.tokens)}")
        factor = self._factor()
        if factor:
            words = f"{factor:.4g} times what it should be"
            return Cause(SCALE_OF_SCORES, f"{words}: {self.off.in_words(self.tokens)}")
        return None

    def _apart(self, factor: float) -> float:
        found = with_scores(self.heads, self.seen, factor, self.heads.sinks)
        return float((found - self.returned).norm() / self.returned.norm())

    def _factor(self) -> float:
        """Returns by what scores are multiplied; 0: that is not it."""
        factor = nearest(self._apart, *FACTORS)
        return factor if self._apart(factor) <= self.limit else 0.0

    def distances(self) -> Cause | None:
        """Tells a penalty on the distance of keys, a number for each head."""
        found = list[float]()
        for head in range(self.heads.queries.shape[1]):
            wanted = self.returned[:, head]

            def apart(slope: float, head: int = head, wanted: torch.Tensor = wanted) -> float:
                sloped = with_slope(self.heads, self.seen, slope, head)
                return float((sloped - wanted).norm() / wanted.norm())

            slope = nearest(apart, *SLOPES)
            if not apart(slope) <= self.limit:
                return None
            found.append(slope)
        slopes = ", ".join(f"{slope:.3g}" for slope in found[:4])
        return Cause(DISTANCES, f"by {slopes} for each token: {self.off.in_words(self.tokens)}")

    def keys(self) -> Cause | None:
        """Tells the keys that tokens saw: a run of them, or all but a run, or a run beside."""
        at = self._wrong_heads()
        found = dict[int, Run]()
        step = -(-len(self.off.wrong) // MANY)
        for index in self.off.wrong[::step]:
            run = runs(self.heads, self.returned[index], index, at=at, seen=self.seen[index])
            if not run.apart <= self.limit:
                return None
            found[index] = run
        words = next(self._rules(found))
        if len(at) < self.heads.queries.shape[1]:
            words += f", in head {', '.join(map(str, at))} alone"
        return Cause(KEYS, f"{words}: {self.off.in_words(self.tokens)}")

    def _wrong_heads(self) -> list[int]:
        """Returns the heads that returned something else than they should."""
        wrong = torch.tensor(self.off.wrong)
        apart = (self.returned - self.heads.returned)[wrong].norm(dim=(0, 2))
        size = self.heads.returned[wrong].norm(dim=(0, 2))
        return [int(head) for head in (apart > self.limit * size).nonzero()[:, 0]]

    def _rules(self, found: dict[int, Run]) -> Iterator[str]:
        """Yields what all these runs have in common, then an example."""
        tokens = self.tokens
        numbers = self.heads.numbers
        first_of = dict[int, int]()
        last_of = dict[int, int]()
        for index, number in enumerate(numbers):
            first_of.setdefault(tokens.document[number], index)
            last_of[tokens.document[number]] = index
        documents = {index: tokens.document[numbers[index]] for index in found}
        index, run = next(iter(found.items()))
        if any(run.way != ALONE for run in found.values()):
            way = next(way for way in WAYS if any(run.way == way for run in found.values()))
            index, run = next(each for each in found.items() if each[1].way == way)
            yield f"{self._place(index)} {way} {self._span(run)}"
        begins = {index: run.begin - first_of[documents[index]] for index, run in found.items()}
        later = {index: run.end - 1 - index for index, run in found.items()}
        widths = {
            index: index + 1 - run.begin
            for index, run in found.items()
            if run.begin > first_of[documents[index]]
        }
        ends = {index: run.end - first_of[documents[index]] for index, run in found.items()}
        from_first = not any(begins.values())
        to_own = not any(later.values())
        if from_first and set(later.values()) == {-1}:
            yield "they do not see their own key"
        if from_first and min(later.values()) > 0:
            clipped = [
                value for index, value in later.items() if index + value < last_of[documents[index]]
            ]
            if not clipped:
                yield "they see all later ones of their document"
            elif set(clipped) == {max(later.values())}:
                yield f"they see {clipped[0]} later ones"
        if from_first and len(set(ends.values())) == 1:
            yield f"keys from token {next(iter(ends.values()))} of a document on are hidden"
        if to_own and len(set(begins.values())) == 1 and min(begins.values()) > 0:
            yield f"they do not see the first {next(iter(begins.values()))} of their document"
        if to_own and len(set(widths.values())) == 1 and len(widths) == len(found):
            yield f"as with a window of {next(iter(widths.values()))} tokens"
        yield f"{self._place(index)} {ALONE} {self._span(run)}"

    def _place(self, index: int) -> str:
        number = self.heads.numbers[index]
        return f"token {self.tokens.place[number]} of document {self.tokens.document[number]}"

    def _span(self, run: Run) -> str:
        if run.end - run.begin == 1:
            return self._place(run.begin)
        return f"tokens from {self._place(run.begin)[6:]} to {self._place(run.end - 1)[6:]}"
