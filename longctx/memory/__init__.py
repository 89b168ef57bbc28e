"""Memory: estimates the peak memory per rank, and suggests settings if a run does not fit."""
