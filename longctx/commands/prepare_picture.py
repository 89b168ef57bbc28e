"""Output of `longctx prepare`: a histogram of document lengths, and three examples with the tokens with loss in colour."""

import sys
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from longctx.data import IGNORED_LABEL

if TYPE_CHECKING:
    from longctx.data.store import Store

SHOWN_TOKENS = 120  # at either end of an example
WITH_LOSS = "bold green"
BRACKETS = "⟦", "⟧"  # around text with loss where colour is not supported
BAR = 40


def histogram(lengths: npt.NDArray[np.int64]) -> str:
    """Returns a histogram of documents by length, one line per power of two, with their share of tokens."""
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    lines = ["  lengths    documents and share of all tokens"]
    counts = np.bincount(powers)
    tokens = np.bincount(powers, weights=lengths)
    for power in range(int(powers.min()), len(counts)):
        bar = "█" * -(-BAR * int(counts[power]) // int(counts.max()))
        lines.append(f"  {f'≤ {1 << power:,}':>13} {counts[power]:>10,} {tokens[power] / tokens.sum():>6.1%} {bar}".rstrip())
    return "\n".join(lines)


def examples(store: "Store") -> None:
    """Prints the first, the middle and the last document; of long documents, both ends."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    coloured = console.is_terminal and console.color_system is not None
    key = Text("marked", WITH_LOSS) if coloured else Text(f"between {BRACKETS[0]} and {BRACKETS[1]}")
    console.print(Text.assemble("  examples, text with loss ", key))
    last = len(store) - 1
    for document in sorted({0, last // 2, last}):
        length = int(store.lengths[document])
        share = store.trained_tokens[document] / length
        console.rule(f"{store.name(document)}: {length:,} tokens, {share:.0%} with loss", align="left", characters="-")
        text = Text()
        spans = [(0, length)]
        if length > 2 * SHOWN_TOKENS:
            spans = [(0, SHOWN_TOKENS), (length - SHOWN_TOKENS, length)]
        for number, (start, stop) in enumerate(spans):
            if number:
                text.append(f"\n… {length - 2 * SHOWN_TOKENS:,} tokens …\n", "dim")
            for weight, piece in _pieces(store, document, start, stop):
                if weight not in (0, 1):
                    text.append(f"{weight:g}×")
                if not weight or coloured:
                    text.append(piece, WITH_LOSS if weight else None)
                else:
                    text.append(piece.join(BRACKETS))
        console.print(text)


def _pieces(store: "Store", document: int, start: int, stop: int) -> Sequence[tuple[float, str]]:
    """Returns (weight in the loss, text) of consecutive runs of tokens of the same weight; 0: without loss."""
    before = max(0, start - 1)
    tokens, labels = store.read(document, before, stop)
    with_loss = np.concatenate([[0.0], labels[:-1] != IGNORED_LABEL])[start - before :]
    if (own := store.token_weights(document, start, stop)) is not None:
        with_loss *= own
    runs = groupby(zip(with_loss.tolist(), tokens[start - before :].tolist(), strict=True), key=lambda pair: pair[0])
    return [(kind, store.tokenizer.decode(token for _, token in run)) for kind, run in runs]
