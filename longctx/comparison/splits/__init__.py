"""Splits of GPUs into tensor, pipeline and domain ranks, compared by the cost and memory models."""
