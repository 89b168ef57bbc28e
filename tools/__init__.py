"""Writes the pages of docs/ that repeat the code."""
