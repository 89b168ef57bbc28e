"""Optimizers beside torch's AdamW, and the moving average of weights."""
