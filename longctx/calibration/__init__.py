"""Calibration: measures the constants of the cost model on this machine (`longctx calibrate`)."""
