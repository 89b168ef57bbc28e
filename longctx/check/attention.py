"""Causes of wrong attention: scores, sinks, the order of heads, how ranks' parts are merged, or
which keys tokens saw."""

from collections.abc import Mapping
from itertools import product

import torch

from .attended import (
    MANY,
    Heads,
    Run,
    log_sums,
    of_parts,
    runs,
    with_added,
    with_cap_before,
    with_head,
    with_head_of_others,
    with_hidden_by,
    with_rounded,
    with_rounded_scores,
    with_scores,
    with_slope,
)
from .changes import ROUNDED
from .objectives import nearest
from .off import Cause, FirstOff, Spot
from .probe import Tokens
from .seen_keys import SeenKeys, place_of
from .variants import CAPS

KEYS = "tokens see other keys than they should"
SCALE_OF_SCORES = "scores of attention have another scale"
SINKS = "sinks of attention are ignored, or there is one too many"
HEADS = "heads of attention are in another order"
DISTANCES = "scores of attention fall with the distance of keys"
MERGED = "outputs of attention to ranks' keys are merged with wrong weights"
ROUNDED_KEYS = "keys or values of other ranks are rounded"
ROUNDED_OUTPUTS = "outputs of attention to ranks' keys are rounded before they are merged"
ROUNDED_SCORES = "scores of attention are rounded"
OTHER_SINKS = "sinks of attention are other ones"
SOFT_MASK = "other documents of a row are hidden by a small number"
KINDS = (
    *(KEYS, SCALE_OF_SCORES, SINKS, HEADS, DISTANCES, MERGED, ROUNDED_KEYS),
    *(ROUNDED_OUTPUTS, ROUNDED_SCORES, OTHER_SINKS, SOFT_MASK),
)
FACTORS = 1 / 256, 256.0
"""Between which that of scores is looked for."""
HIDDEN_BY = 0.05, 64.0
"""Between which the number is looked for that hides other documents."""
FAR_LESS = 0.15
"""Share of the difference from what is right that a cause has to leave at most: with a number that
is looked for, much is explained by chance."""
SAME_SINKS = 1e-3
"""Difference of sinks that counts as none."""
SLOPES = 1e-4, 16.0
"""Between which the fall of scores with a token of distance is looked for."""


