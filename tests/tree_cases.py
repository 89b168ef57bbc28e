"""Random trees, their sequences one by one, and micro-batches with trees beside other documents."""

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from longctx.attention import Mask, reference_attention
from longctx.planning.layout import Placement
from longctx.planning.tree import ROOT, Tree
from tests.attention_cases import Case


def tree_of(shape: Any) -> Tree:
    """Returns the tree of (tokens, shape, shape, ..), where a number stands for a node without
    children."""
    lengths: list[int] = []
    parents: list[int] = []

    def add(part: Any, parent: int) -> None:
        tokens, *children = (part,) if isinstance(part, int) else part
        lengths.append(tokens)
        parents.append(parent)
        number = len(lengths) - 1
        for child in children:
            add(child, number)

    add(shape, ROOT)
    return Tree(tuple(lengths), tuple(parents))


TURNS = tree_of((23, (7, (11, 3, 9), 5), (4, 1, (13, 2, (6, 8, 17))), 31))
"""Conversations of several turns."""


@st.composite
def trees(draw: st.DrawFn, levels: int = 4, children: int = 6, tokens: int = 60) -> Tree:
    """Draws trees of up to so many levels; few nodes are likelier than many."""
    sizes = st.one_of(st.integers(1, 6), st.integers(1, tokens))

    def shape(level: int) -> Any:
        count = draw(st.integers(0, children)) if level < levels else 0
        return draw(sizes), *(shape(level + 1 + draw(st.integers(0, 2))) for _ in range(count))

    return tree_of(shape(1))


def levels(tree: Tree) -> int:
    return max(len(tree.path(node)) for node in range(len(tree.lengths)))


def sequences(tree: Tree) -> list[torch.Tensor]:
    """Returns the tokens of every sequence that ends in a leaf, as rows of the tree, in order."""
    leaves = set(range(len(tree.lengths))) - set(tree.parents)
    return [
        torch.cat([torch.arange(node.start, node.stop) for node in tree.path(leaf)])
        for leaf in sorted(leaves)
    ]


@st.composite
def tree_cases(draw: st.DrawFn, ranks: int, **options: Any) -> Case:
    """Draws trees beside plain documents on some of the ranks, with any rounds and heads."""
    shapes = [draw(trees(**options)) for _ in range(draw(st.integers(1, 3)))]
    plain = draw(st.lists(st.integers(1, 80), max_size=2))
    placements = []
    for document in range(len(shapes) + len(plain)):
        degree = draw(st.sampled_from([ranks, draw(st.integers(1, ranks))]))
        placements.append(
            Placement(document, draw(st.integers(0, ranks - degree)), degree, draw(st.booleans()))
        )
    kv_heads = draw(st.integers(1, 2))
    return Case(
        ranks,
        (*(tree.length for tree in shapes), *plain),
        tuple(placements),
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        exchange_rounds=tuple(draw(st.integers(1, 4)) for _ in placements),
        padding=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 2**31)),
        trees=dict(enumerate(shapes)),
    )


@st.composite
def masks(draw: st.DrawFn, case: Case) -> Mask:
    window = draw(st.none() | st.integers(1, 12) | st.integers(1, 150))
    prefix = {
        document: draw(st.integers(0, tree.lengths[0]))
        for document, tree in case.trees.items()
        if draw(st.booleans())
    }
    return Mask(True, window, 0 if window is None else draw(st.integers(0, 20)), prefix)


def one_by_one(case: Case) -> list[torch.Tensor]:
    """Returns out, dq, dk, dv (and dsinks) of dense attention in float64 over every sequence alone.

    A row that several sequences share gets the gradient of its output from the first one.
    """
    q, k, v, dout = (tensor.double() for tensor in case.inputs())
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    sinks = case.sinks()
    inputs += [] if sinks is None else [sinks]
    out, given = torch.zeros_like(dout), torch.zeros(len(q), dtype=torch.bool)
    gradients = [torch.zeros_like(tensor) for tensor in inputs]
    start = 0
    for document, length in enumerate(case.lengths):
        tree = case.trees.get(document, Tree((length,), (ROOT,)))
        mask = replace(case.mask, prefix={0: case.mask.prefix.get(document, 0)})
        for sequence in sequences(tree):
            rows = start + sequence
            parts = (tensor[rows] for tensor in (q, k, v))
            its_out = reference_attention(
                *parts, [len(rows)], mask=mask, softcap=case.softcap, sink_logits=sinks
            )
            new = torch.where(given[rows, None, None], 0, dout[rows])
            for total, part in zip(
                gradients, torch.autograd.grad(its_out, inputs, new), strict=True
            ):
                total += part
            out[rows], given[rows] = its_out.detach(), True
        start += length
    return [out, *gradients]
