"""Tree: sequences with common prefixes as one document, in depth-first order, so that every prefix
is computed once.

A node is a run of tokens that the same sequences share, and its children are how they go on; every
sequence is a path from the root. The document has the tokens of all nodes, each node before its
children. So key k is visible to query q iff k ≤ q < the end of the subtree of k's node, and a
token's position is the number of tokens before it on its path. All else treats a tree as any
document: it is cut, placed and packed by its number of tokens.

In a `BlockTree`, tokens of some nodes also see the later ones of their node, as in block diffusion.
"""

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longctx.arguments import check_arguments, flag, tuple_of, whole
from longctx.errors import UserError

ROOT = -1
"""Parent of the first node."""


class TreeError(UserError):
    """Nodes that are no tree in depth-first order, or a tree where there can be none."""


class Node(NamedTuple):
    """One node of a tree: tokens [start, stop) of the document are its own, [stop, end) those below
    it; `above` come before. With `both_ways` its tokens also see the later ones of the node."""

    start: int
    stop: int
    end: int
    above: int
    both_ways: bool

    @property
    def positions(self) -> tuple[int, int]:
        """Positions [start, stop) of its own tokens on every path through it."""
        return self.above, self.above + self.stop - self.start


@dataclass(frozen=True)
class Tree:
    """The shape of a tree; hashable.

    Attributes:
        lengths: tokens of every node, in depth-first order.
        parents: number of every node's parent; -1 for the first node, the root.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        self._check(least_root=1)

    def sees_itself(self, node: int) -> bool:
        """Returns whether the tokens of a node also see the later ones of the node."""
        return False

    def _check(self, least_root: int) -> None:
        rules = {
            "lengths": tuple_of("tokens", whole(least=least_root)),
            "parents": tuple_of("nodes", whole(least=ROOT)),
        }
        check_arguments(TreeError, rules, {"lengths": self.lengths, "parents": self.parents})
        if not self.lengths or len(self.lengths) != len(self.parents):
            raise TreeError(
                f"a tree has {len(self.lengths)} lengths and {len(self.parents)} parents: give one "
                "of each per node"
            )
        if not all(self.lengths[1:]):
            raise TreeError(f"a tree has lengths {self.lengths}: only the root may have no token")
        path = [ROOT]  # nodes whose subtrees are open
        for node, parent in enumerate(self.parents):
            while path and path[-1] != parent:
                path.pop()
            if not path or (parent == ROOT) != (node == 0):
                raise TreeError(
                    f"node {node} of a tree has parent {parent}: nodes must be in depth-first "
                    f"order, the root first with parent {ROOT}, and every other one after its "
                    "parent and the subtrees of its elder siblings"
                )
            path.append(node)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        stops = np.cumsum(self.lengths).tolist()
        ends = list(stops)
        above = [0] * len(stops)
        for node in reversed(range(1, len(stops))):
            ends[self.parents[node]] = max(ends[self.parents[node]], ends[node])
        for node, parent in enumerate(self.parents[1:], 1):
            above[node] = above[parent] + self.lengths[parent]
        return tuple(
            Node(
                start=stops[node] - length,
                stop=stops[node],
                end=ends[node],
                above=above[node],
                both_ways=self.sees_itself(node),
            )
            for node, length in enumerate(self.lengths)
        )

    @property
    def length(self) -> int:
        return self.nodes[-1].stop

    @cached_property
    def longest(self) -> int:
        return max(node.positions[1] for node in self.nodes)

    @cached_property
    def pairs(self) -> int:
        """Attention area, in units in which that of an ordinary document is its length squared: n²
        + 2·n·above, summed, and n·(n - 1) more for nodes that see themselves both ways."""
        area = 0
        for tokens, node in zip(self.lengths, self.nodes, strict=True):
            area += tokens * (tokens + 2 * node.above)
            if node.both_ways:
                area += tokens * (tokens - 1)
        return area

    @property
    def sent(self) -> int:
        """Tokens whose K and V other ranks may need."""
        return self.length

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """Number of tokens before every token on its path, [tokens]."""
        shifts = [node.above - node.start for node in self.nodes]
        return np.arange(self.length) + np.repeat(np.array(shifts, dtype=np.int64), self.lengths)

    def path(self, node: int) -> list[Node]:
        nodes = []
        while node != ROOT:
            nodes.append(self.nodes[node])
            node = self.parents[node]
        return nodes[::-1]

    def before(self, token: int, count: int) -> list[int]:
        """Returns the last `count` tokens before a token on its path, in order; fewer at the
        start."""
        tokens: list[int] = []
        for node in reversed(self.path(self.node_of(token))):
            stop = min(node.stop, token)
            tokens = [*range(max(node.start, stop - count + len(tokens)), stop), *tokens]
        return tokens

    def check_linear(self) -> None:
        """Raises TreeError if a state that is carried from token to token cannot be exact."""
        if any(node.both_ways for node in self.nodes):
            raise TreeError(
                "a document has blocks that see themselves both ways, but the state of a linear "
                "layer or a convolution knows only earlier tokens: use a model of softmax "
                "attention alone"
            )

    def node_of(self, token: int) -> int:
        return bisect.bisect_right(self.nodes, token, key=lambda node: node.start) - 1


@dataclass(frozen=True)
class BlockTree(Tree):
    """A tree of which some nodes see themselves both ways; the root may be without tokens.

    Attributes:
        both_ways: of every node whether its tokens also see the later ones of the node.
    """

    both_ways: tuple[bool, ...]

    def __post_init__(self) -> None:
        rules = {"both_ways": tuple_of("flags", flag)}
        check_arguments(TreeError, rules, {"both_ways": self.both_ways})
        self._check(least_root=0)
        if len(self.both_ways) != len(self.lengths):
            raise TreeError(
                f"a tree has {len(self.lengths)} nodes, but {len(self.both_ways)} of both_ways: "
                "give one for each node"
            )

    def sees_itself(self, node: int) -> bool:
        return self.both_ways[node]

    @property
    def sent(self) -> int:
        """Tokens of nodes with others below: only a node that ranks share sends others."""
        return sum(node.stop - node.start for node in self.nodes if node.stop < node.end)


ENOUGH = 8
"""A tree that one rank cannot hold has at most so many times as many tokens as its sequences have
on average. Larger ones save little more, and ranks exchange more."""


def is_too_large(
    tokens: int,
    of_sequences: int,
    sequences: int,
    most_tokens: int | None,
    tokens_per_rank: int | None = None,
) -> bool:
    """Returns whether a tree should be divided.

    Args:
        tokens: tokens of the tree.
        of_sequences: tokens of its sequences alone, in sum.
        sequences: number of its sequences.
        most_tokens: maximum number of tokens of a tree; None: any.
        tokens_per_rank: tokens that a rank holds, beyond which ENOUGH limits it; None: it does not.
    """
    if most_tokens is not None and tokens > most_tokens:
        return True
    return tokens_per_rank is not None and tokens > max(
        tokens_per_rank, ENOUGH * of_sequences / sequences
    )


Trees = Mapping[int, Tree]
"""Trees among the documents of a plan, by document."""
NO_TREES: Trees = {}
