"""Trains any causal language model of transformers: its own code between our data, attention and
loss.

Transformers' own forward runs. Attention is replaced through transformers' interface
(`longctx.hf.attention`), weights are read from the checkpoint's files block by block, and the loss
takes the hidden states in chunks. Before the first step, a run of the model on a few tokens checks
that packing and splitting documents does not change its results.
"""

import json
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from longctx.errors import brief
from longctx.hf.attention import Rings, replace_attention, row
from longctx.hf.conversion import Conversion
from longctx.hf.exactness import Alone, HuggingFaceError, Kind, check_length, check_packed
from longctx.hf.spec import spec_of
from longctx.hf.vision import blocks_outside, class_of, text_model, weights_of_images
from longctx.model.balance import RowDocuments
from longctx.model.checkpoint_files import CheckpointFiles, PretrainedError
from longctx.model.protocol import Head, MakeAttention, Model
from longctx.planning.cost.spec import ModelSpec

OURS = "hf."
"""Prefix of the parameters of the model of transformers in `TransformersModel`."""
PROBED = 16
"""Tokens on which the head is compared with transformers' forward."""
ENCODERS = (
    "; encoders are trained on masked tokens inside transformers.Trainer, by "
    "dynamic_context_parallel (docs/trainers.md)"
)
"""End of a sentence on an encoder."""


@dataclass(frozen=True, eq=False)
class TransformersSource:
    """A checkpoint, run by transformers' own code."""

    files: CheckpointFiles
    description: str = ""

    @cached_property
    def _without_values(self) -> "TransformersModel":
        with torch.device("meta"):
            return self.make()

    def make(self) -> "TransformersModel":
        """Builds the model on torch's default device."""
        return TransformersModel(self.files)

    @property
    def spec(self) -> ModelSpec:
        return self._without_values.spec

    @property
    def unused(self) -> list[str]:
        """Unused tensors of the checkpoint, without those that are computed from the config."""
        return [
            name
            for name in self._without_values.conversion.unused
            if not name.endswith("rotary_emb.inv_freq")
        ]

    def check_length(self, longest: int) -> None:
        hf = self._without_values.hf
        config = hf.config.get_text_config()
        check_length(config, longest)
        limit = getattr(config, "max_position_embeddings", None) or 0
        found = text_model(hf)
        places = [
            module.num_embeddings
            for module in (hf if found is None else found[1]).modules()
            if isinstance(module, nn.Embedding) and module is not hf.get_input_embeddings()
        ]
        if longest > limit > 0 and any(count >= limit for count in places):
            raise PretrainedError(
                f"documents have up to {longest:,} tokens, but {type(hf).__name__} has only "
                f"{limit:,} position embeddings: set data.max_length to {limit} or less"
            )

    def build(self, layers: Collection[int] | None = None) -> Model:
        if layers is not None and len(layers) < len(self.spec.layers):
            raise PretrainedError(
                "transformers' own code cannot run a part of a model: a pipeline needs "
                "model.implementation native"
            )
        return self.make()


