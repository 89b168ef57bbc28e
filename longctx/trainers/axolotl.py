"""Axolotl's plug-in: dynamic context parallelism by two entries of its YAML.

    plugins: [longctx.trainers.axolotl.LongctxPlugin]
    longctx: {tokens_per_rank: 16384}

`longctx` has the options of `dynamic_context_parallel`, and may be left out. Axolotl starts as
before (`axolotl train config.yaml`): the trainer that it builds plans its steps.
"""

from collections.abc import Mapping
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from longctx.parallel.environment import Launch
from longctx.trainers.dynamic import check_options, dynamic_context_parallel
from longctx.trainers.options import check_names


class LongctxArguments(BaseModel):
    """What the plug-in adds to Axolotl's YAML.

    Attributes:
        longctx: options of `dynamic_context_parallel`.
    """

    longctx: dict[str, Any] | None = None


class LongctxPlugin(BasePlugin):  # type: ignore[misc]  # Axolotl is not installed where types are checked
    """Plans the steps of Axolotl's trainer."""

    def get_input_args(self) -> str:
        """Returns the name of the class of what the YAML may have."""
        return f"{LongctxArguments.__module__}.{LongctxArguments.__name__}"

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Refuses options that are none. Raises UserError before Axolotl reads data."""
        check_options(Launch.read().world_size, options_of(cfg))

    def post_trainer_create(self, cfg: Mapping[str, Any], trainer: Any) -> None:
        """Gives a trainer dynamic context parallelism. Raises UserError."""
        dynamic_context_parallel(trainer, **options_of(cfg))


def options_of(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options in Axolotl's YAML. Raises UserError for unknown ones."""
    values = cfg.get("longctx")
    return check_names({} if values is None else values, "longctx")
