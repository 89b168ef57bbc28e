"""Causes: why the first part of a layer whose output is wrong is so, where that can be told."""

from collections import Counter
from collections.abc import Callable, Mapping

import torch

from .attended import heads_of, of_heads
from .attention import KINDS as KINDS_OF_ATTENTION
from .attention import Attention
from .changes import CLEARLY, change_of_order, change_of_rows, change_of_sizes
from .largest import largest
from .looked import INPUT, OUTPUT
from .off import Cause, FirstOff
from .probe import Tokens
from .reference import Reference
from .variants import variants

PART_CHANGED = "hidden states are changed on their way"
TOKENS_SWAPPED = "tokens have the hidden states of other tokens"
KINDS = (PART_CHANGED, TOKENS_SWAPPED, *KINDS_OF_ATTENTION)
FEW = 3
"""Sequences on which variants are tried, the longest ones."""


def cause_of(
    off: FirstOff, tokens: Tokens, reference: Reference, ranks: Mapping[int, int]
) -> Cause | None:
    """Returns why a part is wrong; None where that is not known. `ranks`: of each token, by its
    number."""
    return (
        _by_change(off, tokens, change_of_rows)
        or _by_order(off, tokens)
        or _by_variant(off, tokens, reference)
        or _by_attention(off, tokens, reference, ranks)
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
        apart = float((lacking - times * added).norm())
        near = apart <= 10 * off.limit * float(off.right[wrong].norm())
        if near and apart <= CLEARLY * float(lacking.norm()):
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
    least = min(off.limit, CLEARLY * _largest_difference(off, reference))
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
    found = list[float]()
    for sequence in longest[:FEW]:
        held = [at for at, number in enumerate(sequence.numbers) if number in index_of]
        rows = [index_of[sequence.numbers[at]] for at in held]
        right = reference.parts(sequence)[off.part][held]
        differences = (off.found[rows] - right).norm(dim=1) / right.norm(dim=1).clamp_min(1e-300)
        found.append(float(differences.max()))
    return largest(found)


def _by_attention(
    off: FirstOff, tokens: Tokens, reference: Reference, ranks: Mapping[int, int]
) -> Cause | None:
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
    attention = Attention(
        off,
        own,
        returned=returned,
        tokens=tokens,
        window=reference.window,
        ranks=ranks,
    )
    return attention.cause()
