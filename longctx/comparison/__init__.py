"""Comparisons of planners on the same documents: modelled, measured, and over splits of the GPUs."""
