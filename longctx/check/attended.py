"""Attention of one layer, head by head: which keys a token saw, and with which scores, from what
the layer returned.

The reference gives queries, keys and values of all tokens; what the layer returns is linear in what
heads return, so that it tells the latter. A run of keys in the order of their row is tried for
every begin and end at once: softmax over runs are differences of cumulative sums.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

from .contexts import Sequence
from .reference import Reference
from .tensors import Tensors

NAME = "longctx_check"
"""Of the attention function that keeps heads."""
MANY = 48
"""Most tokens whose keys are looked for."""


class Heads(NamedTuple):
    """Heads of one attention layer for tokens in the order of a row, in float64.

    Attributes:
        numbers: of the tokens.
        queries, keys, values: [tokens, heads, d], those of keys and values repeated for queries.
        returned: what heads return in the reference [tokens, heads, d].
        scaling: of scores.
        cap: of scores; 0: none.
        sinks: scores of no key, by head; None: none.
    """

    numbers: list[int]
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    returned: torch.Tensor
    scaling: float
    cap: float
    sinks: torch.Tensor | None


class _Kept:
    """What the attention function keeps of the layer that is looked at; between which tokens
    [queries, keys] it brings no gradient to keys and values; and whether it brings them that of the
    first head of each group alone."""

    def __init__(self) -> None:
        self.layer: Any = None
        self.calls: list[dict[str, Any]] = []
        self.detached: torch.Tensor | None = None
        self.first_heads = False


_KEPT = _Kept()


def _attend(
    module: Any,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Eager attention of [1, heads, tokens, d], as transformers compute it."""
    scale = scaling if scaling is not None else queries.shape[-1] ** -0.5
    group = queries.shape[1] // keys.shape[1]
    if _KEPT.first_heads:
        keys = _of_first_heads(keys, group)
        values = _of_first_heads(values, group)
    else:
        keys = keys.repeat_interleave(group, 1)
        values = values.repeat_interleave(group, 1)
    scores = _scores(queries, keys, scaling=scale, cap=softcap or 0.0)
    detached = _KEPT.detached
    if detached is not None:
        plain = _scores(queries, keys.detach(), scaling=scale, cap=softcap or 0.0)
        scores = torch.where(detached, plain, scores)
    if mask is not None:
        scores = scores + mask[..., : keys.shape[-2]]
    likely = _softmax(scores, s_aux)
    if detached is None:
        of_heads = likely @ values
    else:
        of_heads = (likely * ~detached) @ values + (likely * detached) @ values.detach()
    returned = of_heads.transpose(1, 2).contiguous()
    if module is _KEPT.layer:
        kept = {"queries": queries, "keys": keys, "values": values}
        each = {name: value[0].transpose(0, 1).detach() for name, value in kept.items()}
        _KEPT.calls.append(
            {
                "returned": returned[0].detach(),
                "scaling": scale,
                "cap": softcap or 0.0,
                "sinks": None if s_aux is None else s_aux.detach(),
            }
            | each
        )
    return returned, None


AttentionInterface.register(NAME, _attend)


def _of_first_heads(keys: torch.Tensor, group: int) -> torch.Tensor:
    """Returns keys [1, heads, tokens, d] of each head of queries, with a gradient from the first
    head of a group alone."""
    others = [keys.detach()] * (group - 1)
    return torch.stack([keys, *others], dim=2).flatten(1, 2)


def _scores(
    queries: torch.Tensor, keys: torch.Tensor, *, scaling: float, cap: float
) -> torch.Tensor:
    """Returns scores of [.., queries, d] and [.., keys, d]."""
    scores = queries @ keys.transpose(-1, -2) * scaling
    if cap:
        scores = cap * torch.tanh(scores / cap)
    return scores


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Returns the softmax of [.., heads, queries, keys], with a sink for each head if there are
    some."""
    if sinks is None:
        return torch.softmax(scores, -1)
    column = torch.zeros_like(scores[..., :1]) + sinks.to(scores)[:, None, None]
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]


def heads_of(reference: Reference, part: str, sequences: Iterable[Sequence]) -> Heads | None:
    """Returns the heads of an attention layer in these sequences, one after the other; None if the
    layer does not attend through transformers' interface."""
    layer = reference.model.get_submodule(part)
    before = reference.config._attn_implementation
    numbers = list[int]()
    _KEPT.layer = layer
    _KEPT.calls = []
    reference.model.set_attn_implementation(NAME)
    try:
        with torch.no_grad():
            for sequence in sequences:
                reference.logits(sequence)
                numbers += sequence.numbers
    except (RuntimeError, ValueError, TypeError):
        return None
    finally:
        reference.model.set_attn_implementation(before)
        _KEPT.layer = None
    calls = _KEPT.calls
    if sum(len(call["queries"]) for call in calls) != len(numbers):
        return None
    return Heads(
        numbers,
        torch.cat([call["queries"] for call in calls]),
        keys=torch.cat([call["keys"] for call in calls]),
        values=torch.cat([call["values"] for call in calls]),
        returned=torch.cat([call["returned"] for call in calls]),
        scaling=calls[0]["scaling"],
        cap=calls[0]["cap"],
        sinks=calls[0]["sinks"],
    )


