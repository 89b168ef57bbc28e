"""Masks: visibility between the tokens of a document, as a few areas of queries and keys that a
schedule cuts up.

A token that is not hidden always sees itself, and none sees a token of another document. Every mask
is a union of disjoint rectangles of (query, key) positions, each with a band along the diagonal; a
rank's part is a rectangle cut to its chunks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longctx.arguments import Rule, check_arguments, flag, mapping_of, or_none, sequence_of, whole
from longctx.attention.segments import Segment
from longctx.errors import UserError
from longctx.planning.layout import Span
from longctx.planning.tree import ROOT, Node, Tree


class MaskError(UserError):
    """A mask with invalid or contradictory settings."""


_TOKENS = whole(least=0)
_SPANS = sequence_of("spans (start, stop)", sequence_of("two positions", _TOKENS))
RULES: dict[str, Rule] = {
    "causal": flag,
    "window": or_none(whole(least=1)),
    "sinks": _TOKENS,
    "prefix": mapping_of("documents to tokens", _TOKENS, keys=_TOKENS),
    "blocks": mapping_of("documents to spans", _SPANS, keys=_TOKENS),
    "hidden": mapping_of("documents to spans", _SPANS, keys=_TOKENS),
}


@dataclass(frozen=True)
class Mask:
    """The visibility of tokens inside a document.

    Attributes:
        causal: whether a token sees only itself and earlier tokens; if False it also sees later
            tokens (encoders).
        window: number of nearest tokens that a token sees, including itself: window - 1 before it
            and, if not causal, as many after it. None: all tokens.
        sinks: number of first tokens of a document that are visible (with `causal`, to later
            tokens) outside the window too.
        prefix: {document: tokens}, with the document's index in the plan: number of first tokens (a
            prompt) that see each other in both directions, regardless of the window.
        blocks: {document: spans of tokens, ascending}: tokens of a span (an image) also see all
            later tokens of the span, regardless of the window.
        hidden: {document: spans of tokens, ascending}: tokens that no token sees, not even they
            themselves.
    """

    causal: bool = True
    window: int | None = None
    sinks: int = 0
    prefix: Mapping[int, int] = field(default_factory=dict)
    blocks: Mapping[int, Sequence[Span]] = field(default_factory=dict)
    hidden: Mapping[int, Sequence[Span]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_arguments(MaskError, RULES, vars(self))
        if self.sinks and self.window is None:
            raise MaskError(
                f"sinks is {self.sinks} without a window, so every token is visible anyway: set a "
                "window, or leave sinks out"
            )
        if any(self.prefix.values()) and not self.causal:
            raise MaskError(
                "prefix is given with causal=False, where tokens see each other in both directions "
                "anyway: leave one out"
            )
        if any(self.blocks.values()) and (
            not self.causal or self.sinks or any(self.prefix.values())
        ):
            raise MaskError(
                "blocks are given with causal=False, sinks or prefix, which do not go together: "
                "leave these out"
            )
        for spans in (*self.blocks.values(), *self.hidden.values()):
            ends = [0, *(end for span in spans for end in span)]
            if any(len(span) != 2 for span in spans) or ends != sorted(ends):
                raise MaskError(
                    f"spans of a document are {list(spans)}: give each as (start, stop), ascending "
                    "and disjoint"
                )

    def areas(self, document: int, length: int) -> list[Segment]:
        """Returns disjoint areas of (query, key) positions that cover exactly what is visible in a
        document."""
        prompt = min(self.prefix.get(document, 0), length)
        sinks = min(self.sinks, length)
        unlimited = Segment(0, length, 0, length, hi=0 if self.causal else None)
        whole = unlimited
        if self.window is not None:
            after = 0 if self.causal else self.window - 1
            whole = unlimited._replace(lo=1 - self.window, hi=after)
        if not (prompt or sinks or self.blocks or self.hidden) and length:
            return [whole.cut((0, length), (0, length))]
        rest = prompt, length
        areas = [
            Segment(0, prompt, 0, prompt),
            unlimited.cut(rest, (0, sinks)),
            whole.cut(rest, (sinks, length)),
        ]
        for start, stop in self.blocks.get(document, ()):
            areas.append(_later_of(start, stop))
        hidden = self.hidden.get(document)
        if hidden:
            ends = [0, *(end for span in hidden for end in span), length]
            seen = list(zip(ends[::2], ends[1::2], strict=True))
            areas = [area.cut((0, length), keys) for area in areas for keys in seen]
        return [area for area in areas if not area.empty]

    def tree_areas(self, document: int, tree: Tree) -> list[Segment]:
        """Returns the same for a tree: on every path its tokens see what they would see in the
        sequence alone.

        Raises MaskError if a token would see later ones that are not on all paths through the
        token.
        """
        prompt = self.prefix.get(document, 0)
        root = tree.lengths[0]
        if self.blocks.get(document) or self.hidden.get(document):
            raise MaskError(
                f"document {document} is a tree and has blocks or hidden tokens, which do not go "
                "together: do not merge sequences"
            )
        if not self.causal or prompt > root:
            raise MaskError(
                f"document {document} is a tree, whose sequences share only their first {root} "
                f"tokens, and with causal={self.causal} and prefix {prompt} others would see what "
                f"comes later in some of them: use a causal mask and a prefix of at most {root}, "
                "or do not merge sequences"
            )
        if prompt and tree.nodes[0].both_ways:
            raise MaskError(
                f"document {document} is a tree whose root sees itself both ways, and has a prefix "
                f"of {prompt} tokens, which does so too: leave the prefix out"
            )
        areas = []
        for number, node in enumerate(tree.nodes):
            if node.both_ways and self.window is None:
                areas.append(Segment(node.start, node.stop, node.start, node.stop))
                continue
            path = self.areas(document, node.positions[1])
            for other in self._near(tree, number):
                for area in path:
                    cut = area.cut(node.positions, other.positions)
                    if not cut.empty:
                        queries, keys = node.start - node.above, other.start - other.above
                        areas.append(_moved(cut, queries=queries, keys=keys))
            if node.both_ways:
                areas.append(_later_of(node.start, node.stop))
        if self.window is None:
            areas += _below(tree)
        return [area for area in areas if not area.empty]

    def _near(self, tree: Tree, number: int) -> list[Node]:
        """Returns the nodes of a path whose keys are cut for its last node: without a window only
        itself, as all tokens below a node see it whole; else those that the window may reach."""
        node = tree.nodes[number]
        if self.window is None:
            return [node]
        first = node.above - self.window
        near = []
        for other in tree.path(number):
            is_sink = other.above < self.sinks
            if is_sink or other.positions[1] > first:
                near.append(other)
        return near

    def visible(self, document: int, length: int, device: torch.device | str = "cpu") -> Tensor:
        """Returns a boolean tensor [length, length]: the keys that each query sees. Dense, for
        references and tests."""
        query = torch.arange(length, device=device).unsqueeze(1)
        key = torch.arange(length, device=device).unsqueeze(0)
        seen = torch.ones(length, length, dtype=torch.bool, device=device)
        if self.window is not None:
            seen &= ((query - key).abs() < self.window) | (key < self.sinks)
        if self.causal:
            seen &= key <= query
        for start, stop in self.blocks.get(document, ()):
            seen |= (start <= query) & (query < key) & (key < stop)
        prompt = self.prefix.get(document, 0)
        seen |= (query < prompt) & (key < prompt)
        for start, stop in self.hidden.get(document, ()):
            seen[:, start:stop] = False
        return seen


def _later_of(start: int, stop: int) -> Segment:
    """Returns the area of tokens [start, stop) and the later ones among them."""
    own = start, stop
    later = Segment(start, stop, start, stop, lo=1)
    return later.cut(own, own)


def _below(tree: Tree) -> Iterator[Segment]:
    """Yields the areas of all tokens below nodes, which see these whole.

    Last children end where their parents do. So along a line of them, the later half of what comes
    after the middle sees all nodes before it, and each half goes on likewise: tokens have as many
    areas of a key node, and a pass as many kernel calls, as the line can be halved.
    """
    last_children = {parent: node for node, parent in enumerate(tree.parents)}
    for first, parent in enumerate(tree.parents):
        if parent != ROOT and last_children[parent] == first:
            continue
        line = [first]
        while line[-1] in last_children:
            line.append(last_children[line[-1]])
        nodes = [tree.nodes[number] for number in line]
        yield from _halved(nodes[:-1], end=nodes[0].end)


def _halved(nodes: Sequence[Node], end: int) -> Iterator[Segment]:
    """Yields the areas of queries before `end` that see all of the nodes before them.

    Args:
        nodes: a line of nodes, each of which is below the one before.
        end: the token up to which queries are meant, all of which are below the first node or its
            own.
    """
    if not nodes:
        return
    middle = len(nodes) // 2
    start = nodes[middle].stop
    for node in nodes[: middle + 1]:
        yield Segment(
            q_start=start,
            q_stop=end,
            k_start=node.start,
            k_stop=node.stop,
        )
    yield from _halved(nodes[:middle], end=start)
    yield from _halved(nodes[middle + 1 :], end=end)


def _moved(area: Segment, *, queries: int, keys: int) -> Segment:
    """Returns an area whose queries and keys are so much later."""
    return area._replace(
        q_start=area.q_start + queries,
        q_stop=area.q_stop + queries,
        k_start=area.k_start + keys,
        k_stop=area.k_stop + keys,
    )


CAUSAL = Mask()
EVERYTHING = Mask(causal=False)
