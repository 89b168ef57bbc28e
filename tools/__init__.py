"""Tools that look for faults: mutated inputs, killed ranks, failing machines. `bench/faults.py` and tests drive them."""
