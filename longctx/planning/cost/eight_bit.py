"""Moments in 8 bits: which parameters have them, how rows are cut into blocks with a common scale,
and the bytes of both."""

import math
from collections.abc import Mapping, Sequence

from longctx.planning.cost.spec import Matrix

BLOCK = 256
"""Numbers of a row with a common scale, as in torchao; the last block of a row may have fewer."""
SMALLEST = 4096
"""Matrices with fewer numbers have moments in float32, as in torchao."""
FLOAT32 = 4


def in_8_bits(shape: Sequence[int]) -> bool:
    """Returns whether a parameter of this shape has moments in 8 bits: a matrix, or several, that
    is not small.

    Vectors, and matrices of one column, stay in float32: sharding cuts their blocks, or a scale for
    each number saves nothing.
    """
    return len(shape) > 1 and shape[-1] > 1 and math.prod(shape) >= SMALLEST


def blocks_of_row(columns: int) -> int:
    """Returns the number of blocks of a row, of which the last may be shorter."""
    return -(-columns // BLOCK)


def cuts_blocks(columns: int, ranks: int) -> bool:
    """Returns whether shares of the columns, rounded up, on several ranks are no whole blocks."""
    share = -(-columns // ranks)
    return ranks > 1 and share % BLOCK > 0


def state_bytes(parameters: int, sizes: Mapping[Matrix, int]) -> int:
    """Returns the bytes of two moments of `parameters` numbers, a part of as many matrices as
    `sizes` says."""
    numbers = moment = 0
    for matrix, times in sizes.items():
        rows = matrix.count * matrix.rows
        held = rows * matrix.columns
        numbers += times * held
        if in_8_bits((rows, matrix.columns)):
            moment += times * (held + FLOAT32 * rows * blocks_of_row(matrix.columns))
        else:
            moment += times * FLOAT32 * held
    return 2 * moment * parameters // max(1, numbers)
