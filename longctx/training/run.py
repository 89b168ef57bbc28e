"""Run: the settings of a run with everything that they name, opened once on this rank."""

from dataclasses import dataclass
from typing import Any

import torch

from longctx.config import Config
from longctx.hf.source import ModelSource
from longctx.parallel.device import prepare_device
from longctx.parallel.environment import Launch
from longctx.training.data import RunData, with_steps
from longctx.training.optimizer import OPTIMIZERS
from longctx.training.saved.checkpoint import Checkpoint


@dataclass(frozen=True)
class Run:
    """A run as one rank has opened it: no process groups.

    Attributes:
        config: settings, with steps for epochs.
        checkpoint: checkpoint to start from, of this run or of one that this run continues; None
            for the initial weights.
        rewinds: whether `checkpoint` was asked for by its step, so that later ones are set aside.
        traced: steps to trace, counted from 1.
        changes: settings that `train.fit_memory` changed, in words; empty if none.
    """

    config: Config
    launch: Launch
    device: torch.device
    data: RunData
    source: ModelSource
    checkpoint: Checkpoint | None = None
    rewinds: bool = False
    traced: range | None = None
    changes: str = ""

    @classmethod
    def open(cls, config: Config, **others: Any) -> "Run":
        """Prepares the device, and opens the stores and the model's files. Raises UserError if one
        cannot be used."""
        launch = Launch.read()
        device = prepare_device(config.train.device, launch)
        data = RunData.open(config)
        config = with_steps(config, data.store, launch.world_size)
        return cls(
            config,
            launch,
            device=device,
            data=data,
            source=config.model_source(data.vocab_size),
            **others,
        )

    @property
    def resumes(self) -> bool:
        """Whether the checkpoint is one of this run."""
        return self.checkpoint is not None and self.checkpoint.run == self.config.train.run_dir

    @property
    def on_gpu(self) -> bool:
        """Whether this process trains on a GPU."""
        return self.device.type == "cuda"

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint; 0 if none is written."""
        if self.config.checkpoint.every is None:
            return 0
        spec = self.source.spec
        weights = spec.trained_parameters if spec.adapted else spec.parameters
        kind = OPTIMIZERS[self.config.optimizer.name]
        state = kind.state_bytes(spec.trained_parameters, spec.trained_matrices, spec.trained_sizes)
        return torch.float32.itemsize * weights + state
