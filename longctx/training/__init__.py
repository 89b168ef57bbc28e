"""Training: a run on every rank, from its settings to its last step.

The modules stand side by side in the order of a run: `run` opens, `checks` refuses, `build` and
`data` make the parts, `assembly` joins them, `trainer` loops over `runner`, `health`, `agreement`,
`clock`, `metrics` and `trace` watch. `objectives` has the losses, `saved` what is left on disk.
"""
