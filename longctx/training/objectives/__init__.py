"""Objectives: what a step minimizes, as weights of tokens; the loss that computes them, and the
terms beside it."""
