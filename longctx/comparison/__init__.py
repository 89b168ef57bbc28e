"""Comparisons of planners on the same documents: modelled and measured."""
