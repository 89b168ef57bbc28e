"""Preference: direct preference optimization (DPO) of pairs of completions, and the reference that it needs.

The loss of a pair is -log σ(β · m), where m is how much more the model has raised log p of the chosen completion than that of
the rejected one, both over the reference: the model as the run began (Rafailov et al., 2023, eq. 7; smoothed as in Mitchell,
2023). With log p of whole documents known from a pass without gradients, the gradient of the loss is that of weighted token
losses, with one weight for all tokens of a document: so pairs are packed and split over ranks as any documents are.

The reference is one such pass before the first step, over just the pairs that the run will take, whatever the model is and
however it is split. A number for each document is kept in the run folder; a run that resumes reads them.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import logsigmoid

from longctx.data.packing import StepBatch
from longctx.data.sampler import Piece
from longctx.data.store import Store
from longctx.errors import UserError
from longctx.training.gradients import norm_over_mesh
from longctx.training.loss import log_probabilities
from longctx.training.objective import Objective, StepWeights, document_sums, documents_of
from longctx.training.setup import padding
from longctx.training.validation import Documents

if TYPE_CHECKING:
    from longctx.training.trainer import Trainer

FILE, FILE_APART = "reference.npz", "reference-eval.npz"
"""Of the documents that are trained on, and of those of `eval.store`."""
SAME_WEIGHTS = 1e-9
"""Relative difference of norms that the order of a sum explains."""
SAID_EVERY_S, KEPT_EVERY_S = 10.0, 60.0


class ReferenceError(UserError):
    """A reference that is another model's, or cannot be computed."""


@dataclass(frozen=True)
class Preference(Objective):
    """DPO: the mean over the pairs of the step, each counted by its weight.

    Attributes:
        beta: β, how closely the model keeps to the reference.
        label_smoothing: ε; the loss of a pair is -(1 - ε) log σ(β · m) - ε log σ(-β · m).
        reference: log p of the targets of each document of the store, float64 [documents]; NaN where it is not known.
    """

    needs_log_probabilities = True

    beta: float
    label_smoothing: float
    reference: torch.Tensor

    def weights(
        self,
        batch: StepBatch,
        log_probabilities: Sequence[torch.Tensor] = (),
        document_sums: torch.Tensor | None = None,
    ) -> StepWeights:
        assert document_sums is not None
        raised = (document_sums - self.reference[list(batch.store_documents)]).view(-1, 2)
        margins = self.beta * (raised[:, 0] - raised[:, 1])
        counts = torch.tensor(batch.weights or [1.0] * len(raised) * 2, dtype=torch.float64).view(-1, 2)[:, 0]
        pairs, smoothing = float(counts.sum()), self.label_smoothing
        losses = -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)
        slopes = self.beta * counts * ((1 - smoothing) * torch.sigmoid(-margins) - smoothing * torch.sigmoid(margins))
        by_document = torch.stack([slopes, -slopes], dim=1).flatten().float()
        return StepWeights(
            divisor=pairs,
            tokens=[by_document[documents_of(micro_batch)] for micro_batch in batch.micro_batches],
            loss=float((counts * losses).sum()) / pairs,
            reported={
                "reward_accuracy": float((counts * (margins > 0)).sum()) / pairs,
                "reward_margin": float((counts * margins).sum()) / pairs,
            },
        )


def prefer(trainer: "Trainer", store: Store, *, resumes: bool) -> tuple[Preference, Preference]:
    """The objectives of the documents that a trainer is to train on and to validate on; all ranks call it.

    The weights must be those that the run begins with, and the loader where it goes on. Raises ReferenceError.
    """
    apart, settings = trainer.documents, trainer.config.dpo
    _say_what_is_left_out(trainer, store)
    wanted = np.zeros(len(store), np.bool_)
    wanted[[piece.document for piece in trainer.loader.coming(trainer.config.train.steps)]] = True
    if apart is not None and apart.store is store:
        wanted[[piece.document for piece in apart.pieces]] = True
    assert settings.beta is not None
    objective = Preference(settings.beta, settings.label_smoothing, _reference(trainer, store, wanted, FILE, resumes))
    if apart is None or apart.store is store:
        return objective, objective
    wanted = np.zeros(len(apart.store), np.bool_)
    wanted[[piece.document for piece in apart.pieces]] = True
    return objective, replace(objective, reference=_reference(trainer, apart.store, wanted, FILE_APART, resumes))


def _say_what_is_left_out(trainer: "Trainer", store: Store) -> None:
    longest = trainer.loader.state_dict()["max_length"]
    left_out = int((store.lengths.reshape(-1, 2).max(axis=1) > longest).sum())
    if left_out and trainer.mesh.world_rank == 0:
        print(
            f"{left_out:,} of {len(store) // 2:,} pairs are left out: a completion with its prompt has over {longest:,} tokens"
        )


