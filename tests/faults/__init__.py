"""Looks for faults: mutated inputs, killed ranks, failing machines. `evidence.py` and tests drive
it."""
