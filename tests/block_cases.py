"""Trees of block diffusion, the dense mask of their published form, and micro-batches with them
beside other documents."""

from dataclasses import replace

import torch
from hypothesis import strategies as st

from longctx.attention import Mask
from longctx.planning.layout import Placement
from longctx.planning.tree import ROOT, BlockTree
from tests.attention_cases import Case


def comb(length: int, block: int, *, root: int = 0, clean_both_ways: bool = True) -> BlockTree:
    """Returns the tree of a sequence of blocks, the last of which may be shorter: below every clean
    block the noisy and the clean copy of the next one."""
    lengths = [root]
    parents = [ROOT]
    both_ways = [False]
    clean = 0
    for start in range(0, length, block):
        size = min(block, length - start)
        lengths += [size, size]
        parents += [clean, clean]
        both_ways += [True, clean_both_ways]
        clean = len(lengths) - 1
    return BlockTree(tuple(lengths), tuple(parents), tuple(both_ways))


def by_definition(
    length: int, block: int, *, root: int = 0, clean_both_ways: bool = True
) -> torch.Tensor:
    """Returns what tokens of `comb` see [tokens, tokens], from the three rules of block diffusion
    (arXiv 2503.09573, appendix B.6): noisy tokens see their own noisy block, and clean blocks
    before it; clean tokens see clean blocks up to their own."""
    position = list(range(root))
    number = [-1] * root  # of the block
    noisy = [False] * root
    for start in range(0, length, block):
        stop = min(start + block, length)
        for is_noisy in (True, False):
            position += range(root + start, root + stop)
            number += [start // block] * (stop - start)
            noisy += [is_noisy] * (stop - start)
    tokens = len(position)
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for query in range(tokens):
        for key in range(tokens):
            own = noisy[query] == noisy[key] and number[query] == number[key]
            if own and (number[query] < 0 or not (noisy[query] or clean_both_ways)):
                own = position[key] <= position[query]
            before = not noisy[key] and number[key] < number[query]
            seen[query, key] = own or before
    return seen


def seen_by(tree: BlockTree, mask: Mask, document: int = 0) -> torch.Tensor:
    """Returns what the tokens of any tree see [tokens, tokens]: on every path what the mask shows,
    and in a node that sees itself both ways all later tokens of the node."""
    seen = torch.zeros(tree.length, tree.length, dtype=torch.bool)
    for number, node in enumerate(tree.nodes):
        nodes = tree.path(number)
        rows = torch.cat([torch.arange(each.start, each.stop) for each in nodes])
        on_path = mask.visible(document, len(rows))
        own = slice(node.start, node.stop)
        queries = len(rows) - (node.stop - node.start)
        seen[own, rows] = on_path[queries:]
        if node.both_ways:
            size = node.stop - node.start
            seen[own, own] |= torch.ones(size, size, dtype=torch.bool).triu(1)
    return seen


def dense(case: Case) -> list[torch.Tensor]:
    """Returns out, dq, dk, dv of dense attention in float64 over all documents."""
    q, k, v, dout = (tensor.double() for tensor in case.inputs())
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    seen = torch.zeros(len(q), len(q), dtype=torch.bool)
    start = 0
    for document, length in enumerate(case.lengths):
        rows = slice(start, start + length)
        tree = case.trees.get(document)
        if tree is None:
            seen[rows, rows] = case.mask.visible(document, length)
        else:
            assert isinstance(tree, BlockTree)
            seen[rows, rows] = seen_by(tree, case.mask, document)
        start += length
    group = case.heads // case.kv_heads
    keys = inputs[1].repeat_interleave(group, 1)
    values = inputs[2].repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", inputs[0], keys) * case.head_dim**-0.5
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", shares, values)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


@st.composite
def block_trees(draw: st.DrawFn, tokens: int = 60) -> BlockTree:
    """Draws combs, and trees of any shape of which any nodes see themselves both ways."""
    if draw(st.booleans()):
        return comb(
            draw(st.integers(1, tokens)),
            draw(st.integers(1, 12)),
            root=draw(st.integers(0, 5)),
            clean_both_ways=draw(st.booleans()),
        )
    count = draw(st.integers(1, 9))
    lengths = [draw(st.integers(0, 6))]
    lengths += [draw(st.integers(1, 9)) for _ in range(count)]
    path = [0]
    parents = [ROOT]
    for node in range(1, count + 1):
        depth = draw(st.integers(1, len(path)))
        parents.append(path[depth - 1])
        path = [*path[:depth], node]
    both_ways = draw(st.lists(st.booleans(), min_size=count + 1, max_size=count + 1))
    return BlockTree(tuple(lengths), tuple(parents), tuple(both_ways))


@st.composite
def block_cases(draw: st.DrawFn, ranks: int) -> Case:
    """Draws one or two such trees beside plain documents on some of the ranks."""
    shapes = [draw(block_trees()) for _ in range(draw(st.integers(1, 2)))]
    plain = draw(st.lists(st.integers(1, 80), max_size=2))
    placements = []
    for document in range(len(shapes) + len(plain)):
        degree = draw(st.integers(1, ranks))
        first = draw(st.integers(0, ranks - degree))
        placements.append(Placement(document, first, degree, draw(st.booleans())))
    window = draw(st.none() | st.integers(1, 20))
    sinks = draw(st.integers(0, 8)) if window is not None else 0
    kv_heads = draw(st.integers(1, 2))
    case = Case(
        ranks,
        lengths=(*(tree.length for tree in shapes), *plain),
        placements=tuple(placements),
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 5])),
        exchange_rounds=tuple(draw(st.integers(1, 3)) for _ in placements),
        padding=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 2**31)),
        trees=dict(enumerate(shapes)),
    )
    return replace(case, mask=Mask(window=window, sinks=sinks), dtype=torch.float64)
