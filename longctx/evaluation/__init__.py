"""Evaluation of a trained model: loss by length and position, and retrieval of a fact from a long document."""
