"""Loader: yields the batches of one rank, planned and read one step ahead in a background thread.

Every rank runs its own loader over the same store and makes the same plan from the same lengths;
nothing is communicated. The position of a loader is a step and a cursor, the same on every rank and
independent of the number of ranks.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, Unpack

import numpy as np

from longctx.data import IGNORED_LABEL
from longctx.data.mixture import Order, make_steps
from longctx.data.packing import StepBatch, pack
from longctx.data.pieces import Piece
from longctx.data.position import DataIdentity, order_of, positions
from longctx.data.store.store import Store
from longctx.data.trees import Merged, merge_prefixes
from longctx.planning.plan import Plan, PlanError

Planner = Callable[..., Plan]
"""Makes the plan of a step from the lengths of its documents, and from `trees` if there are any."""
Merging = Callable[[Store, Sequence[Piece]], Merged | None]
"""Merges the documents of a step that begin alike, see `merge_pieces`."""
MIN_SHARED_FRACTION = 1 / 8
"""Documents are merged if they share at least this part of their mean length. A tree must fit one
micro-batch, so that small savings are not worth it, and a chat template or a system prompt is
common to all documents of a store."""


class Loader(Iterator[StepBatch]):
    """An endless iterator over the steps of one rank.

    Args:
        store: documents of one store or several.
        rank, ranks: this rank, and the number N of ranks in the domain.
        planner: makes the plan of a step from the lengths of its documents; runs in the background
            thread.
        pad_to_multiple_of: every micro-batch is padded to a multiple of this number of tokens.
        merging: merges the documents of a step that begin alike; None: they stay apart.
        order: decides the documents of every step; `make_steps` may raise SamplerError here.

    Errors while a step is prepared (PlanError, OSError, ..) are raised by the `next` that would
    have returned the step.

    Attributes:
        finish: returns a step with what else can be made ahead; called in the background thread.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        ranks: int,
        planner: Planner,
        pad_to_multiple_of: int = 1,
        merging: Merging | None = None,
        **order: Unpack[Order],
    ) -> None:
        self.sampler = make_steps(store, **order)
        self._identity = DataIdentity.of(store, order)
        # Positions in stores of earlier runs that this one lacks.
        self._earlier: dict[str, dict[str, Any]] = {}
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self.planner = planner
        self._merging = merging
        self._pad_to_multiple_of = pad_to_multiple_of
        self.finish: Callable[[StepBatch], StepBatch] = _as_read
        self._step = 0  # last step returned
        self._cursor = self.sampler.start  # after that step
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="longctx-loader")
        self._ahead: Future[tuple[StepBatch, Any]] | None = None

    def __next__(self) -> StepBatch:
        asked = time.perf_counter()
        if self._ahead is None:
            self._ahead = self._submit()
        batch, self._cursor = self._ahead.result()
        self._step = batch.step
        waited = time.perf_counter() - asked
        self._ahead = self._submit()
        return replace(batch, data_wait_s=waited)

    def next_hash(self) -> str | None:
        """Returns the hash of the plan of the step that comes next; None while that is prepared, or
        if it failed."""
        ahead = self._ahead
        if ahead is None or not ahead.done() or ahead.cancelled() or ahead.exception() is not None:
            return None
        return ahead.result()[0].plan.hash

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last returned step, as plain JSON data; the same on every
        rank."""
        state = {
            **self._identity.values,
            "order": self.sampler.order,
            "step": self._step,
            **self.sampler.state(self._cursor),
        }
        if self._earlier:
            state["earlier"] = self._earlier
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved position, which may come from another number of ranks or another
        `global_tokens`.

        Raises LoaderError naming all differences if the cursor would mean other documents here.
        """
        state = self._identity.checked(state, self._identity.values)
        order = order_of(state)
        self._discard()
        self.sampler.use_order(order)
        self._step = int(state["step"])
        self._cursor = self.sampler.cursor(state)
        self._earlier = state.get("earlier", {})

    def continue_from(self, state: dict[str, Any]) -> None:
        """Continues after a saved position of another run, which may have used other documents, in
        its order of epochs.

        A store continues where it stopped if its pieces and its role (alone or in a mix) are
        unchanged. Any other store that was read before begins its next epoch, so that it does not
        begin with the same documents again. Raises LoaderError if the seed or the share of held-out
        documents differs.
        """
        state = self._identity.checked(state, ("seed", "held_out"))
        order = order_of(state)
        seen = {**state.get("earlier", {}), **positions(state)}
        here = positions(self.state_dict())
        cursors: list[int | None] = []
        epochs: list[int] = []
        for fingerprint, new in here.items():
            earlier = seen.get(fingerprint)
            continues = earlier is not None and earlier["cut"] == new["cut"]
            cursors.append(earlier["cursor"] if earlier and continues else None)
            epochs.append(earlier["epoch"] + 1 if earlier else 0)
        self._discard()
        self.sampler.use_order(order)
        self._step = int(state["step"])
        self._cursor = self.sampler.resume_cursor(cursors, epochs)
        self._earlier = {
            fingerprint: earlier for fingerprint, earlier in seen.items() if fingerprint not in here
        }

    def close(self) -> None:
        """Ends the background thread after the step that it is preparing."""
        self._discard()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _discard(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    def _submit(self) -> Future[tuple[StepBatch, Any]]:
        return self._thread.submit(self._prepare, self._step + 1, self._cursor)

    def _prepare(self, step: int, cursor: Any) -> tuple[StepBatch, Any]:
        """Returns the step that begins at `cursor`, and the cursor after it."""
        pieces, next_cursor = self.sampler.step(cursor)
        plan, merged = plan_step(self._store, pieces, self.planner, self._merging)
        if plan.ranks != self._ranks:
            raise PlanError(
                f"the planner returned a plan for {plan.ranks} ranks, but the domain has "
                f"{self._ranks}"
            )
        batch = read_step(
            self._store,
            pieces,
            plan=plan,
            rank=self._rank,
            step=step,
            pad_to_multiple_of=self._pad_to_multiple_of,
            merged=merged,
        )
        return self.finish(batch), next_cursor


def _as_read(batch: StepBatch) -> StepBatch:
    return batch


def merge_pieces(
    store: Store, pieces: Sequence[Piece], most_tokens: int, tokens_per_rank: int
) -> Merged | None:
    """Returns the documents that the pieces of a step are merged to; None if no two of them are.
    Reads all pieces.

    `most_tokens` and `tokens_per_rank` are as in `merge_prefixes`.
    """
    assert not store.weighted, "weights of tokens may differ where documents are alike"
    read = [store.tokens(piece.document, piece.start, piece.stop) for piece in pieces]
    merged = merge_prefixes(
        [tokens for tokens, _ in read],
        [np.where(trained, tokens, IGNORED_LABEL) for tokens, trained in read],
        most_tokens=most_tokens,
        tokens_per_rank=tokens_per_rank,
        least_shared=int(MIN_SHARED_FRACTION * sum(piece.length for piece in pieces) / len(pieces)),
    )
    if merged.trees:
        return merged
    return None


def plan_step(
    store: Store, pieces: Sequence[Piece], planner: Planner, merging: Merging | None
) -> tuple[Plan, Merged | None]:
    """Returns the plan of a step over `pieces`, and the documents that they were merged to, if so.
    Raises PlanError."""
    merged = None if merging is None else merging(store, pieces)
    lengths = [piece.length for piece in pieces] if merged is None else merged.lengths
    options: dict[str, Any] = {} if merged is None else {"trees": merged.trees}
    plan = planner(lengths, **options)
    if list(plan.lengths) != lengths:
        raise PlanError(
            "the planner returned a plan for other lengths than those of the step's documents"
        )
    return plan, merged


def read_step(
    store: Store,
    pieces: Sequence[Piece],
    plan: Plan,
    rank: int,
    step: int = 1,
    pad_to_multiple_of: int = 1,
    merged: Merged | None = None,
) -> StepBatch:
    """Reads a rank's share of a step over `pieces`, by what `plan_step` returns for them."""
    targets = [store.target_tokens(piece.document, piece.start, piece.stop) for piece in pieces]
    weights = [store.weight(piece.document) for piece in pieces]
    amounts: Sequence[float] = targets
    if store.weighted:
        amounts = [
            weigh_targets(store, piece, count) for piece, count in zip(pieces, targets, strict=True)
        ]
    names: Sequence[str] = Names(store, pieces)
    if merged is None:
        store.fetch(pieces[number].document for number in _held(plan, rank))
        options: dict[str, Any] = {
            "pad_to_multiple_of": pad_to_multiple_of,
            "weighted": store.weighted,
        }
        numbers = range(len(plan.micro_batches))
        micro_batches = [
            pack(store, pieces, plan.layout(number, rank), **options) for number in numbers
        ]
    else:
        micro_batches = merged.micro_batches(plan, rank, pad_to_multiple_of)
        amounts = merged.amounts_of(amounts)
        names = names_of_merged(names, merged)
    return StepBatch(
        step=step,
        plan=plan,
        documents=names,
        tokens=sum(piece.length for piece in pieces),
        target_tokens=sum(targets),
        micro_batches=tuple(micro_batches),
        weights=() if set(weights) <= {1.0} else tuple(weights),
        target_weight=sum(weight * count for weight, count in zip(weights, amounts, strict=True)),
        source_tokens=store.tokens_by_source(
            [piece.document for piece in pieces], [piece.length for piece in pieces]
        ),
        rows=() if merged is None else merged.rows,
    )


def weigh_targets(store: Store, piece: Piece, count: int) -> float:
    """Returns the sum of the weights of the `count` targets of a piece, without the weight of its
    document."""
    weights = store.token_weights(piece.document, piece.start, piece.stop)
    if weights is None:
        return count
    return float(weights[1:].sum(dtype=np.float64))


def names_of_merged(names: Sequence[str], merged: Merged) -> list[str]:
    """Returns the names of merged documents, each by its first sequence."""
    together: list[list[str]] = [[] for _ in merged.tokens]
    for name, (document, _) in zip(names, merged.rows, strict=True):
        together[document].append(name)
    return [
        first + f" and {len(others)} that begin alike" * bool(others) for first, *others in together
    ]


def _held(plan: Plan, rank: int) -> list[int]:
    """Returns the documents of a step of which a rank holds a part."""
    return [
        placement.document
        for micro_batch in plan.micro_batches
        for placement in micro_batch
        if placement.first_rank <= rank < placement.first_rank + placement.degree
    ]


class Names(Sequence[str]):
    """The names of the documents of a step, each read when it is asked for: other ranks hold most
    of them."""

    def __init__(self, store: Store, pieces: Sequence[Piece]) -> None:
        self._store = store
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return Names(self._store, self._pieces[number])
        return _name(self._store, self._pieces[number])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


def _name(store: Store, piece: Piece) -> str:
    name = store.name(piece.document)
    whole = piece.length == store.length(piece.document)
    if whole:
        return name
    return f"{name}[{piece.start}:{piece.stop}]"
