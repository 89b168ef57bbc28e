"""Memory: estimates the peak memory per rank, and suggests settings if a run does not fit.

`fitting` decides. A new tensor counts in `block` if a block keeps it, else in `model.RankMemory`;
those of trainers alone in `longctx.trainers.budget`.
"""