class TransformersModel(Model):
    """A model of transformers, `hf`, with the interface of `Model`.

    Always in evaluation mode: dropout would depend on how documents are split.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        """Builds the model on torch's default device. Raises HuggingFaceError or PretrainedError if
        it cannot be trained."""
        super().__init__()
        self.files: CheckpointFiles = files
        self.hf = _build(files)
        with torch.device("meta"):
            twin = _build(files)
        self.conversion = Conversion(twin, files)
        replace_attention(self.hf)
        self.hf.eval()
        # Not registered as a submodule: its parameters would have two names.
        vars(self)["layers"] = self.hf.get_submodule(block_name(self.hf))
        self.spec = spec_of(self.hf, self.layers)
        if outside := weights_of_images(self.hf):
            self.tower = blocks_outside(self.hf)
            self.spec = replace(
                self.spec, tower_parameters=sum(weight.numel() for weight in outside)
            )
        self.plain_head = False
        """Whether logits are just hidden states times the output weight."""
        self.kinds: frozenset[Kind] = frozenset()
        self._device = torch.device("cpu")

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        attention: Any,
        head: Head | None = None,
        documents: RowDocuments | None = None,
    ) -> torch.Tensor:
        """As `Model.forward`; without a `head`, returns logits [tokens, vocab] by transformers' own
        forward."""
        arguments = {"input_ids": row(tokens), "use_cache": False, "ring_attention": attention}
        arguments |= {} if positions is None else {"position_ids": row(positions)}
        if head is None:
            logits: torch.Tensor = self.hf(**arguments).logits[0, : len(tokens)]
            return logits
        hidden = self.hf.base_model(**arguments)[0][0, : len(tokens)]
        return head(
            hidden, self.hf.get_output_embeddings().weight if self.plain_head else self.logits
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits [tokens, vocab] of hidden states [tokens, hidden], by transformers'
        forward without the blocks."""
        prefix = self.hf.base_model_prefix
        base = self.hf.base_model
        self.hf._modules[prefix] = _Given(hidden[None], base)
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            logits: torch.Tensor = self.hf(input_ids=ids, use_cache=False).logits[0]
            return logits
        finally:
            self.hf._modules[prefix] = base

    def attention(self, make: MakeAttention) -> Rings:
        """As `Model.attention`, for each kind of layer; made before the layers run, as
        torch.compile would trace it."""
        return Rings(
            lambda scale, softcap, window, _: make(scale, softcap, window), self.kinds, self._device
        )

    def initial_value(self, name: str, parameter: torch.Tensor, seed: int) -> torch.Tensor:
        """Reads the value from the checkpoint."""
        return self.conversion.read(name.removeprefix(OURS)).to(
            device=parameter.device, dtype=parameter.dtype
        )

    @torch.no_grad()
    def finish(self, device: torch.device, dtype: torch.dtype) -> None:
        """Sets buffers, and checks that packing and splitting documents does not change results.
        All ranks must call it.

        Raises HuggingFaceError naming the reason if results change.
        """
        self._fill_buffers(device)
        self._device = device
        # Compiling for these calls too would exceed the recompilation limit.
        with torch.compiler.set_stance("force_eager"):
            self.kinds = check_packed(self.hf, self._as_transformers, dtype)
            self._choose_head(dtype)

    def _fill_buffers(self, device: torch.device) -> None:
        """Reads persistent buffers from the checkpoint; transformers computes the others, if all
        else is marked initialized."""
        saved = self.hf.state_dict()
        for name, buffer in self.hf.named_buffers():
            if name in saved:
                buffer.copy_(self.conversion.read(name))
                buffer._is_hf_initialized = True
        for parameter in self.hf.parameters():
            parameter._is_hf_initialized = True
        for module in self.hf.modules():
            own = list(module.parameters(recurse=False))
            own += module.buffers(recurse=False)
            if own and all(hasattr(tensor, "_is_hf_initialized") for tensor in own):
                # Some compute first values of shards, in ways that torch does not know.
                module._is_hf_initialized = True
        self.hf._initialize_missing_keys(False)

    def _as_transformers(
        self,
        input_ids: torch.Tensor,
        use_cache: bool,
        ring_attention: Any,
        position_ids: torch.Tensor | None = None,
    ) -> Any:
        """Calls this model with the signature of transformers, through the forward that gathers
        sharded weights."""
        positions = None if position_ids is None else position_ids[0]
        return SimpleNamespace(logits=self(input_ids[0], positions, ring_attention)[None])

    def _choose_head(self, dtype: torch.dtype) -> None:
        """Sets `plain_head` if logits are, bit by bit, hidden states times a matrix; else
        transformers' forward computes them.

        Raises HuggingFaceError if transformers' forward needs more than the last hidden states.
        """
        name = type(self.hf).__name__
        plain = []

        def compare(hidden: torch.Tensor, logits: Any) -> torch.Tensor:
            weight = getattr(self.hf.get_output_embeddings(), "weight", None)
            larger = 16 * hidden  # large enough for bounds and scales to show
            plain.append(
                weight is not None and torch.equal(F.linear(larger, weight), logits(larger))
            )
            return logits(hidden)  # type: ignore[no-any-return]

        self.plain_head = False
        places = torch.arange(PROBED, device=self._device)
        tokens = places % self.hf.get_input_embeddings().num_embeddings
        alone = Alone()
        theirs = self(tokens, places, alone)
        ours = self(tokens, places, alone, compare)
        if not torch.allclose(
            theirs.float(), ours.float(), rtol=1e-3 if dtype == torch.float32 else 0.1, atol=1e-3
        ):
            raise HuggingFaceError(
                f"{name} computes its logits from more than the last hidden states, so its loss "
                "cannot be computed in chunks: it cannot be trained here"
            )
        self.plain_head = all(plain)

    @property
    def architecture(self) -> str:
        return type(self.hf).__name__

    def groups(self) -> list[list[str]]:
        return [[OURS + name for name in group] for group in self.conversion.groups()]

    def to_checkpoint(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.conversion.tensors(
            {name.removeprefix(OURS): weight for name, weight in weights.items()}
        )

    def describe(self) -> dict[str, Any]:
        return {"transformers": json.loads(self.hf.config.to_json_string(use_diff=False))}

    def differences(self, described: Mapping[str, Any]) -> list[str]:
        ours = self.describe()["transformers"]
        theirs = described.get("transformers")
        if theirs is None:
            return [
                "it was trained by the native decoder, not by transformers' own code (see "
                "model.implementation)"
            ]
        if "lora" in described:
            return [f"it has LoRA adapters: set lora.rank to {described['lora']['rank']}"]
        ours = _flat(ours)
        theirs = _flat(theirs)
        ignored = {"transformers_version", "_name_or_path"}
        return [
            f"{key} is {ours.get(key)!r}, was {theirs.get(key)!r}"
            for key in sorted({*ours, *theirs} - ignored)
            if ours.get(key) != theirs.get(key)
        ]


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a described config, those of its text model by their own names where
    the config has none."""
    text = config.get("text_config") or {}
    of_text = {f"text_config.{key}" if key in config else key: value for key, value in text.items()}
    return {key: value for key, value in config.items() if key != "text_config"} | of_text


class _Given(nn.Module):
    """Replaces the base model and returns given hidden states."""

    def __init__(self, hidden: torch.Tensor, base: Any) -> None:
        super().__init__()
        self.out = _Out(hidden)
        # Some forwards read numbers of their base model, such as Falcon-H1's multiplier of logits.
        vars(self).update(
            {name: value for name, value in vars(base).items() if isinstance(value, float)}
        )

    def forward(self, *_: Any, **__: Any) -> "_Out":
        return self.out

    def __getattr__(self, name: str) -> Any:
        """Returns itself as `decoder`, since some forwards call this part of their base model."""
        if name == "decoder":
            return self
        return super().__getattr__(name)


class _Out:
    """Output of a base model as needed for logits: hidden states [1, tokens, hidden], and None for
    everything else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


def open_checkpoint(source: str, rope: tuple[tuple[str, Any], ...] = ()) -> CheckpointFiles:
    """Opens a checkpoint (see `CheckpointFiles`); weights that its config ties and its files tell
    apart are not tied.

    Transformers decides the same for every pair of tied weights. Raises PretrainedError if only
    some pairs differ.
    """
    files = replace(CheckpointFiles.open(source), rope=rope)
    ties = any(
        getattr(config, "tie_word_embeddings", False)
        for config in (files.config, files.config.get_text_config())
    )
    if not ties or not files.has_values:
        return files
    try:
        with torch.device("meta"):
            conversion = Conversion(_build(files), files)
    except PretrainedError:  # whoever builds the model raises it
        return files
    different = conversion.different()
    if different and different != list(conversion.tied):
        raise PretrainedError(
            f"{files.folder} ties {', '.join(conversion.tied)} to other weights, but has other "
            f"values for only some ({', '.join(different)}): save the model again with all of "
            "them tied, or with tie_word_embeddings false"
        )
    return replace(files, untied=bool(different))


def with_entries(files: CheckpointFiles, entries: int) -> CheckpointFiles:
    """Returns the checkpoint with entries added to its vocabulary until there are `entries`; as it
    is if it has as many."""
    added = entries - int(files.config.get_text_config().vocab_size)
    if added <= 0:
        return files
    with torch.device("meta"):
        twin = _build(files)
    ends = [
        module
        for module in (twin.get_input_embeddings(), twin.get_output_embeddings())
        if module is not None
    ]
    names = [name for name, module in twin.named_modules() if any(module is end for end in ends)]
    sources = Conversion(twin, files).sources
    return replace(
        files,
        added=added,
        vocabulary=frozenset(stored for name in names for stored in sources.get(name, [])),
    )


def _build(files: CheckpointFiles) -> Any:
    """Builds a checkpoint's model in float32, on torch's default device. Raises PretrainedError if
    it cannot be trained."""
    config = deepcopy(files.config)
    if getattr(config, "quantization_config", None) is not None:
        raise PretrainedError(
            f"{files.folder} has quantized weights, which cannot be trained: load, dequantize() "
            "and save it with transformers"
        )
    if getattr(config.get_text_config(), "zero_expert_num", 0):
        raise PretrainedError(
            f"{files.folder} has experts without parameters: on a rank whose tokens use only "
            "these, other experts have no gradient, which FSDP2 cannot reduce; it cannot be "
            "trained here"
        )
    try:
        model = _class_of(config).from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, ImportError, NotImplementedError) as error:
        raise PretrainedError(
            f"transformers cannot build a causal language model from {files.folder}: "
            f"{brief(error)}{_elsewhere(config)}"
        ) from error
    if {getattr(module, "is_causal", None) for module in model.modules()} - {None} == {False}:
        raise PretrainedError(
            f"{type(model).__name__} is an encoder, whose tokens see later ones{ENCODERS}"
        )
    if model.base_model is model:
        raise PretrainedError(
            f"{type(model).__name__} has no base model that returns hidden states: it cannot be "
            "trained here"
        )
    return model