def gradients_without_others(
    reference: Reference, slopes: Mapping[Sequence, torch.Tensor], ranks: Mapping[int, int]
) -> Tensors:
    """Returns the gradients of `Reference.gradients_of` if keys and values get none from the
    queries of other ranks; `ranks`: of each token, by its number."""
    before = reference.config._attn_implementation
    reference.model.set_attn_implementation(NAME)
    reference.model.zero_grad(set_to_none=True)
    try:
        for sequence, each in slopes.items():
            rank = torch.tensor([ranks.get(number, -1) for number in sequence.numbers])
            _KEPT.detached = rank[:, None] != rank
            reference.output_of(sequence).backward(each)
    finally:
        reference.model.set_attn_implementation(before)
        _KEPT.detached = None
    return reference.taken().of


def gradients_of_first_heads(
    reference: Reference, slopes: Mapping[Sequence, torch.Tensor]
) -> Tensors:
    """Returns the gradients of `Reference.gradients_of` if keys and values get that of the first
    head of queries of each group alone."""
    before = reference.config._attn_implementation
    reference.model.set_attn_implementation(NAME)
    _KEPT.first_heads = True
    try:
        return reference.gradients_of(slopes).of
    finally:
        reference.model.set_attn_implementation(before)
        _KEPT.first_heads = False


def of_heads(
    heads: Heads, right: torch.Tensor, found: torch.Tensor, *, limit: float
) -> torch.Tensor | None:
    """Returns what heads returned in the step [tokens, heads, d], of what the layer did [tokens,
    width]; None where the layer is not linear in it. `right`: what the layer returns in the
    reference."""
    flat = heads.returned.flatten(1)
    ones = torch.ones(len(flat), 1, dtype=flat.dtype)
    inputs = torch.cat([flat, ones], 1)
    if len(inputs) <= inputs.shape[1]:
        return None
    linear = torch.linalg.lstsq(inputs, right, driver="gelsd").solution
    if not float((inputs @ linear - right).norm()) <= 1e-6 * float(right.norm()):
        return None
    matrix = linear[:-1]
    if torch.linalg.matrix_rank(matrix) < len(matrix):
        return None
    solved: torch.Tensor = torch.linalg.lstsq(
        matrix.T, (found - linear[-1]).T, driver="gelsd"
    ).solution.T
    explained = solved @ matrix + linear[-1]
    if not float((explained - found).norm()) <= limit * float(found.norm()):
        return None
    return solved.reshape(heads.returned.shape)


ALONE = "sees only"
WITHOUT = "does not see"
BESIDE = "also sees"
TWICE = "counts again"
WAYS = (WITHOUT, BESIDE, TWICE, ALONE)
"""How a run of keys tells what a token saw: it saw this run alone, or what it should see without
it, or that and the run, which may be there already."""


class Run(NamedTuple):
    """Keys of a token: from one place of the row to before another, what is with them, and how far
    what heads returned is from that."""

    begin: int
    end: int
    way: str
    apart: float


