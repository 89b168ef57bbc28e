"""Profiling: measures the constants of the cost model on this machine (`longctx profile`)."""

from longctx.profiling.measure import Measured, measure_profile

__all__ = ["Measured", "measure_profile"]
