"""Position: where a run is in its data, and whether a saved position means the same documents here.

The state of a loader is plain JSON data: the values that identify its documents and their order,
its step and cursor, and positions in stores that earlier runs have read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from longctx.data.mixture import Order
from longctx.data.orders import EARLIER_ORDER, ORDERS
from longctx.data.store.store import Store
from longctx.errors import UserError

WAYS_OUT = {
    "fingerprint": "give the data.store that the run began with, several in the same order, or "
    "start a new run",
    "mix": "give the weights or epochs in data.store that the run began with",
    "seed": "set data.seed to the run's value (by default it is train.seed)",
    "max_length": "set data.max_length to the run's value (by default it depends on ranks and "
    "batch.tokens_per_rank)",
    "long_documents": "set data.long_documents to the run's value",
    "held_out": "set data.held_out to the run's value",
}
"""Values that must be unchanged for the cursor to mean the same documents, and the way out if they
differ."""


class LoaderError(UserError):
    """A saved state that does not match this loader."""


def order_of(state: Mapping[str, Any]) -> str:
    """Returns the order of an epoch in which a saved state counts; a run keeps it, and so does one
    that continues it. Raises LoaderError for one that is not known here."""
    order = state.get("order", EARLIER_ORDER)
    if order not in ORDERS:
        raise LoaderError(
            f"the documents of the saved state are in the order {order!r}, but this longctx has "
            f"{', '.join(ORDERS)}: resume with the version that saved it, or start a new run"
        )
    return str(order)


@dataclass(frozen=True)
class DataIdentity:
    """What a cursor depends on: the documents and their order.

    Attributes:
        values: by the names of `WAYS_OUT`; a mix has lists, with a value for each store.
    """

    values: dict[str, Any]

    @classmethod
    def of(cls, store: Store, order: Order) -> "DataIdentity":
        """Returns the identity of the documents of a store in an order."""
        fingerprints = [source.fingerprint for source in store.sources]
        values: dict[str, Any] = {"fingerprint": store.fingerprint}
        if len(fingerprints) > 1:
            values["fingerprint"] = fingerprints
            values["mix"] = [{source.unit: source.amount} for source in store.sources]
        values["seed"] = order["seed"]
        values["max_length"] = order["max_length"]
        # Of documents that may be: all others fit.
        values["long_documents"] = order.get("long_documents") or "split"
        values["held_out"] = order.get("held_out_share", 0.0)
        return cls(values)

    def checked(self, state: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Returns a saved state. Raises LoaderError if a value of one of `names` differs here."""
        state = {"mix": None, **state}  # absent of single stores
        missing = [name for name in (*self.values, "step", "cursor") if name not in state]
        if missing:
            raise LoaderError(
                f"the saved state of the data lacks {', '.join(missing)}: it was saved by another "
                "version of longctx; resume with that version, or start a new run"
            )
        problems = [
            f"{name} is {self.values[name]!r}, and was {state[name]!r}: {WAYS_OUT[name]}"
            for name in names
            if state[name] != self.values[name]
        ]
        if problems:
            raise LoaderError(
                "the run cannot continue at its position in the data: " + "; ".join(problems)
            )
        return state


def positions(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the position in each store, and how its documents are cut, by the fingerprint of the
    store."""
    several = isinstance(state["fingerprint"], list)
    keys = ("fingerprint", "cursor", "epoch", "longest")
    columns = [state[key] if several else [state[key]] for key in keys]
    found = {}
    for fingerprint, cursor, epoch, longest in zip(*columns, strict=True):
        cut = [longest, state["long_documents"], several]
        found[fingerprint] = {"cut": cut, "cursor": cursor, "epoch": epoch}
    return found