def runs(heads: Heads, of: torch.Tensor, index: int, *, at: list[int], seen: torch.Tensor) -> Run:
    """Returns the run of keys whose softmax is nearest to what some heads (`at`) of a token
    returned [heads, d]; `seen` [tokens]: which keys it should see."""
    query = heads.queries[index, at][:, None]
    keys = heads.keys[:, at].transpose(0, 1)
    values = heads.values[:, at].transpose(0, 1)
    scores = _scores(query, keys, scaling=heads.scaling, cap=heads.cap)[:, 0]
    shift = scores.amax(1, keepdim=True)
    weights = (scores - shift).exp()
    sink = torch.zeros(len(at), dtype=torch.float64)
    if heads.sinks is not None:
        sink = (heads.sinks.detach().double()[at] - shift[:, 0]).exp()
    sums, means = _of_runs(weights, values, torch.ones_like(seen))
    seen_sums, seen_means = _of_runs(weights, values, seen)
    other_sums, other_means = _of_runs(weights, values, ~seen)
    total = seen_sums[:, 0, -1][:, None, None]
    weighted = seen_means[:, 0, -1][:, None, None]
    ways = {
        ALONE: (sums, means),
        WITHOUT: (total - seen_sums, weighted - seen_means),
        BESIDE: (total + other_sums, weighted + other_means),
        TWICE: (total + seen_sums, weighted + seen_means),
    }
    wanted = of[at]
    found = Run(0, 0, ALONE, apart=float("inf"))
    for way, (denominators, numerators) in ways.items():
        divided = numerators / (denominators + sink[:, None, None]).clamp_min(1e-300)[..., None]
        apart = (divided - wanted[:, None, None]).square().sum((0, 3)).sqrt() / wanted.norm()
        valid = torch.ones(apart.shape, dtype=torch.bool).triu(1)
        apart = apart.masked_fill(~valid, float("inf"))
        begin, end = divmod(int(apart.argmin()), apart.shape[1])
        least = float(apart[begin, end])
        if least < FAR_NEARER * found.apart:
            found = Run(begin, end, way, apart=least)
    return _trimmed(found, seen)


def _trimmed(run: Run, seen: torch.Tensor) -> Run:
    """Returns a run that begins and ends with keys that make a difference: those that a token
    should see where it lacks them, and others where it has them beside."""
    if run.way == ALONE:
        return run
    counted = ~seen if run.way == BESIDE else seen
    own = counted[run.begin : run.end].nonzero()[:, 0]
    if not len(own):
        return run
    return run._replace(begin=run.begin + int(own[0]), end=run.begin + int(own[-1]) + 1)


FAR_NEARER = 0.1
"""Share of the difference of a run alone that the next way has to fall below."""


