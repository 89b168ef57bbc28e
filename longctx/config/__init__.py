"""Settings of a run: typed sections with defaults, read from a YAML file and dotted overrides, refused if anything is wrong.

`settings` declares them, `reading` loads them, `rules` holds what spans several of them, `describe` writes the help.
"""

from longctx.config.describe import describe
from longctx.config.problems import ConfigError, Problem
from longctx.config.reading import load
from longctx.config.rules import check
from longctx.config.settings import Config

__all__ = ["Config", "ConfigError", "Problem", "check", "describe", "load"]