def _class_of(config: Any) -> Any:
    """Returns the class of transformers that builds the model of a checkpoint."""
    import transformers

    return getattr(transformers, class_of(config.model_type))


def _elsewhere(config: Any) -> str:
    """Returns the end of a sentence on a model of another kind: where that is trained."""
    from transformers.models.auto import modeling_auto

    if config.model_type in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return (
            "; encoder-decoders are trained inside Seq2SeqTrainer, by dynamic_context_parallel "
            "(docs/trainers.md)"
        )
    if config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return ENCODERS
    return ""


def block_name(hf: Any) -> str:
    """Returns the name of the list of blocks: as many as the config has layers, if possible of a
    class that is never split.

    If no list has that length, the one with the most parameters.
    """
    count = hf.config.get_text_config().num_hidden_layers
    whole = set(hf._no_split_modules or ())
    lists: dict[str, nn.ModuleList] = {
        name: module
        for name, module in hf.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    if (found := text_model(hf)) is not None:
        lists = {name: module for name, module in lists.items() if name.startswith(f"{found[0]}.")}
    known = {
        name: blocks
        for name, blocks in lists.items()
        if all(type(block).__name__ in whole for block in blocks)
    }
    for name, blocks in [*known.items(), *lists.items()]:
        if len(blocks) == count:
            return name
    if not lists:
        raise PretrainedError(
            f"{type(hf).__name__} has no list of blocks that could be sharded: it cannot be "
            "trained here"
        )
    return max(
        known or lists, key=lambda name: sum(weight.numel() for weight in lists[name].parameters())
    )
