"""Linear attention and short convolutions over packed documents, each split over the ranks of its
ring."""

from longctx.attention.linear.recurrence import Recurrence, not_compiled

__all__ = ["Recurrence", "not_compiled"]