class Attention:
    """What heads returned in a step, against what they should have.

    `spots`: of each token, by its number in the probe.
    """

    def __init__(
        self,
        off: FirstOff,
        heads: Heads,
        *,
        returned: torch.Tensor,
        tokens: Tokens,
        window: int | None,
        spots: Mapping[int, Spot],
    ) -> None:
        self.off = off
        self.heads = heads
        self.returned = returned
        self.tokens = tokens
        self.wrong = torch.tensor(off.wrong)
        # What heads returned is solved for, which rounds; and a cause has to leave clearly less
        # than what is right does.
        self.limit = 10 * off.limit
        self.limit = min(self.limit, FAR_LESS * self._apart(heads.returned))
        self.spots = spots
        self.rank = torch.tensor([spots[number].rank for number in heads.numbers])
        numbers = torch.tensor(heads.numbers)
        documents = torch.tensor([tokens.document[number] for number in heads.numbers])
        self.seen = (numbers[:, None] >= numbers) & (documents[:, None] == documents)
        as_it_is = with_scores(heads, self.seen, 1.0, heads.sinks)
        apart = float((as_it_is - heads.returned).norm())
        if window is not None and not apart <= off.limit * float(heads.returned.norm()):
            self.seen &= numbers[:, None] - numbers < window

    def cause(self) -> Cause | None:
        """Returns why it is wrong; None where that is not known."""
        return (
            self._scores()
            or self._scores_by_head()
            or self._other_sinks()
            or self._heads()
            or self._heads_of_others()
            or self._rounded()
            or self._rounded_outputs()
            or self._keys()
            or self._hidden_softly()
            or self._merged()
            or self._distances()
        )

    def _apart(self, found: torch.Tensor, head: int | None = None) -> float:
        """Returns the relative difference of what wrong tokens' heads, or one of them, returned."""
        right = self.returned[self.wrong]
        own = found[self.wrong]
        if head is not None:
            right = right[:, head]
        return float((own - right).norm() / right.norm().clamp_min(1e-300))

    def _said(self, kind: str, words: str) -> Cause:
        return Cause(kind, f"{words}: {self.off.in_words(self.tokens)}")

    def _scores(self) -> Cause | None:
        """Tells scores that are multiplied or capped otherwise, or another denominator: what is
        nearest."""
        heads = self.heads
        zeros = torch.zeros(heads.queries.shape[1], dtype=torch.float64)
        candidates = list[tuple[str, str, torch.Tensor]]()
        if heads.sinks is not None:
            without = with_scores(heads, self.seen, 1.0, None)
            candidates.append((SINKS, "ignored", without))
        one_more = with_scores(heads, self.seen, 1.0, zeros)
        candidates.append((SINKS, "one too many", one_more))
        words = "a mask of booleans is added to scores, and hides none"
        candidates.append((KEYS, words, with_added(heads, self.seen)))
        if heads.cap:
            capped = with_cap_before(heads, self.seen)
            candidates.append((CAPS, "before they are scaled", capped))
        for dtype, name in ROUNDED.items():
            rounded = with_rounded_scores(heads, self.seen, dtype)
            candidates.append((ROUNDED_SCORES, f"to {name}", rounded))
        factor = nearest(self._apart_by, between=FACTORS)
        scaled = with_scores(heads, self.seen, factor, heads.sinks)
        candidates.append((SCALE_OF_SCORES, f"{factor:.4g} times what it should be", scaled))
        kind, words, found = min(candidates, key=lambda each: self._apart(each[2]))
        if self._apart(found) <= self.limit:
            return self._said(kind, words)
        return None

    def _scores_by_head(self) -> Cause | None:
        """Tells heads whose scores are multiplied, each by a number of its own."""
        words = list[str]()
        for head in self._wrong_heads():

            def apart(factor: float, head: int = head) -> float:
                found = with_scores(self.heads, self.seen, factor, self.heads.sinks)
                return self._apart(found[:, head], head)

            factor = nearest(apart, between=FACTORS)
            if not apart(factor) <= self.limit:
                return None
            words.append(f"{factor:.4g} times what it should be in head {head}")
        if not words:
            return None
        return self._said(SCALE_OF_SCORES, ", ".join(words))

    def _other_sinks(self) -> Cause | None:
        """Tells sinks that are counted several times, or are those of other heads."""
        own = self.heads.sinks
        if own is None:
            return None
        without = with_scores(self.heads, self.seen, 1.0, None)
        shares = (self.returned * without).sum(-1) / without.square().sum(-1)  # [tokens, heads]
        sums = log_sums(self.heads, self.seen)
        solved = sums + (1 / shares.clamp(1e-9, 1 - 1e-9) - 1).log()
        found = solved[self.wrong].median(0).values
        if not self._apart(with_scores(self.heads, self.seen, 1.0, found)) <= self.limit:
            return None
        times = (found - own).exp()
        if float(times.max() - times.min()) <= SAME_SINKS * float(times.max()):
            return self._said(OTHER_SINKS, f"counted {float(times.mean()):.4g} times")
        apart = (found[:, None] - own).abs()
        if bool((apart.min(1).values <= SAME_SINKS).all()):
            theirs = ", ".join(map(str, apart.argmin(1).tolist()))
            heads = ", ".join(map(str, range(len(own))))
            return self._said(OTHER_SINKS, f"those of heads {theirs} are at heads {heads}")
        given = ", ".join(f"{float(each):.4g}" for each in found[:4])
        right = ", ".join(f"{float(each):.4g}" for each in own[:4])
        return self._said(OTHER_SINKS, f"{given} in place of {right}")

    def _apart_by(self, factor: float) -> float:
        return self._apart(with_scores(self.heads, self.seen, factor, self.heads.sinks))

    def _heads(self) -> Cause | None:
        """Tells whose queries, keys and values each head has."""
        count = range(self.heads.queries.shape[1])
        order = list[tuple[int, int, int]]()
        for head in count:
            own = (head, head, head)
            others = sorted(product(count, count, count), key=lambda each: _changed(each, own))
            found = next((each for each in others if self._is_head(head, each)), None)
            if found is None:
                return None
            order.append(found)
        names = ("queries", "keys", "values")
        words = [
            f"{name} of heads {', '.join(str(each[at]) for each in order)}"
            for at, name in enumerate(names)
            if [each[at] for each in order] != [*count]
        ]
        if not words:
            return None
        return self._said(HEADS, f"{' and '.join(words)} are at heads {', '.join(map(str, count))}")

    def _is_head(self, head: int, of: tuple[int, int, int]) -> bool:
        found = with_head(self.heads, self.seen, queries=of[0], keys=of[1], values=of[2])
        return self._apart(found, head) <= self.limit

    def _heads_of_others(self) -> Cause | None:
        """Tells whose keys and values each head has of those that other ranks sent."""
        others = self.rank[:, None] != self.rank
        if not bool(others.any()):
            return None
        count = range(self.heads.queries.shape[1])
        order = list[tuple[int, int]]()
        for head in count:
            pairs = sorted(
                product(count, count), key=lambda each: (each[0] != head) + (each[1] != head)
            )
            for keys, values in pairs:
                found = with_head_of_others(
                    self.heads, self.seen, others, head=head, keys=keys, values=values
                )
                if self._apart(found, head) <= self.limit:
                    order.append((keys, values))
                    break
            else:
                return None
        here = ", ".join(map(str, count))
        words = [
            f"{name} of heads {', '.join(str(each[at]) for each in order)}"
            for at, name in enumerate(("keys", "values"))
            if [each[at] for each in order] != [*count]
        ]
        if not words:
            return None
        return self._said(HEADS, f"{' and '.join(words)} of other ranks are at heads {here}")

    def _rounded(self) -> Cause | None:
        """Tells keys and values of other ranks that are rounded."""
        others = self.rank[:, None] != self.rank
        for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
            if self._apart(with_rounded(self.heads, self.seen, others, dtype)) <= self.limit:
                return self._said(ROUNDED_KEYS, f"to {name}")
        return None

    def _rounded_outputs(self) -> Cause | None:
        """Tells outputs of ranks' keys that are rounded before they are merged."""
        if len(self.rank.unique()) == 1:
            return None
        of_tokens = [
            of_parts(self.heads, self.seen[index], self.rank, index) for index in self.off.wrong
        ]
        wanted = self.returned[self.wrong]
        for dtype, name in ROUNDED.items():
            merged = list[torch.Tensor]()
            for outputs, shares in of_tokens:
                rounded = outputs.to(dtype).double()
                merged.append((rounded * shares[:, :, None]).sum(0))
            apart = float((torch.stack(merged) - wanted).norm() / wanted.norm())
            if apart <= self.limit:
                return self._said(ROUNDED_OUTPUTS, f"to {name}")
        return None

    def _hidden_softly(self) -> Cause | None:
        """Tells other documents of a row that are hidden by a small number."""
        others = self._earlier_documents()
        if not bool(others[self.wrong].any()):
            return None

        def apart(by: float) -> float:
            return self._apart(with_hidden_by(self.heads, self.seen, others=others, by=by))

        by = nearest(apart, between=HIDDEN_BY)
        if not apart(by) <= self.limit:
            return None
        return self._said(SOFT_MASK, f"by {by:.4g}")

    def _earlier_documents(self) -> torch.Tensor:
        """Returns which keys are of other documents earlier in the row [tokens, tokens]."""
        spots = [self.spots[number] for number in self.heads.numbers]
        rows = torch.tensor([spot.row for spot in spots])
        columns = torch.tensor([spot.column for spot in spots])
        documents = torch.tensor([self.tokens.document[number] for number in self.heads.numbers])
        in_row = (rows[:, None] == rows) & (columns[:, None] > columns)
        return in_row & (documents[:, None] != documents)

    def _merged(self) -> Cause | None:
        """Tells the weights of what a token gets from the keys of each rank."""
        example = ""
        if len(self.rank.unique()) == 1:
            return None
        for index in self.off.wrong:
            outputs, rightly = of_parts(self.heads, self.seen[index], self.rank, index)
            if len(outputs) >= outputs.shape[2]:
                return None
            wanted = self.returned[index]
            basis = outputs.permute(1, 2, 0)
            solved = torch.linalg.lstsq(basis, wanted[:, :, None], driver="gelsd").solution
            left = float(((basis @ solved)[:, :, 0] - wanted).norm() / wanted.norm())
            if not left <= self.limit:
                return None
            if len(outputs) == 1:  # nothing is merged, so that nothing may be off
                if not float((solved[:, 0, 0] - rightly[0]).abs().max()) <= self.limit:
                    return None
            elif not example:
                weights = solved[:, :, 0]
                head = int((weights - rightly.T).abs().amax(1).argmax())
                place = place_of(self.heads.numbers[index], self.tokens)
                found = ", ".join(f"{float(each):.4g}" for each in weights[head])
                right = ", ".join(f"{float(each):.4g}" for each in rightly[:, head])
                example = f"{found} in place of {right} in head {head} of {place}"
        if not example:  # nothing was to be merged
            return None
        return self._said(MERGED, example)

    def _distances(self) -> Cause | None:
        """Tells a penalty on the distance of keys, a number for each head."""
        found = list[float]()
        for head in range(self.heads.queries.shape[1]):

            def apart(slope: float, head: int = head) -> float:
                return self._apart(with_slope(self.heads, self.seen, slope, head), head)

            slope = nearest(apart, between=SLOPES)
            if not apart(slope) <= self.limit:
                return None
            found.append(slope)
        slopes = ", ".join(f"{slope:.3g}" for slope in found[:4])
        return self._said(DISTANCES, f"by {slopes} for each token")

    def _keys(self) -> Cause | None:
        """Tells the keys that tokens saw: a run of them, or all but a run, or a run beside."""
        at = self._wrong_heads()
        found = dict[int, Run]()
        step = -(-len(self.off.wrong) // MANY)
        for index in self.off.wrong[::step]:
            run = runs(self.heads, self.returned[index], index, at=at, seen=self.seen[index])
            if not run.apart <= self.limit:
                return None
            found[index] = run
        own_parts = {
            index: self._own_part(index) for index in found if self._has_other_parts(index)
        }
        words = SeenKeys(
            found,
            self.heads.numbers,
            tokens=self.tokens,
            own_parts=own_parts,
            wider={index for index, run in found.items() if self._is_wider(index, run)},
        ).words()
        if len(at) < self.heads.queries.shape[1]:
            words += f", in head {', '.join(map(str, at))} alone"
        return self._said(KEYS, words)

    def _is_wider(self, index: int, run: Run) -> bool:
        """Returns whether a run has all keys that a token should see, and others."""
        inside = torch.zeros_like(self.seen[index])
        inside[run.begin : run.end] = True
        return bool((inside | ~self.seen[index]).all() and (inside & ~self.seen[index]).any())

    def _own_part(self, index: int) -> tuple[int, int]:
        """Returns the run of keys of its own rank that a token should see."""
        own = (self.seen[index] & (self.rank == self.rank[index])).nonzero()[:, 0]
        return int(own[0]), int(own[-1]) + 1

    def _has_other_parts(self, index: int) -> bool:
        """Returns whether a token should see keys of other ranks."""
        return bool((self.seen[index] & (self.rank != self.rank[index])).any())

    def _wrong_heads(self) -> list[int]:
        """Returns the heads that returned something else than they should."""
        apart = (self.returned - self.heads.returned)[self.wrong].norm(dim=(0, 2))
        size = self.heads.returned[self.wrong].norm(dim=(0, 2))
        return [int(head) for head in (apart > self.limit * size).nonzero()[:, 0]]


def _changed(of: tuple[int, int, int], own: tuple[int, int, int]) -> int:
    """Returns how many of queries, keys and values are of another head."""
    return sum(theirs != mine for theirs, mine in zip(of, own, strict=True))
