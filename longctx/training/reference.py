"""Reference: log p of the targets of each document by the initial model, for DPO.

One pass without gradients before the first step covers the documents that the run will take. The sums, one per document, are
kept in the run folder. A resumed run, on any number of ranks, reads them and computes missing ones with the initial weights.
"""

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch

from longctx.config import Config
from longctx.data.loader import Planner
from longctx.data.merging import Merging
from longctx.data.sampler import Piece
from longctx.data.store import Store
from longctx.errors import UserError
from longctx.model.protocol import Model
from longctx.parallel.mesh import Mesh
from longctx.training.data import padding
from longctx.training.objectives.loss import log_probabilities
from longctx.training.objectives.objective import document_sums
from longctx.training.optimizer import norm_of, sum_of_squares
from longctx.training.passes import Look
from longctx.training.validation import Documents

FILE = "reference.npz"
"""File of the reference log-probabilities of the documents that the run trains on."""
SAME_WEIGHTS = 1e-9
"""Relative difference of norms that the order of summation explains."""
SAID_EVERY_S, KEPT_EVERY_S = 10.0, 60.0


class ReferenceError(UserError):
    """Raised if a reference belongs to another model, or cannot be computed."""


@dataclass(frozen=True)
class Reference:
    """Reads or computes the reference log-probabilities of a run.

    Attributes:
        model: the initial model.
        weights: parameters of the model that this rank counts.
        look: a pass without gradients.
        planner, merging: those of the run.
        resumes: True requires files in the run folder to belong to this run; otherwise they are used if their weights match.
    """

    config: Config
    mesh: Mesh
    model: Model
    weights: Sequence[torch.Tensor]
    look: Look
    planner: Planner
    resumes: bool
    merging: Merging | None = None

    def of(self, store: Store, pieces: Iterable[Piece], name: str, *, store_may_change: bool = False) -> torch.Tensor:
        """Returns the sums of the documents of `pieces`, float64 [documents of the store]; NaN for other documents.

        The pieces must be whole documents. The sums are kept as `name` in the run folder; with `store_may_change`, those of
        another store are replaced. Collective. Raises ReferenceError.
        """
        needed = np.zeros(len(store), np.bool_)
        needed[[piece.document for piece in pieces]] = True
        path, mesh = self.config.train.run_dir / name, self.mesh
        about = {
            "store": store.fingerprint,
            "dtype": self.config.dtype,
            "model": self.model.describe(),
            "weights": norm_of(mesh.gather([sum_of_squares(self.weights)])),
        }
        files = [path, path.with_name(FILE)][: 1 + self.resumes]  # either has the norm of the initial weights
        kept = mesh.gather_objects(next(filter(None, map(_read, files)), None) if mesh.world_rank == 0 else None)[0]
        sums = np.full(len(store), np.nan)
        if kept is not None:
            same_store = kept[0]["store"] == about["store"]
            complete = same_store and not np.isnan(kept[1][needed]).any()
            problems = self._differences(kept[0], about, weights=not (self.resumes and complete))
            if not same_store and not store_may_change:
                problems.append("it was computed for another store: use the store that the run started with")
            if problems and self.resumes:
                raise ReferenceError(
                    f"{path.parent} has reference log-probabilities of another run: {'; '.join(problems)}; or start a new run"
                )
            if same_store and not problems:
                sums = kept[1]
        missing = np.flatnonzero(needed & np.isnan(sums)).tolist()
        if missing:
            self._compute(store, missing, sums, path, about)
        elif mesh.world_rank == 0:
            print(f"reference log-probabilities of all {int(needed.sum()) // 2:,} pairs read from {path}", flush=True)
        return torch.from_numpy(sums)

    def _compute(
        self, store: Store, missing: Sequence[int], sums: npt.NDArray[np.float64], path: Path, about: dict[str, Any]
    ) -> None:
        """Fills in the missing sums. Writes them every KEPT_EVERY_S seconds, so that an interrupted run can resume the pass."""
        pieces = tuple(Piece(document, 0, int(store.lengths[document])) for document in missing)
        longest = max(piece.length for piece in pieces)
        documents = Documents(
            store, pieces, self.config.batch.global_tokens, padding(self.config), longest, long=0, merging=self.merging
        )
        began = reported = written = time.monotonic()
        done = 0
        for batch in documents.steps(self.planner, self.mesh):
            values = document_sums(batch, self.look(batch, log_probabilities), self.mesh)
            _refuse_non_finite([store.name(document) for document in batch.store_documents], values)
            sums[list(batch.store_documents)] = values.numpy()
            done += batch.sequences
            now, last = time.monotonic(), done == len(pieces)
            if self.mesh.world_rank == 0 and (last or now - reported > SAID_EVERY_S):
                reported, of = now, len(pieces) // 2
                print(f"reference log-probabilities: {done // 2:,} of {of:,} pairs, {now - began:.0f} s", flush=True)
            if self.mesh.world_rank == 0 and (last or now - written > KEPT_EVERY_S):
                written = now
                _write(path, about, sums)

    def _differences(self, kept: dict[str, Any], ours: dict[str, Any], *, weights: bool) -> list[str]:
        """Returns the differences between the run of a kept reference and this run, each with its fix.

        Weights are compared only if sums are missing; otherwise a run may also resume with its export as the initial model.
        """
        problems = self.model.differences(kept["model"])
        if kept["dtype"] != ours["dtype"]:
            problems.append(f"train.dtype is {ours['dtype']}, but was {kept['dtype']}: set it to {kept['dtype']}")
        if weights and not problems and not math.isclose(kept["weights"], ours["weights"], rel_tol=SAME_WEIGHTS):
            problems.append("the initial weights have changed: restore them (model.from_pretrained)")
        return problems


def _refuse_non_finite(names: Sequence[str], sums: torch.Tensor) -> None:
    wrong = [name for name, value in zip(names, sums.tolist(), strict=True) if not math.isfinite(value)]
    if wrong:
        raise ReferenceError(
            f"the initial model has no finite log-probability for documents {', '.join(wrong[:20])}: check the checkpoint and "
            "these documents"
        )


def _read(path: Path) -> tuple[dict[str, Any], npt.NDArray[np.float64]] | None:
    """Returns None if there is no readable file; the reference is computed again then."""
    try:
        with np.load(path) as saved:
            return json.loads(str(saved["about"])), saved["sums"]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


def _write(path: Path, about: dict[str, Any], sums: npt.NDArray[np.float64]) -> None:
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, about=np.array(json.dumps(about)), sums=sums)
    partial.replace(path)
