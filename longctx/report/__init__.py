"""Pictures and comparisons of plans and runs."""
