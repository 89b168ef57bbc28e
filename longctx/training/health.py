"""Health of a run: losses and gradients that are not finite."""

import math
import sys

import torch

from longctx.config import Config
from longctx.data.packing import StepBatch
from longctx.errors import UserError
from longctx.parallel.mesh import Mesh

MOST_SKIPPED = 3
"""Steps in a row that may have no update with `train.on_nonfinite: skip`."""


class NonFiniteLoss(UserError):
    """Raised if loss or gradient is infinite or NaN. The weights of the last checkpoint are
    intact."""


class FiniteLoss:
    """Counts the last steps in a row without an update, because loss or gradient was not finite."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        self.skipped = 0

    def check(self, batch: StepBatch, losses: torch.Tensor, loss: float, grad_norm: float) -> bool:
        """Returns whether loss and gradient of a step are finite; names the documents of the
        affected micro-batches if not.

        Collective if they are not, which all ranks know alike. Raises NonFiniteLoss on every rank
        if the run should stop.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.skipped = 0
            return True
        self.skipped += 1
        affected = {
            batch.documents[shard.document]
            for micro_batch, part in zip(batch.micro_batches, losses, strict=True)
            if not part.isfinite()
            for shard in micro_batch.layout.shards
        }
        gathered = self.mesh.gather_objects(sorted(affected))
        names = sorted({name for names in gathered for name in names}) or sorted(batch.documents)
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        what = f"step {batch.step}: loss is {loss}, gradient norm is {grad_norm}"
        documents = f"Documents in the affected micro-batches: {', '.join(names[:20])}{more}"
        if self.config.train.on_nonfinite == "stop" or self.skipped > MOST_SKIPPED:
            before = f", after {MOST_SKIPPED} skipped steps" if self.skipped > MOST_SKIPPED else ""
            if self.config.checkpoint.every is None:
                intact = ""
            else:
                intact = "; the last checkpoint is intact"
            raise NonFiniteLoss(
                f"{what}{before}{intact}. {documents}. Check these documents, or lower "
                "optimizer.learning_rate"
            )
        if self.mesh.world_rank == 0:
            print(f"longctx train: {what}: no update. {documents}", file=sys.stderr, flush=True)
        return False
