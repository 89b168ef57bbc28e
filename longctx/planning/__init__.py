"""Plans, their cost and their lower bounds: pure functions of document lengths that need neither
torch nor processes."""
