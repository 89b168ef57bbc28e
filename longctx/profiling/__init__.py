"""Measures the constants of the cost model on the machine at hand: `longctx profile`."""

from longctx.profiling.measure import Measured, measure

__all__ = ["Measured", "measure"]
