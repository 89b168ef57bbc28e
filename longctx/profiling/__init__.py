"""Measures the constants of the cost model on the machine at hand: `longctx profile`."""

from longctx.profiling.measure import Measured, measure_profile

__all__ = ["Measured", "measure_profile"]
