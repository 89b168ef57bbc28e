"""Calibration: fits the constants of a hardware profile to measured times."""
