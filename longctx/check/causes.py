"""Causes: why the first part of a layer whose output is wrong is so, where that can be told."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .attended import heads_of, of_heads
from .attention import KINDS as KINDS_OF_ATTENTION
from .attention import Attention
from .changes import CLEARLY, change_of_order, change_of_rows, change_of_sizes
from .largest import largest
from .looked import INPUT, OUTPUT
from .off import ATTENTION, Cause, FirstOff, Spot
from .probe import Tokens
from .reference import Reference
from .variant import Variant
from .variants import ADAPTERS, scales, variants

PART_CHANGED = "hidden states are changed on their way"
TOKENS_SWAPPED = "tokens have the hidden states of other tokens"
KINDS = (PART_CHANGED, TOKENS_SWAPPED, *KINDS_OF_ATTENTION)
CANNOT_RUN = (RuntimeError, ValueError, TypeError, IndexError)
"""What a model raises that has no such variant."""
FEW = 3
"""Sequences on which variants are tried, the longest ones."""
MOST = 0.75
"""Share of tokens that a variant has to explain that rounds: a few elements round otherwise."""
STEPS = 5
SMALL_STEP = 1e-4
"""How often the scale of adapters is corrected, and by which share it is changed to see what that
does."""


def cause_of(
    off: FirstOff, tokens: Tokens, reference: Reference, spots: Mapping[int, Spot]
) -> Cause | None:
    """Returns why a part is wrong; None where that is not known. `spots`: of each token, by its
    number."""
    ranks = 1 + max(spot.rank for spot in spots.values())
    return (
        _by_nothing_seen(off, tokens)
        or _by_change(off, tokens, change_of_rows)
        or _by_order(off, tokens)
        or _by_variant(off, tokens, reference, ranks)
        or _by_scale_of_adapters(off, tokens, reference)
        or _by_attention(off, tokens, reference, spots)
        or _by_share(off, tokens, reference)
        or _by_change(off, tokens, change_of_sizes)
    )


def _by_nothing_seen(off: FirstOff, tokens: Tokens) -> Cause | None:
    """Tells attention that returned 0: of no key."""
    wrong = torch.tensor(off.wrong)
    if not ATTENTION.search(off.part) or off.found[wrong].any():
        return None
    return Cause(PART_CHANGED, f"0, as attention to no key returns: {off.in_words(tokens)}")


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


def _by_variant(off: FirstOff, tokens: Tokens, reference: Reference, ranks: int) -> Cause | None:
    """Returns the variant of the model that is nearest to what the part returned, if it explains
    it."""
    found = None
    least = min(off.limit, CLEARLY * _largest_difference(off, reference))
    for variant in variants(reference, off.part.partition(" of ")[2], ranks=ranks):
        try:
            with variant.done():
                apart = _apart(off, reference, variant, least=least)
        except CANNOT_RUN:
            continue
        if apart < least:
            least = apart
            found = Cause(variant.kind, f"{variant.details}: {off.in_words(tokens)}")
    return found


def _apart(off: FirstOff, reference: Reference, variant: Variant, *, least: float) -> float:
    """Returns how far the part's output is from that of a variant: of the first sequence alone if
    that is not nearer than `least`."""
    differences = list[torch.Tensor]()
    of_wrong = list[torch.Tensor]()
    apart = 0.0
    for right, own, is_wrong in _outputs(off, reference):
        relative = _relative(own, right)
        differences.append(relative)
        of_wrong.append(relative[is_wrong])
        if variant.rounds:  # which may turn out otherwise in a few elements
            apart = float(torch.cat(of_wrong).quantile(MOST))
        else:
            apart = largest(torch.cat(differences).tolist())
        if not apart < least:
            break
    return apart


def _relative(found: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Returns the relative differences of rows [tokens, width]."""
    sizes = right.norm(dim=1).clamp_min(1e-300)
    apart: torch.Tensor = (found - right).norm(dim=1) / sizes
    return apart


def _by_scale_of_adapters(off: FirstOff, tokens: Tokens, reference: Reference) -> Cause | None:
    """Returns by what the updates of one adapter, or of all, are multiplied."""
    adapters = dict[str, Any]()
    for name, module in reference.model.named_modules():
        if isinstance(getattr(module, "scaling", None), dict):
            adapters[name] = module
    groups = {f"that of {name}": [module] for name, module in adapters.items()}
    if len(groups) > 1:
        groups = {"all": list(adapters.values())} | groups
    least = min(off.limit, CLEARLY * _largest_difference(off, reference))
    for words, modules in groups.items():
        factor = 1.0
        for _ in range(STEPS):
            returned = _rows_of(off, reference, scales(modules, factor))[0]
            further = _rows_of(off, reference, scales(modules, factor * (1 + SMALL_STEP)))
            slope = (further[0] - returned) / SMALL_STEP
            size = float(slope.square().sum())
            if not size > 0:
                break
            factor *= 1 + float(((further[1] - returned) * slope).sum()) / size
        with scales(modules, factor).done():
            apart = _largest_difference(off, reference)
        if apart < least:
            details = f"{words}, {factor:.4g} times what it should be"
            return Cause(ADAPTERS, f"{details}: {off.in_words(tokens)}")
    return None


def _rows_of(
    off: FirstOff, reference: Reference, variant: Variant
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the part's output in a variant of the reference and in the step [tokens, width], for
    the tokens of a few sequences."""
    with variant.done():
        several = list(_outputs(off, reference))
    returned = torch.cat([right for right, _, _ in several])
    found = torch.cat([own for _, own, _ in several])
    return returned, found


def _largest_difference(off: FirstOff, reference: Reference) -> float:
    """Returns the largest relative difference of the part's output from that of the reference, in a
    few sequences."""
    differences = [_relative(own, right) for right, own, _ in _outputs(off, reference)]
    return largest(torch.cat(differences).tolist())


def _outputs(
    off: FirstOff, reference: Reference
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yields the part's output in the reference and in the step [tokens, width], and whose is wrong
    [tokens], of a few sequences with a wrong one."""
    index_of = {number: index for index, number in enumerate(off.numbers)}
    wrong = {off.numbers[index] for index in off.wrong}
    several = [each for each in off.sequences if not wrong.isdisjoint(each.numbers)]
    longest = sorted(several, key=lambda each: len(each.numbers), reverse=True)
    for sequence in longest[:FEW]:
        held = [at for at, number in enumerate(sequence.numbers) if number in index_of]
        rows = [index_of[sequence.numbers[at]] for at in held]
        is_wrong = torch.tensor([off.numbers[row] in wrong for row in rows])
        yield reference.parts(sequence)[off.part][held], off.found[rows], is_wrong


def _by_attention(
    off: FirstOff, tokens: Tokens, reference: Reference, spots: Mapping[int, Spot]
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
        spots=spots,
    )
    return attention.cause()
