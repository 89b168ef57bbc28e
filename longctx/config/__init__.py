"""Settings of a run: typed sections with defaults, read from a YAML file and dotted overrides, refused if anything is wrong.

`settings` declares them, `run` has all of a run, `stages` lays those of a stage over them, `reading` loads them, `rules` has
what spans several, `describe` writes the help.
"""

from longctx.config.describe import describe
from longctx.config.problems import ConfigError, Problem
from longctx.config.reading import load
from longctx.config.rules import check
from longctx.config.run import Config

__all__ = ["Config", "ConfigError", "Problem", "check", "describe", "load"]
