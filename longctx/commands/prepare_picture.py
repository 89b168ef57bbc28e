"""What `longctx prepare` shows of a store: the lengths of its documents, and three of them with the learnt tokens in colour."""

import sys
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from longctx.data import IGNORED_LABEL

if TYPE_CHECKING:
    from longctx.data.store import Store

SHOWN_TOKENS = 120  # of an example, at either end
LEARNT = "bold green"
BRACKETS = "⟦", "⟧"  # around learnt text where there is no colour
BAR = 40


def histogram(lengths: npt.NDArray[np.int64]) -> str:
    """Documents by length, a line for every power of two between the shortest and the longest, with their share of tokens."""
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    lines = ["  lengths    documents and their share of all tokens"]
    counts = np.bincount(powers)
    tokens = np.bincount(powers, weights=lengths)
    for power in range(int(powers.min()), len(counts)):
        bar = "█" * -(-BAR * int(counts[power]) // int(counts.max()))
        lines.append(f"  {f'≤ {1 << power:,}':>13} {counts[power]:>10,} {tokens[power] / tokens.sum():>6.1%} {bar}".rstrip())
    return "\n".join(lines)


def examples(store: "Store") -> None:
    """Prints the first document (or pair of them), the one in the middle and the last one; of long ones, both ends."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    coloured = console.is_terminal and console.color_system is not None
    key = Text("learnt", LEARNT) if coloured else Text(f"between {BRACKETS[0]} and {BRACKETS[1]}")
    console.print(Text.assemble("  examples, what is learnt ", *(["is "] if coloured else ["stands "]), key))
    together = 2 if store.pairs else 1
    last = len(store) // together - 1
    for document in (together * place + side for place in sorted({0, last // 2, last}) for side in range(together)):
        length = int(store.lengths[document])
        share = store.trained_tokens[document] / length
        console.rule(f"{store.name(document)}: {length:,} tokens, {share:.0%} learnt", align="left", characters="-")
        text = Text()
        spans = [(0, length)]
        if length > 2 * SHOWN_TOKENS:
            spans = [(0, SHOWN_TOKENS), (length - SHOWN_TOKENS, length)]
        for number, (start, stop) in enumerate(spans):
            if number:
                text.append(f"\n… {length - 2 * SHOWN_TOKENS:,} tokens …\n", "dim")
            for learnt, piece in _pieces(store, document, start, stop):
                if not learnt or coloured:
                    text.append(piece, LEARNT if learnt else None)
                else:
                    text.append(piece.join(BRACKETS))
        console.print(text)


def _pieces(store: "Store", document: int, start: int, stop: int) -> Sequence[tuple[bool, str]]:
    """Texts of runs of tokens that are all learnt, or all not."""
    before = max(0, start - 1)
    tokens, labels = store.read(document, before, stop)
    learnt = np.concatenate([[False], labels[:-1] != IGNORED_LABEL])[start - before :]
    runs = groupby(zip(learnt.tolist(), tokens[start - before :].tolist(), strict=True), key=lambda pair: pair[0])
    return [(kind, store.tokenizer.decode(token for _, token in run)) for kind, run in runs]
