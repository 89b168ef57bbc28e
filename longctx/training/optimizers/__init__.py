"""Optimizers beside torch's AdamW."""
