"""Mixture: the steps of a run that reads several stores, each in its own order, by shares of the
tokens.

The next piece always comes from the store that is furthest below its share of the tokens so far, so
no store is ever more than one document above its share. The cursor has, for each store, the number
of pieces and tokens taken since the mixture began; like the cursor of `Sampler`, it is independent
of ranks.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NotRequired, TypedDict, Unpack

import numpy as np

from longctx.data.orders import ORDER
from longctx.data.pieces import LeftOut, Piece, SamplerError
from longctx.data.sampler import MOST_EPOCHS, Sampler
from longctx.data.store.store import Store

Place = tuple[int, int]
"""Cursor of a store's own sampler, and number of tokens taken from the store."""


class Order(TypedDict):
    """What decides the documents of every step, see `Sampler`; the share `held_out_share` is in no
    step, see `HeldOut`."""

    global_tokens: int
    seed: int
    max_length: int
    long_documents: NotRequired[str | None]
    held_out_share: NotRequired[float]
    order: NotRequired[str]


def make_steps(store: Store, **order: Unpack[Order]) -> "Steps":
    """Returns the steps over a store, or over several. Raises SamplerError, see `Sampler`."""
    share = order.get("held_out_share")

    def make(source: int, global_tokens: int, stream: Sequence[int]) -> Sampler:
        left_out: LeftOut | None = None
        if share:
            left_out = store.held_out(source, share)
        return Sampler(
            store,
            global_tokens=global_tokens,
            seed=order["seed"],
            max_length=order["max_length"],
            long_documents=order.get("long_documents"),
            source=source,
            left_out=left_out,
            stream=stream,
            order=order.get("order", ORDER),
        )

    if len(store.sources) > 1:
        return Mixture(store, make, order["global_tokens"])
    return make(0, order["global_tokens"], ())


class Mixture:
    """Steps over several stores, of at least `global_tokens` tokens each; documents are numbered
    across all stores.

    `make_sampler` makes the steps of a store, by its number, with at least so many tokens, in an
    order of this stream of random numbers.

    Attributes:
        samplers: one sampler per store, with one piece per step.
        shares: share of the tokens per store, summing to 1.
    """

    def __init__(
        self,
        store: Store,
        make_sampler: Callable[[int, int, Sequence[int]], Sampler],
        global_tokens: int,
    ) -> None:
        def make(number: int) -> Sampler:
            source = store.sources[number]
            stream = np.frombuffer(bytes.fromhex(source.fingerprint)[:16], ">u4").tolist()
            try:
                return make_sampler(number, 1, stream)
            except SamplerError as error:
                raise SamplerError(f"store {source.path}: {error}") from error

        self.sources = store.sources
        self.samplers = [make(number) for number in range(len(store.sources))]
        weights = [
            source.amount * (sampler.tokens if source.unit == "epochs" else 1)
            for source, sampler in zip(store.sources, self.samplers, strict=True)
        ]
        self.shares = [weight / math.fsum(weights) for weight in weights]
        self._global_tokens = global_tokens
        self.start: Any = ((0, 0),) * len(self.samplers)
        for source, sampler, share in zip(store.sources, self.samplers, self.shares, strict=True):
            if share * global_tokens > MOST_EPOCHS * sampler.tokens:
                raise SamplerError(
                    f"store {source.path} has {sampler.tokens:,} tokens and a share of "
                    f"{share:.2%}: a step of {global_tokens:,} tokens would read them more than "
                    f"{MOST_EPOCHS} times; lower its weight or batch.global_tokens, or prepare "
                    "more text"
                )

    @property
    def order(self) -> str:
        """Name of the order of an epoch, of all stores."""
        return self.samplers[0].order

    def use_order(self, name: str) -> None:
        """Takes another order of every epoch, of all stores."""
        for sampler in self.samplers:
            sampler.use_order(name)

    def lines(self, tokens: int) -> list[str]:
        """Returns one line per store: its size, its share, and its epochs in `tokens` tokens of the
        mix, which steps exceed."""
        return [
            f"{source.path}: {len(source.documents):,} documents, {sampler.tokens:,} tokens to "
            f"train on, {share:.2%} of the mix: at least {share * tokens / sampler.tokens:.3g} "
            "epochs"
            for source, sampler, share in zip(self.sources, self.samplers, self.shares, strict=True)
        ]

    def step(self, cursor: tuple[Place, ...]) -> tuple[tuple[Piece, ...], tuple[Place, ...]]:
        """Returns the pieces of the step that begins at `cursor`, and the cursor of the next
        step."""
        places = list(cursor)
        pieces = list[Piece]()
        tokens = 0
        while tokens < self._global_tokens:
            total = sum(taken for _, taken in places)
            next_one = max(
                range(len(places)),
                key=lambda number: self.shares[number] * total - places[number][1],
            )
            place, taken = places[next_one]
            new_pieces, place = self.samplers[next_one].step(place)
            added = sum(piece.length for piece in new_pieces)
            places[next_one] = place, taken + added
            pieces += new_pieces
            tokens += added
        return tuple(pieces), tuple(places)

    def state(self, cursor: tuple[Place, ...]) -> dict[str, Any]:
        """Returns a cursor as plain JSON data: the entries of `Sampler.state` as lists over stores,
        and the tokens taken."""
        states = [
            sampler.state(place) for sampler, (place, _) in zip(self.samplers, cursor, strict=True)
        ]
        columns = {key: [state[key] for state in states] for key in states[0]}
        return {**columns, "taken": [taken for _, taken in cursor]}

    def cursor(self, state: dict[str, Any]) -> tuple[Place, ...]:
        return tuple(zip(map(int, state["cursor"]), map(int, state["taken"]), strict=True))

    def resume_cursor(
        self, cursors: Sequence[int | None], epochs: Sequence[int]
    ) -> tuple[Place, ...]:
        """Returns the cursor that continues each store at its entry of `cursors`, or if that is
        None, begins its epoch.

        Shares count from there.
        """
        places = zip(self.samplers, cursors, epochs, strict=True)
        return tuple(
            (sampler.resume_cursor([place], [epoch]), 0) for sampler, place, epoch in places
        )


Steps = Sampler | Mixture
"""The documents of each step, as a function of a cursor."""
