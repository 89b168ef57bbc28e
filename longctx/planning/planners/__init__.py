"""Planners: choose degrees and ranks by one degree for all documents, by a table of lengths, or by search."""
