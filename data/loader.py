"""Loader: hands out the batches of one rank, planned and read one step ahead in a background thread.

Every rank runs its own loader over the same store and makes the same plan from the same lengths; nothing is communicated. What
it has handed out is described by step and cursor, the same on every rank and independent of their number.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any

from longctx.data.mixture import make_steps
from longctx.data.packing import StepBatch, pack
from longctx.data.sampler import Piece
from longctx.data.store import Store
from longctx.errors import UserError
from longctx.planning.plan import Plan, PlanError

_WAYS_OUT = {
    "fingerprint": "give the data.store that the run began with, or all of data.stores in their order, or begin a new run",
    "mix": "give the weights or epochs of data.stores that the run began with",
    "seed": "set train.seed to the run's",
    "max_length": "set data.max_length to the run's (left to itself, it follows ranks and batch.tokens_per_rank)",
    "long_documents": "set data.long_documents to the run's",
    "held_out": "set data.held_out to the run's",
}
"""What must be as it was for the cursor to mean the same documents, and what to do when it is not."""


Planner = Callable[[Sequence[int]], Plan]
"""Makes the plan of a step from the lengths of its documents."""


class LoaderError(UserError):
    """A saved state that does not belong to this loader."""


class Loader(Iterator[StepBatch]):
    """An endless iterator over the steps of one rank.

    Args:
        store: the documents, of one store or several.
        rank, ranks: this rank and N, of the domain.
        planner: makes the plan of a step from the lengths of its documents; runs in the background thread.
        global_tokens: tokens of a step, at least.
        seed, max_length, long_documents: see `Sampler`, which may raise SamplerError here.
        held_out_share: share of the documents that no step takes; see `held_out`.
        pad_to_multiple_of: every micro-batch is padded to a multiple of so many tokens.

    What goes wrong while a step is prepared (PlanError, OSError, ..) is raised by the `next` that would have returned it.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        ranks: int,
        planner: Planner,
        global_tokens: int,
        seed: int,
        max_length: int,
        long_documents: str = "split",
        held_out_share: float = 0.0,
        pad_to_multiple_of: int = 1,
    ) -> None:
        self.sampler = make_steps(
            store,
            global_tokens=global_tokens,
            seed=seed,
            max_length=max_length,
            long_documents=long_documents,
            held_out_share=held_out_share,
        )
        self._identity = {
            **_which(store),
            "seed": seed,
            "max_length": max_length,
            "long_documents": long_documents,
            "held_out": held_out_share,
        }
        self._earlier: dict[str, dict[str, Any]] = {}  # how far stores came in earlier stages that this one may not have
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self.planner = planner
        """Plans the steps that are prepared from now on: after step n was handed out, those from n + 2 on."""
        self._pad_to_multiple_of = pad_to_multiple_of
        self._step = 0  # handed out last
        self._cursor = self.sampler.start  # behind it
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

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last step handed out, as plain JSON data; the same on every rank."""
        earlier = {"earlier": self._earlier} if self._earlier else {}
        return {**self._identity, "step": self._step, **self.sampler.state(self._cursor), **earlier}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a saved position, which may come from another number of ranks or another `global_tokens`.

        Raises LoaderError, naming all that differs, if the cursor would mean other documents here.
        """
        state = self._checked(state, self._identity)
        self._discard()
        self._step, self._cursor = int(state["step"]), self.sampler.cursor(state)
        self._earlier = state.get("earlier", {})

    def begin_stage(self, state: dict[str, Any]) -> None:
        """Goes behind a saved position of the stage before, in which other documents may have been taken.

        A store of which the same pieces are taken, alone or in a mix as it was then, goes on in its order. Another one that had
        been read before begins its next epoch, so that it does not begin with the documents that it began with then.
        Raises LoaderError if what is the same in all stages is not.
        """
        state = self._checked(state, ("seed", "held_out"))
        seen = {**state.get("earlier", {}), **_how_far(state)}
        here = _how_far(self.state_dict())
        places = [(seen.get(fingerprint), cut) for fingerprint, cut in here.items()]
        cursors = [found["cursor"] if found and found["cut"] == mine["cut"] else None for found, mine in places]
        epochs = [found["epoch"] + 1 if found else 0 for found, _ in places]
        self._discard()
        self._step, self._cursor = int(state["step"]), self.sampler.behind(cursors, epochs)
        self._earlier = {fingerprint: found for fingerprint, found in seen.items() if fingerprint not in here}

    def _checked(self, state: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
        """A saved state, if these keys have the values that they have here, with what it need not say. Raises LoaderError."""
        state = {"held_out": 0.0, "longest": None, "mix": None, **state}  # which earlier versions, or single stores, lack
        missing = [key for key in (*self._identity, "step", "cursor") if key not in state]
        if missing:
            raise LoaderError(f"the saved state of the data lacks {', '.join(missing)}: it is not of this version of longctx")
        problems = [
            f"{key} is {self._identity[key]!r}, and was {state[key]!r}: {_WAYS_OUT[key]}"
            for key in keys
            if state[key] != self._identity[key]
        ]
        if problems:
            raise LoaderError("the data would not go on where it stopped: " + "; ".join(problems))
        return state

    def coming(self, last_step: int) -> Iterator[Piece]:
        """The pieces of the steps up to `last_step` that have not been handed out."""
        cursor = self._cursor
        for _ in range(self._step, last_step):
            pieces, cursor = self.sampler.step(cursor)
            yield from pieces

    def close(self) -> None:
        """Ends the background thread, after the step that it is preparing."""
        self._discard()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _discard(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    def _submit(self) -> Future[tuple[StepBatch, Any]]:
        # The planner is taken here and not in the thread: which steps a new one plans must not depend on timing.
        return self._thread.submit(self._prepare, self._step + 1, self._cursor, self.planner)

    def _prepare(self, step: int, cursor: Any, planner: Planner) -> tuple[StepBatch, Any]:
        """The step that begins at `cursor`, and the cursor behind it."""
        pieces, next_cursor = self.sampler.step(cursor)
        plan = planner([piece.length for piece in pieces])
        self._check(plan, pieces)
        return read_step(self._store, pieces, plan, self._rank, step, self._pad_to_multiple_of), next_cursor

    def _check(self, plan: Plan, pieces: Sequence[Piece]) -> None:
        if plan.ranks != self._ranks:
            raise PlanError(f"the planner planned for {plan.ranks} ranks, and the domain has {self._ranks}")
        if list(plan.lengths) != [piece.length for piece in pieces]:
            raise PlanError("the planner planned other lengths than those of the step's documents")


def _which(store: Store) -> dict[str, Any]:
    """What says which documents there are, and in which mix."""
    if len(store.sources) == 1:
        return {"fingerprint": store.fingerprint}
    return {
        "fingerprint": [source.fingerprint for source in store.sources],
        "mix": [{source.unit: source.amount} for source in store.sources],
    }


def _how_far(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """How far each store came, and what its cursor counts, by the fingerprint of the store."""
    several = isinstance(state["fingerprint"], list)
    columns = [state[key] if several else [state[key]] for key in ("fingerprint", "cursor", "epoch", "longest")]
    return {
        fingerprint: {"cut": [longest, state["long_documents"], several], "cursor": cursor, "epoch": epoch}
        for fingerprint, cursor, epoch, longest in zip(*columns, strict=True)
    }


def read_step(
    store: Store, pieces: Sequence[Piece], plan: Plan, rank: int, step: int = 1, pad_to_multiple_of: int = 1
) -> StepBatch:
    """A rank's share of a step over these pieces, by a plan that was made from their lengths."""
    targets = [store.target_tokens(piece.document, piece.start, piece.stop) for piece in pieces]
    weights = [float(store.weights[piece.document]) for piece in pieces]
    return StepBatch(
        step=step,
        plan=plan,
        documents=tuple(_name(store, piece) for piece in pieces),
        tokens=sum(piece.length for piece in pieces),
        target_tokens=sum(targets),
        micro_batches=tuple(
            pack(store, pieces, plan.layout(index, rank), pad_to_multiple_of=pad_to_multiple_of)
            for index in range(len(plan.micro_batches))
        ),
        weights=() if set(weights) <= {1.0} else tuple(weights),
        target_weight=sum(weight * count for weight, count in zip(weights, targets, strict=True)),
        store_documents=tuple(piece.document for piece in pieces),
        source_tokens=store.tokens_by_source([piece.document for piece in pieces], [piece.length for piece in pieces]),
    )


def _name(store: Store, piece: Piece) -> str:
    name = store.name(piece.document)
    whole = piece.length == store.lengths[piece.document]
    return name if whole else f"{name}[{piece.start}:{piece.stop}]"
