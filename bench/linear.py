"""Linear attention: CPU time and dispatches of forward and backward of one layer, for documents
whole on one rank.

    python bench/linear.py --code 1a2b3c4                                              # about a minute on one core
    PYTHONPATH=../other-checkout python bench/linear.py --code name-of-the-other       # beside it, in the same file

One thread; the least CPU time of several rounds, which other processes on the machine change
little. A dispatch is a call of an operator of torch: on a GPU most are a kernel, and many small
ones take longer to launch than to run. Uses only `Recurrence.attend`, so it also runs on other
versions. Appends to results/linear.csv.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from harness import Table, facts, options
from longctx.attention.linear.recurrence import Recurrence
from longctx.planning.layout import Layout, Placement

CASES = [
    (rule, dim, lengths)
    for rule in ("delta rule", "Mamba-2")
    for dim, lengths in (
        (16, [16384]),
        (64, [8192]),
        (128, [8192]),
        (128, [1024] * 4),
        (16, [256] * 32),
    )
]
HEADS = 4
COLUMNS = ["code", "rule", "head_dim", "heads", "documents", "tokens", "dispatches", "cpu_ms"]


class Counting(TorchDispatchMode):
    """Counts the calls of operators."""

    calls = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


class Layer:
    """Random inputs of a layer for documents of some lengths."""

    def __init__(self, rule: str, dim: int, lengths: Sequence[int]) -> None:
        torch.manual_seed(0)
        tokens = sum(lengths)
        placements = [Placement(document, 0, 1) for document in range(len(lengths))]
        self.recurrence = Recurrence(Layout.of(placements, list(lengths), 0, 0))
        q, k, v, self.dout = (torch.randn(tokens, HEADS, dim) for _ in range(4))
        beta = torch.rand(tokens, HEADS) if rule == "delta rule" else None
        given = [q / dim**0.5, F.normalize(k, dim=-1), v, -torch.rand(tokens, HEADS), beta]
        self.given = [x if x is None else x.requires_grad_() for x in given]

    def step(self) -> None:
        out = self.recurrence.attend(*self.given)
        torch.autograd.grad(out, [x for x in self.given if x is not None], self.dout)


def main() -> None:
    parser = options(__doc__, "linear.csv")
    parser.add_argument(
        "--code", required=True, help="name of the version of the code, for the table"
    )
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(arguments.out, COLUMNS, facts("torch") | {"rounds": str(arguments.rounds)})
    for rule, dim, lengths in CASES:
        layer = Layer(rule, dim, lengths)
        layer.step()
        with Counting() as counting:
            layer.step()
        best = float("inf")
        for _ in range(arguments.rounds):
            began = time.process_time()
            layer.step()
            best = min(best, time.process_time() - began)
        documents = f"{len(lengths)} × {lengths[0]:,}"
        row = [
            arguments.code,
            rule,
            dim,
            HEADS,
            documents,
            sum(lengths),
            counting.calls,
            round(1000 * best),
        ]
        table.append(dict(zip(COLUMNS, row, strict=True)))
        print(*row)


if __name__ == "__main__":
    main()