def _of_runs(
    weights: torch.Tensor, values: torch.Tensor, which: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns sums of weights [heads, begin, end] over runs, and of weighted values [.., d], of the
    keys that `which` has."""
    weights = weights * which
    total = torch.nn.functional.pad(weights.cumsum(1), (1, 0))
    weighted = torch.nn.functional.pad((weights[:, :, None] * values).cumsum(1), (0, 0, 1, 0))
    return (
        total[:, None, :] - total[:, :, None],
        weighted[:, None] - weighted[:, :, None],
    )


def with_slope(heads: Heads, seen: torch.Tensor, slope: float, head: int) -> torch.Tensor:
    """Returns what a head returns [tokens, d] if scores fall by a number for each token of
    distance."""
    scores = _scores(
        heads.queries[:, head], heads.keys[:, head], scaling=heads.scaling, cap=heads.cap
    )
    places = torch.tensor(heads.numbers)
    distances = (places[:, None] - places).double()
    scores = (scores - slope * distances).masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, -1) @ heads.values[:, head]


def with_scores(heads: Heads, seen: torch.Tensor, factor: float, sinks: Any) -> torch.Tensor:
    """Returns what heads return [tokens, heads, d] if scores are multiplied by a factor; `seen`:
    [tokens, tokens]."""
    scores = _scores(
        heads.queries.transpose(0, 1),
        heads.keys.transpose(0, 1),
        scaling=heads.scaling * factor,
        cap=heads.cap,
    )
    likely = _softmax(scores.masked_fill(~seen, float("-inf")), sinks)
    return (likely @ heads.values.transpose(0, 1)).transpose(0, 1)


def with_cap_before(heads: Heads, seen: torch.Tensor) -> torch.Tensor:
    """Returns what heads return [tokens, heads, d] if scores are capped before they are scaled;
    `seen`: [tokens, tokens]."""
    plain = _scores(
        heads.queries.transpose(0, 1), heads.keys.transpose(0, 1), scaling=1.0, cap=heads.cap
    )
    scores = (plain * heads.scaling).masked_fill(~seen, float("-inf"))
    likely = _softmax(scores, heads.sinks)
    return (likely @ heads.values.transpose(0, 1)).transpose(0, 1)


def with_rounded_scores(heads: Heads, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns what heads return [tokens, heads, d] if scores are rounded; `seen`: [tokens,
    tokens]."""
    scores = _scores(
        heads.queries.transpose(0, 1),
        heads.keys.transpose(0, 1),
        scaling=heads.scaling,
        cap=heads.cap,
    )
    rounded = scores.to(dtype).double().masked_fill(~seen, float("-inf"))
    likely = _softmax(rounded, heads.sinks)
    return (likely @ heads.values.transpose(0, 1)).transpose(0, 1)


def with_hidden_by(
    heads: Heads, seen: torch.Tensor, *, others: torch.Tensor, by: float
) -> torch.Tensor:
    """Returns what heads return [tokens, heads, d] if scores of `others` [tokens, tokens] are only
    so much smaller."""
    scores = _scores(
        heads.queries.transpose(0, 1),
        heads.keys.transpose(0, 1),
        scaling=heads.scaling,
        cap=heads.cap,
    )
    scores = (scores - by * others).masked_fill(~(seen | others), float("-inf"))
    likely = _softmax(scores, heads.sinks)
    return (likely @ heads.values.transpose(0, 1)).transpose(0, 1)


def log_sums(heads: Heads, seen: torch.Tensor) -> torch.Tensor:
    """Returns the logarithms of the sums of exponentials of scores [tokens, heads], without
    sinks."""
    scores = _scores(
        heads.queries.transpose(0, 1),
        heads.keys.transpose(0, 1),
        scaling=heads.scaling,
        cap=heads.cap,
    )
    return scores.masked_fill(~seen, float("-inf")).logsumexp(-1).T


def with_head_of_others(
    heads: Heads, seen: torch.Tensor, others: torch.Tensor, *, head: int, keys: int, values: int
) -> torch.Tensor:
    """Returns what a head returns [tokens, d] with keys and values of these heads where `others`
    [tokens, tokens] is."""
    query = heads.queries[:, head]
    own = _scores(query, heads.keys[:, head], scaling=heads.scaling, cap=heads.cap)
    theirs = _scores(query, heads.keys[:, keys], scaling=heads.scaling, cap=heads.cap)
    scores = torch.where(others, theirs, own).masked_fill(~seen, float("-inf"))
    sinks = None if heads.sinks is None else heads.sinks[head : head + 1]
    likely = _softmax(scores[None], sinks)[0]
    of_own = (likely * ~others) @ heads.values[:, head]
    return of_own + (likely * others) @ heads.values[:, values]


def with_head(
    heads: Heads, seen: torch.Tensor, *, queries: int, keys: int, values: int
) -> torch.Tensor:
    """Returns what a head returns [tokens, d] with queries, keys and values of these heads."""
    scores = _scores(
        heads.queries[:, queries], heads.keys[:, keys], scaling=heads.scaling, cap=heads.cap
    )
    return torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ heads.values[:, values]


def with_rounded(
    heads: Heads, seen: torch.Tensor, which: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Returns what heads return [tokens, heads, d] if keys and values are rounded where `which`
    [tokens, tokens] is."""
    queries = heads.queries.transpose(0, 1)
    rounded_keys = heads.keys.to(dtype).double().transpose(0, 1)
    rounded_values = heads.values.to(dtype).double().transpose(0, 1)
    plain = _scores(queries, heads.keys.transpose(0, 1), scaling=heads.scaling, cap=heads.cap)
    rounded = _scores(queries, rounded_keys, scaling=heads.scaling, cap=heads.cap)
    scores = torch.where(which, rounded, plain).masked_fill(~seen, float("-inf"))
    likely = _softmax(scores, heads.sinks)
    of_plain = (likely * ~which) @ heads.values.transpose(0, 1)
    return (of_plain + (likely * which) @ rounded_values).transpose(0, 1)


def of_parts(
    heads: Heads, seen: torch.Tensor, rank: torch.Tensor, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what heads of a token return of the keys of each rank alone [ranks, heads, d], and
    with which weights these are merged rightly [ranks, heads]; `seen`, `rank` [tokens]."""
    query = heads.queries[index][:, None]
    keys = heads.keys.transpose(0, 1)
    scores = _scores(query, keys, scaling=heads.scaling, cap=heads.cap)[:, 0]
    outputs = []
    sums = []
    for each in rank[seen].unique():
        own = seen & (rank == each)
        masked = scores.masked_fill(~own, float("-inf"))
        likely = torch.softmax(masked, 1)
        outputs.append(torch.einsum("hk,khd->hd", likely, heads.values))
        sums.append(masked.logsumexp(1))
    if heads.sinks is not None:
        sums.append(heads.sinks.double())
    return torch.stack(outputs), torch.stack(sums).softmax(0)[: len(outputs)]


def with_added(heads: Heads, seen: torch.Tensor) -> torch.Tensor:
    """Returns what heads return [tokens, heads, d] if `seen` [tokens, tokens] is added to scores,
    and nothing is hidden."""
    scores = _scores(
        heads.queries.transpose(0, 1),
        heads.keys.transpose(0, 1),
        scaling=heads.scaling,
        cap=heads.cap,
    )
    likely = _softmax(scores + seen.double(), heads.sinks)
    return (likely @ heads.values.transpose(0, 1)).transpose(0, 1)
