"""The native decoder with weights from a checkpoint of transformers, read parameter by
parameter."""

from collections.abc import Collection, Sequence
from functools import cached_property

import torch

from longctx.model.checkpoint_files import CheckpointFiles, PretrainedError
from longctx.model.decoder import Decoder
from longctx.model.families import family_of
from longctx.model.protocol import Model
from longctx.planning.cost.spec import ModelSpec

BUFFER = "rotary_emb.inv_freq"
"""End of the names of tensors in checkpoints that a model computes itself."""


class NativeSource:
    """A checkpoint, run by the native decoder. Raises NoNativeModel if the native decoder cannot
    run it."""

    unused: Sequence[str] = ()
    """Always empty: a checkpoint with unused tensors is refused (see `sizes`)."""

    def __init__(self, files: CheckpointFiles, description: str = "") -> None:
        self.files = files
        self.description = description
        self.family = family_of(files.config)
        self.shape = self.family.shape(files.config)
        self.embedding = self.family.parts("embed_tokens.weight")[0]

    @property
    def spec(self) -> ModelSpec:
        return self.shape.spec

    def check_length(self, longest: int) -> None:
        """RoPE supports any length; one that depends on lengths is refused anyway."""

    def build(self, layers: Collection[int] | None = None) -> Model:
        return PretrainedDecoder(self, layers)

    @cached_property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter of the whole model. Raises PretrainedError if the checkpoint has
        other tensors."""
        with torch.device("meta"):
            sizes = {
                name: tuple(weight.shape) for name, weight in Decoder(self.shape).named_parameters()
            }
        known = {self._stored(theirs) for name in sizes for theirs in self._theirs(name)}
        known |= {"lm_head.weight"} if self.shape.tie_word_embeddings else set()
        others = [
            name for name in self.files.files if name not in known and not name.endswith(BUFFER)
        ]
        if others:
            raise PretrainedError(
                f"{self.files.folder} has "
                f"{', '.join(others[:3])}{' and more' * (len(others) > 3)}, which "
                f"{self.family.architecture} does not use: give a checkpoint of that model alone"
            )
        return sizes

    def read(self, name: str) -> torch.Tensor:
        """Reads a parameter to the CPU, in the checkpoint's dtype. Raises PretrainedError if it is
        missing or does not fit."""
        if pieces := self.family.pieces(name, self.shape.num_experts):
            whole, *others = self.sizes[name]
            return torch.cat(
                [self._read(piece, (whole // len(pieces), *others)) for piece in pieces]
            )
        theirs, parts = self.family.parts(name)
        rows = [self.sizes[part][0] for part in parts]
        start = sum(rows[: parts.index(name)])
        part = slice(start, start + self.sizes[name][0]) if len(parts) > 1 else None
        return self._read(theirs, (sum(rows), *self.sizes[name][1:]), part)

    def _theirs(self, name: str) -> list[str]:
        """Returns the checkpoint's tensors that contain a parameter."""
        return self.family.pieces(name, self.shape.num_experts) or [self.family.parts(name)[0]]

    def _read(self, theirs: str, shape: tuple[int, ...], rows: slice | None = None) -> torch.Tensor:
        """Reads a tensor, or some of its rows; the whole must have the shape `shape`."""
        stored = self._stored(theirs)
        if (
            stored not in self.files.files
            and theirs == self.embedding
            and self.shape.tie_word_embeddings
        ):
            stored = "lm_head.weight"  # tied: both are the same
        if stored not in self.files.files:
            raise PretrainedError(
                f"{self.files.folder} lacks {theirs}: give a checkpoint of the whole language model"
            )
        if (actual := self.files.shape(stored)) != shape:
            raise PretrainedError(
                f"{self.files.folder} does not fit its config.json: {stored} has shape {actual}, "
                f"not {shape}; give the config that the weights were saved with"
            )
        return self.files.read(stored, rows)

    def _stored(self, theirs: str) -> str:
        """Returns the name in the files: a base model saved alone lacks the first part."""
        bare = theirs.removeprefix("model.")
        if theirs not in self.files.files and bare in self.files.files:
            return bare
        return theirs


class PretrainedDecoder(Decoder):
    """A native decoder with initial values from a checkpoint."""

    def __init__(self, source: NativeSource, layers: Collection[int] | None = None) -> None:
        super().__init__(source.shape, layers)
        self.source = source
        self.files = source.files
        vars(self)["family"] = source.family

    def initial_value(self, name: str, parameter: torch.Tensor, seed: int) -> torch.Tensor:
        """Reads the value from the checkpoint. Raises PretrainedError if it is missing, or has
        another shape."""
        return self.source.read(name).to(device=parameter.device, dtype=parameter.dtype)
