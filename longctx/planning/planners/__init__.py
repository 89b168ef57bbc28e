"""Planners: choose degrees and ranks by one degree for all documents, by a table of lengths, or by
search.

In mode auto, `degree_table` and `shortest_path` propose degrees, `search` chooses them, and
`planner` takes another mode's plan if it is faster.
"""
