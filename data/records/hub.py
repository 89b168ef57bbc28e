"""Hub: a data set of the Hugging Face hub, through `datasets`, from its cache or streamed."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longctx.data.records.readers import CorpusError
from longctx.errors import brief

_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]*[\w-]")


def may_be_name(source: str) -> bool:
    return _NAME.fullmatch(source) is not None


@dataclass(frozen=True)
class HubDataset:
    """A split of a data set on the hub.

    Attributes:
        name, subset, split, revision: as given; `subset` is what `datasets` also calls a configuration.
        commit: what `datasets` distinguishes versions by: the commit of the hub.
    """

    name: str
    subset: str | None
    split: str
    revision: str | None
    commit: str

    @classmethod
    def look_up(cls, name: str, subset: str | None, split: str, revision: str | None) -> "HubDataset":
        """Asks the hub, or the cache, for the version. Raises CorpusError if neither has the data set."""
        import datasets

        builder = _asked(name, lambda: datasets.load_dataset_builder(name, subset, revision=revision))
        return cls(name, subset, split, revision, str(builder.hash))

    def open(self, streamed: bool) -> Any:
        """Returns the split: an `IterableDataset` if it is streamed, or a `Dataset` in the cache. Raises CorpusError."""
        import datasets

        options = {"split": self.split, "revision": self.revision, "streaming": streamed}
        return _asked(self.name, lambda: datasets.load_dataset(self.name, self.subset, **options))


def _asked(name: str, ask: Callable[[], Any]) -> Any:
    import datasets

    try:
        return ask()
    except Exception as error:  # of the network, the hub and the data set
        raise CorpusError(
            f"source {name!r} is no file or folder, and `datasets` cannot read it from the hub ({type(error).__name__}: "
            f"{brief(error)}): correct the path, or the name, --subset, --split or --revision. Without a network, a data set "
            f"must be in the cache {datasets.config.HF_DATASETS_CACHE} (copy it, or set HF_HOME), or in a folder that "
            "`save_to_disk` wrote: give that folder"
        ) from error
