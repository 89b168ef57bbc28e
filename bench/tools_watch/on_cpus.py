"""Plug-in of Axolotl, which gives each of several processes a GPU."""

from typing import Any

from axolotl.integrations.base import BasePlugin


class OnCpus(BasePlugin):  # type: ignore[misc]  # Axolotl is not installed where types are checked
    """Loads models into host memory."""

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """Is called when settings are read, and loads nothing."""
        cfg.device_map = {"": "cpu"}
