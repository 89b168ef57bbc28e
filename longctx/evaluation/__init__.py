"""Evaluation of a trained model: loss by length and position."""