def _reference(trainer: "Trainer", store: Store, wanted: npt.NDArray[np.bool_], name: str, resumes: bool) -> torch.Tensor:
    """What is kept in the run folder, and what a pass adds to it, float64 [documents]; NaN where it is neither."""
    path, mesh = trainer.config.train.run_dir / name, trainer.mesh
    about = {
        "store": store.fingerprint,
        "dtype": trainer.config.train.dtype,
        "model": trainer.model.describe(),
        "weights": norm_over_mesh(_weights(trainer), mesh),
    }
    kept = mesh.gather_objects(_read(path) if mesh.world_rank == 0 else None)[0]
    sums = np.full(len(store), np.nan)
    if kept is not None:
        problems = _differences(trainer, kept[0], about)
        if problems and resumes:
            raise ReferenceError(f"{path} is not of this run: {'; '.join(problems)}; or begin a new run")
        sums = sums if problems else kept[1]
    missing = wanted & np.isnan(sums)
    if missing.any():
        _compute(trainer, store, missing, sums, path, about)
    elif mesh.world_rank == 0:
        print(f"reference log-probabilities: those of all {int(wanted.sum()) // 2:,} pairs are in {path}", flush=True)
    return torch.from_numpy(sums)


def _compute(
    trainer: "Trainer",
    store: Store,
    missing: npt.NDArray[np.bool_],
    sums: npt.NDArray[np.float64],
    path: Path,
    about: dict[str, Any],
) -> None:
    """Fills in what is missing. What is done so far is written once a minute, so that a run that is cut off need not do it
    again."""
    config, mesh = trainer.config, trainer.mesh
    began = said = written = time.monotonic()
    places = np.flatnonzero(missing).tolist()
    pieces = tuple(Piece(document, 0, int(store.lengths[document])) for document in places)
    longest = max(piece.length for piece in pieces)
    documents = Documents(store, pieces, config.batch.global_tokens, padding(config), longest, long=0)
    done = 0
    for batch in documents.steps(trainer.loader.planner, mesh):
        found = document_sums(batch, trainer.look(batch, log_probabilities), mesh)
        _refuse_non_finite(batch, found)
        sums[list(batch.store_documents)] = found.numpy()
        done += len(batch.documents)
        now, last = time.monotonic(), done == len(pieces)
        if mesh.world_rank == 0 and (last or now - said > SAID_EVERY_S):
            said = now
            print(f"reference log-probabilities: {done // 2:,} of {len(pieces) // 2:,} pairs, {now - began:.0f} s", flush=True)
        if mesh.world_rank == 0 and (last or now - written > KEPT_EVERY_S):
            written = now
            _write(path, about, sums)
    trainer.after_looking()


def _refuse_non_finite(batch: StepBatch, sums: torch.Tensor) -> None:
    wrong = [name for name, value in zip(batch.documents, sums.tolist(), strict=True) if not math.isfinite(value)]
    if wrong:
        raise ReferenceError(
            f"the model that the run begins with gives no finite log-probability to {', '.join(wrong[:20])}: look at the "
            "checkpoint, or at these documents"
        )


def _weights(trainer: "Trainer") -> list[torch.Tensor]:
    """All weights that this rank holds, without the copy of a tied embedding."""
    copy = trainer.pipeline.tied_copy if trainer.pipeline is not None else None
    return [weight.detach() for weight in trainer.model.parameters() if weight is not copy]


def _differences(trainer: "Trainer", kept: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """What makes a kept reference another run's, and what to do about it."""
    problems = trainer.model.differences(kept["model"])
    if kept["store"] != here["store"]:
        problems.append("it was made with another store: give the one that the run began with")
    if kept["dtype"] != here["dtype"]:
        problems.append(f"train.dtype is {here['dtype']}, and was {kept['dtype']}: set it to the run's")
    if not problems and not math.isclose(kept["weights"], here["weights"], rel_tol=SAME_WEIGHTS):
        problems.append("the weights that the run begins with have changed since: give those of then (model.from_pretrained)")
    return problems


def _read(path: Path) -> tuple[dict[str, Any], npt.NDArray[np.float64]] | None:
    """None if there is nothing that can be read: it is computed anew then."""
    try:
        with np.load(path) as saved:
            return json.loads(str(saved["about"])), saved["sums"]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


def _write(path: Path, about: dict[str, Any], sums: npt.NDArray[np.float64]) -> None:
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, about=np.array(json.dumps(about)), sums=sums)
    partial.replace(path)
