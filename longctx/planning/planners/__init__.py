"""Ways to choose degrees and places: one degree for all, by a table of lengths, or by search."""
