"""Plans, their cost and their bound: pure functions of lengths, with neither torch nor processes."""
