"""Settings of a run: typed sections with defaults, read from a YAML file and dotted overrides, and
checked before use.

`settings` declares the sections, `run` combines them, `names` lists them, `reading` loads them.
`explain` says what is wrong with a value, `removed` what to write instead of a setting that is
gone. `combinations` and `rules` check constraints across settings, `describe` writes the help.
"""

from longctx.config.describe import describe, overview
from longctx.config.problems import ConfigError, Problem
from longctx.config.reading import load
from longctx.config.rules import check
from longctx.config.run import Config

__all__ = ["Config", "ConfigError", "Problem", "check", "describe", "load", "overview"]
