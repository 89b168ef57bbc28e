"""Conversion between a checkpoint's tensors and the parameters of a model of transformers, one
block at a time.

Transformers fuses, splits and renames tensors (of experts, for example) while it loads. Here its
own conversion runs on the tensors of one block and a twin of the model without values, so that no
process ever holds the whole model.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from longctx.errors import install
from longctx.model.checkpoint_files import CheckpointFiles, PretrainedError

Tensors = dict[str, torch.Tensor]
BLOCK = re.compile(r".+?\.\d+(?=\.)")


class Conversion:
    """Converts a checkpoint's tensors to a model's parameters, and back, by groups: a block, or a
    module outside the blocks."""

    def __init__(self, twin: Any, files: CheckpointFiles) -> None:
        """`twin` is the model on the meta device, not sharded."""
        self.twin = twin
        self.files = files
        with _internals():
            from transformers.conversion_mapping import get_model_conversion_mapping

            self.mapping: list[Any] = get_model_conversion_mapping(twin)
        self.wanted = dict(twin.state_dict())
        self.sources: dict[str, list[str]] = defaultdict(list)
        """Names of the checkpoint's tensors, by group."""
        self.unused: list[str] = []
        """Tensors of the checkpoint that the model does not use."""
        for name in files.files:
            with _internals():
                target = self._target(name)
            if target in self.wanted:
                self.sources[self.group_of(target)].append(name)
            else:
                self.unused.append(name)
        self.tied: dict[str, str] = dict(twin.all_tied_weights_keys)
        self._loaded: tuple[str, Tensors] = ("", {})

    def group_of(self, name: str) -> str:
        """Returns the group of a parameter: the outermost numbered module around it, else its
        module."""
        block = BLOCK.match(name)
        if block:
            return block[0]
        return name.rpartition(".")[0]

    def groups(self) -> list[list[str]]:
        """Returns the names of parameters and buffers by group, in order, tied ones once."""
        names_of: dict[str, list[str]] = defaultdict(list)
        for name in self.wanted:
            if name not in self.tied:
                names_of[self.group_of(name)].append(name)
        return list(names_of.values())

    def read(self, name: str) -> torch.Tensor:
        """Reads a parameter or buffer to the CPU, in the dtype of the twin. Its group is cached for
        the next call.

        Raises PretrainedError if the checkpoint lacks it, or it does not fit.
        """
        for known in (name, *self._same(name)):
            group = self.group_of(known)
            if self._loaded[0] != group:
                self._loaded = group, self._load(group)
            if known in self._loaded[1]:
                return self._loaded[1][known]
        raise PretrainedError(
            f"{self.files.folder} lacks {name} of {type(self.twin).__name__}: give a checkpoint of "
            "the whole language model"
        )

    def different(self) -> list[str]:
        """Returns the tied weights for which the checkpoint has other values than for the weight
        that they are tied to."""
        with _internals():
            stored = {self._target(name) for name in self.files.files}
        pairs = [(name, source) for name, source in self.tied.items() if {name, source} <= stored]
        return [
            name for name, source in pairs if not torch.equal(self.read(name), self.read(source))
        ]

    def tensors(self, weights: Mapping[str, torch.Tensor]) -> Tensors:
        """Converts parameters and buffers of a group to the checkpoint's tensors, as
        save_pretrained writes them."""
        written = {name: weight for name, weight in weights.items() if name not in self.tied}
        with _internals():
            from transformers.core_model_loading import revert_weight_conversion

            self.twin._weight_conversions = [one for one in self.mapping if one.was_used()]
            reverted: Tensors = revert_weight_conversion(self.twin, written)
        return reverted

    def _same(self, name: str) -> Iterator[str]:
        """Yields the other names of a tied weight."""
        source = self.tied.get(name, name)
        yield from (
            other
            for other in (source, *(a for a, b in self.tied.items() if b == source))
            if other != name
        )

    def _target(self, name: str) -> str:
        """Returns the first parameter that uses a tensor of the checkpoint, by transformers' own
        rules."""
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        renamings = [one for one in self.mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in self.mapping if isinstance(one, WeightConverter)]
        prefix = self.twin.base_model_prefix
        target: str = rename_source_key(name, renamings, converters, prefix, self.wanted)[0]
        if target not in self.wanted and name in self.wanted:
            target = rename_source_key(name, [], [], prefix, self.wanted)[0]
        return target

    def _load(self, group: str) -> Tensors:
        tensors = {name: self.files.read(name) for name in self.sources.get(group, [])}
        with _internals(), _quiet():
            from transformers.core_model_loading import convert_and_load_state_dict_in_model
            from transformers.modeling_utils import LoadStateDictConfig

            settings = LoadStateDictConfig(
                dtype=torch.float32, weight_mapping=self.mapping, ignore_mismatched_sizes=True
            )
            report, _ = convert_and_load_state_dict_in_model(self.twin, tensors, settings)
        problems = [f"{name}: {text}" for name, text in report.conversion_errors.items()]
        problems += [
            f"{name} has shape {tuple(has)}, not {tuple(wants)}"
            for name, has, wants in report.mismatched_keys
        ]
        if problems:
            raise PretrainedError(
                f"{self.files.folder} does not fit its config.json: "
                f"{'; '.join(map(_short, problems[:3]))}; give the config that the weights were "
                "saved with"
            )
        loaded: Tensors = {}
        for name in [name for name in self.wanted if self.group_of(name) == group]:
            module_name, _, key = name.rpartition(".")
            module = self.twin.get_submodule(module_name)
            held = module._parameters if key in module._parameters else module._buffers
            if not held[key].is_meta:
                loaded[name] = held[key].detach()
                held[key] = _like(held[key])
        return loaded


def _like(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _short(text: str) -> str:
    return " ".join(text.split())[:200]


@contextmanager
def _internals() -> Iterator[None]:
    """Wraps calls of transformers' internals: raises PretrainedError if another version has changed
    them."""
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        import transformers

        raise PretrainedError(
            f"longctx does not support the way in which transformers {transformers.__version__} "
            f"converts checkpoints ({error}): install a supported version, "
            f"{install('huggingface')}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides transformers' progress bar, which would appear for every block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
