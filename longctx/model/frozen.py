"""Frozen parameters: those whose names match a pattern of `train.freeze` keep their initial values."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch

from longctx.model.experts import Experts, stacks_experts
from longctx.model.options import FreezeError
from longctx.planning.cost.spec import LayerSpec, ModelSpec

if TYPE_CHECKING:
    from longctx.model.checkpoint_files import CheckpointFiles
    from longctx.model.protocol import Model
    from longctx.model.source import ModelSource


@dataclass(frozen=True, eq=False)
class PartlyFrozen:
    """The model of a `source`, of which parameters whose names match one of the `patterns` are not trained."""

    source: "ModelSource"
    patterns: tuple[str, ...]
    known: bool = True
    """Whether the number of entries of the vocabulary is that of the run."""

    @property
    def said(self) -> str:
        return self.source.said

    @property
    def files(self) -> "CheckpointFiles | None":
        return self.source.files

    @property
    def unused(self) -> Sequence[str]:
        return self.source.unused

    def check_length(self, longest: int) -> None:
        self.source.check_length(longest)

    def build(self, layers: Collection[int] | None = None) -> "Model":
        model = self.source.build(layers)
        model.spec = self.spec
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not self._matches(name))
        return model

    def _matches(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.patterns)

    @cached_property
    def spec(self) -> ModelSpec:
        """Sizes of the model. Raises FreezeError for a pattern that is none or matches nothing, and if nothing is trained."""
        with torch.device("meta"):
            model = self.source.build()
        names = [name for name, _ in model.named_parameters()]
        for pattern in self.patterns:
            try:
                matched = any(re.search(pattern, name) for name in names)
            except re.error as error:
                raise FreezeError(f"{pattern} is not a regular expression: {error}") from error
            if not matched:
                raise FreezeError(f"{pattern} matches no parameter: names are such as {', '.join((*names[:3], names[-1]))}")
        frozen = {parameter for name, parameter in model.named_parameters() if self._matches(name)}
        if len(frozen) == len(names):
            raise FreezeError(f"{', '.join(self.patterns)}: all parameters match, so that nothing is trained")
        in_blocks = set(model.layers.parameters())
        outside = [parameter for parameter in model.parameters() if parameter not in in_blocks]
        entries = [parameter for parameter in outside if parameter.dim() == 2 and len(parameter) == model.spec.vocab_size]
        entries = entries[-1 if model.spec.tie_word_embeddings else -2 :]  # not the embedding of an encoder
        blocks = zip(model.spec.layers, model.layers, strict=True)
        return replace(
            model.spec,
            vocab_size=model.spec.vocab_size if self.known else None,
            layers=tuple(_partly_frozen_layer(layer, block, frozen) for layer, block in blocks),
            frozen_embedding=entries[0] in frozen,
            frozen_head=entries[-1] in frozen,
            frozen_outside=sum(parameter.numel() for parameter in outside if parameter in frozen),
        )


def _partly_frozen_layer(layer: LayerSpec, block: torch.nn.Module, frozen: Collection[torch.Tensor]) -> LayerSpec:
    experts = {weight for module in block.modules() if isinstance(module, Experts) for weight in module.parameters()}
    experts |= set(filter(stacks_experts, block.parameters()))
    held = sum(weight.numel() for weight in experts)
    of_experts = sum(weight.numel() for weight in experts if weight in frozen)
    matrices = sum(weight.numel() for weight in block.parameters() if weight.dim() > 1 and weight in frozen)
    everything = sum(weight.numel() for weight in block.parameters() if weight in frozen)
    idle = layer.idle_parameters * of_experts // (held or 1)
    return replace(layer, frozen_matrices=matrices, frozen_idle=idle, frozen_others=everything - matrices)


@cache
def partly_frozen(source: "ModelSource", patterns: tuple[str, ...], known: bool) -> PartlyFrozen:
    """Returns the source of a model of which parameters whose names match one of the `patterns` are not trained."""
    return PartlyFrozen(source, patterns, known)
