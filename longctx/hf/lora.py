"""LoRA (Hu et al., 2021) by peft: small trained matrices beside the frozen linear layers of a model
of transformers.

A layer computes W x + scale · B A x, where scale is alpha / rank by default; only A [rank, in] and
B [out, rank] are trained. Adapters are added before the model is sharded, and stay float32; frozen
weights are kept in the compute dtype, or quantized (`longctx.hf.quantized`). Trained adapters are
exported as a folder that peft loads, or merged into the weights.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longctx.hf.conversion import Tensors
from longctx.hf.indexed import indexers
from longctx.hf.lora_options import ALL_LINEAR, Lora, LoraError, QuantizationError
from longctx.hf.model import OURS, TransformersModel, TransformersSource
from longctx.hf.quantized import QuantizedLinear, quantize_layers
from longctx.hf.spec import matrix_of
from longctx.hf.vision import text_model, weights_of_images
from longctx.model.checkpoint_files import CheckpointFiles
from longctx.model.protocol import generator_of
from longctx.planning.cost.spec import Matrix, ModelSpec

ADAPTER = "default"
"""Name that peft gives to an adapter by default."""
A = f".lora_A.{ADAPTER}.weight"
B = f".lora_B.{ADAPTER}.weight"
ADAPTERS = (A, B)
BASE = ".base_layer."
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, eq=False, kw_only=True)
class AdaptedSource(TransformersSource):
    """A checkpoint with adapters, run by transformers' own code; frozen weights are kept in
    `dtype`.

    Raises LoraError when it is used, if there is no layer to adapt or a layer cannot have adapters.
    """

    lora: Lora
    dtype: torch.dtype

    def make(self) -> TransformersModel:
        return AdaptedModel(self.files, self.lora, self.dtype)


class AdaptedModel(TransformersModel):
    """A model of transformers in which only adapters are trained.

    Attributes:
        adapted: names in transformers of the layers that have adapters.
        prefixes: names of the weights that have adapters, with the beginnings of the adapters'
            names.
        transposed: beginnings for those weights that are [in, out], as in GPT-2.
        packed: quantized layers by the names of their weights.
    """

    def __init__(self, files: CheckpointFiles, lora: Lora, dtype: torch.dtype) -> None:
        """Builds the model on torch's default device. Raises LoraError if `lora` does not fit the
        model."""
        super().__init__(files)
        twin = self.conversion.twin
        self.lora = lora
        self.dtype = dtype
        self.adapted = find_targets(twin, lora.target_modules)
        self.transposed = frozenset(
            name for name in self.adapted if not isinstance(twin.get_submodule(name), nn.Linear)
        )
        made = _inject(self.hf, self.peft_config())
        self.prefixes = {f"{name}.weight": name for name in self.adapted}
        if different := made ^ set(self.adapted):
            raise LoraError(
                "peft adapts other weights than requested, they differ in "
                f"{', '.join(sorted(different)[:5])}"
            )
        self.actual = {
            plain_name(name): name for name in self.hf.state_dict() if not name.endswith(ADAPTERS)
        }
        self.spec = with_adapters(self.spec, self.layers, self.hf)
        if lora.quantized is not None:
            quantize_layers(self.layers, lora.quantized)
            self.spec = with_quantized(self.spec, self.layers)
        self.packed = {
            f"{name}.weight": layer
            for name, layer in self.named_modules()
            if isinstance(layer, QuantizedLinear)
        }
        if lora.quantized is not None and not self.packed:
            raise QuantizationError(
                f"{type(twin).__name__} has no linear layers of torch in its blocks"
            )
        self.hf.eval()
        for parameter in self.parameters():
            # Adapters stay float32.
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)

    def initial_value(self, name: str, parameter: torch.Tensor, seed: int) -> torch.Tensor:
        """Draws A from Kaiming's uniform distribution, as peft, by `seed` and `name`; B is 0;
        others are the checkpoint's."""
        if name.endswith(B):
            return torch.zeros_like(parameter)
        if name.endswith(A):
            bound = parameter.shape[1] ** -0.5
            generator = generator_of(name, seed, parameter.device)
            return torch.empty_like(parameter).uniform_(-bound, bound, generator=generator)
        return self.frozen(name, parameter.device).to(parameter.device, parameter.dtype)

    def groups(self) -> list[list[str]]:
        """As `Model.groups`, with adapters in the group of their layer, next to the weight that
        they adapt."""
        return [
            [part for name in group for part in self._with_its_adapters(name)]
            for group in super().groups()
        ]

    def _with_its_adapters(self, name: str) -> list[str]:
        """Returns the name of a parameter in the model with adapters, followed by the names of its
        adapters."""
        plain = name.removeprefix(OURS)
        beside = [self.prefixes[plain] + end for end in ADAPTERS] if plain in self.prefixes else []
        return [OURS + each for each in (self.actual.get(plain, plain), *beside)]

    def to_checkpoint(self, weights: Mapping[str, torch.Tensor]) -> Tensors:
        """As `Model.to_checkpoint`, with adapters merged."""
        return super().to_checkpoint(merge(self, weights))

    def frozen(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Reads a frozen parameter or a buffer from the checkpoint, in float32, or quantized, on
        `device`, if it is here."""
        value = self.conversion.read(plain_name(name).removeprefix(OURS))
        if name in self.packed:
            return self.packed[name].pack(value.to(device))
        return value

    def describe(self) -> dict[str, Any]:
        """As `Model.describe`, with the adapters and the weights that they adapt, which the run's
        checkpoints lack."""
        base = {"base": str(self.files.folder), "base_fingerprint": self.files.fingerprint}
        lora = {**asdict(self.lora), "target_modules": self._asked}
        return {**super().describe(), "lora": {**lora, **base}}

    def peft_config(self) -> Any:
        """Returns the adapters as a `LoraConfig` of peft, with only the last parts of layer names
        if these are unambiguous."""
        return _peft_config(self.lora, self.adapted, self.conversion.twin, "CAUSAL_LM")

    @property
    def _asked(self) -> str | list[str]:
        targets = self.lora.target_modules
        if isinstance(targets, str):
            return targets
        return list(targets)

    def differences(self, described: Mapping[str, Any]) -> list[str]:
        theirs = described.get("lora")
        if theirs is None:
            return ["it was trained without LoRA: remove lora.rank"]
        lines = super().differences(
            {key: value for key, value in described.items() if key != "lora"}
        )
        lines += [
            f"lora.{setting} is {ours!r}, was {before!r}"
            for setting, ours, before in (
                ("rank", self.lora.rank, theirs["rank"]),
                ("alpha", self.lora.alpha, theirs["alpha"]),
                ("base", self.lora.quantized, theirs.get("quantized")),
            )
            if ours != before
        ]
        if self._asked != theirs["target_modules"]:
            lines.append(
                f"lora.target_modules is {self._asked!r}, was {theirs['target_modules']!r}"
            )
        if self.files.fingerprint != theirs["base_fingerprint"]:
            lines.append(
                f"the weights of {self.files.folder} differ from those of {theirs['base']}, which "
                "the adapters belong to"
            )
        return lines


def _in_language_model(twin: Any) -> dict[str, nn.Module]:
    """Returns the modules of a model's language model and its head, without those of indexers,
    whose adapters would have no gradient."""
    head = twin.get_output_embeddings()
    found = text_model(twin)
    part = "" if found is None else f"{found[0]}."
    without = set[nn.Module]()
    for indexer in indexers(twin):
        without.update(indexer.modules())
    inside = {}
    for name, module in twin.named_modules():
        of_model = name.startswith(part) or module is head
        if of_model and module not in without:
            inside[name] = module
    return inside


def find_targets(twin: Any, targets: str | Iterable[str]) -> tuple[str, ...]:
    """Returns the names of the linear layers to adapt, in the order of the model.

    `twin` is the model on the meta device, without adapters. `targets` is "all-linear" (all but the
    output head), or the last parts of names. Of a model that reads images both mean layers of its
    language model. Experts stored as one parameter are not linear layers. Raises LoraError for a
    name that no linear layer has, and for layers that cannot have adapters.
    """
    from transformers.pytorch_utils import Conv1D

    head = twin.get_output_embeddings()
    kind = type(twin).__name__
    linear = {
        name: module
        for name, module in twin.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
    }
    matched = set[str]()
    asked = set[str]()
    inside = _in_language_model(twin)
    chosen = [name for name, module in inside.items() if name in linear and module is not head]
    there_are = (
        f"{kind} has the linear layers "
        f"{', '.join(sorted({name.rpartition('.')[2] for name in chosen}))}"
    )
    if not chosen:
        raise LoraError(
            f"{kind} has no linear layer besides its head, so there is nothing to adapt"
        )
    for target in [targets] if isinstance(targets, str) else targets:
        if target == ALL_LINEAR:
            matched |= set(chosen) - _taken_for_experts(twin, chosen)
            continue
        named = {
            name: module
            for name, module in inside.items()
            if name == target or name.endswith(f".{target}")
        }
        unfit = {type(module).__name__ for name, module in named.items() if name not in linear}
        if not named:
            raise LoraError(f"no layer is called {target}: {there_are}")
        if unfit:
            raise LoraError(
                f"{target} is a {', '.join(sorted(unfit))}, which is not a linear layer: "
                f"{there_are}"
            )
        if any(module is head for module in named.values()):
            raise LoraError(
                f"{target} is the output head, of which the loss uses only the weight: {there_are}"
            )
        asked |= named.keys()
    if asked and (refused := _taken_for_experts(twin, asked)):
        raise LoraError(
            f"peft treats {', '.join(sorted(refused)[:3])} as experts stored as one parameter: "
            f"{there_are}"
        )
    return tuple(name for name in linear if name in matched | asked)


def _taken_for_experts(twin: Any, names: Iterable[str]) -> set[str]:
    """Returns the layers to which peft adds no adapters in a mixture of experts, since experts once
    had the same names.

    (Given `gate_proj`, say, for qwen2_moe, peft 0.21 adapts the parameter that contains all experts
    instead.)
    """
    targets = set(names)
    if all(parameter.dim() < 3 for parameter in twin.parameters()):
        return set()
    trial = deepcopy(twin)
    return targets - _inject(trial, _peft_config(Lora(1, 1.0), targets, twin))


def _peft_config(lora: Lora, adapted: Collection[str], twin: Any, task: str | None = None) -> Any:
    from peft import LoraConfig

    ends = {name.rpartition(".")[2] for name in adapted}
    short = {name for name, _ in twin.named_modules() if name.rpartition(".")[2] in ends} == set(
        adapted
    )
    some = twin.get_submodule(next(iter(adapted))) if adapted else None
    return LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        lora_dropout=0.0,
        target_modules=sorted(ends if short else adapted),
        fan_in_fan_out=some is not None and not isinstance(some, nn.Linear),
        task_type=task,
    )


def _inject(hf: Any, config: Any) -> set[str]:
    """Adds adapters to a model, and freezes all else. Returns the beginnings of the names of the
    adapters."""
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*_pattern keys did not match", category=RuntimeWarning
        )
        inject_adapter_in_model(config, hf)
    names = {name for name, parameter in hf.named_parameters() if parameter.requires_grad}
    return {name.removesuffix(A) for name in names if name.endswith(A)}


def with_adapters(spec: ModelSpec, blocks: Iterable[nn.Module], hf: Any) -> ModelSpec:
    """Returns the sizes of a model of whose `blocks`, and tower, only adapters are trained."""
    layers = []
    outside = weights_of_images(hf)
    for layer, block in zip(spec.layers, blocks, strict=True):
        trained = {
            name: weight for name, weight in block.named_parameters() if weight.requires_grad
        }
        adapters = (
            matrix_of(weight, "lora_a" if name.endswith(A) else "adapter")
            for name, weight in trained.items()
        )
        layers.append(replace(layer, matrices=(*layer.matrices, *adapters)))
    in_tower = sum(weight.numel() for weight in outside if weight.requires_grad)
    return replace(spec, layers=tuple(layers), tower_adapters=in_tower)


def with_quantized(spec: ModelSpec, blocks: Iterable[nn.Module]) -> ModelSpec:
    """Returns the sizes of a model with the quantized layers of its `blocks`."""
    layers = []
    for layer, block in zip(spec.layers, blocks, strict=True):
        matrices = list(layer.matrices)
        for module in block.modules():
            if isinstance(module, QuantizedLinear):
                matrix = Matrix(module.rows, module.columns)
                matrices[matrices.index(matrix)] = replace(matrix, stored=module.weight.numel())
        layers.append(replace(layer, matrices=tuple(matrices)))
    return replace(spec, layers=tuple(layers))


def plain_name(name: str) -> str:
    """Returns the name of a frozen parameter in the model without adapters."""
    return name.replace(BASE[1:], "")


def write_adapter(folder: Path, model: AdaptedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes the adapters for `peft.PeftModel.from_pretrained(base, folder)`: their config and one
    safetensors file.

    `tensors` has the whole value of every trained parameter, by its name in `model` or in
    `model.hf`; others are ignored. Raises ValueError if one is missing.
    """
    from safetensors.torch import save_file

    by_name = {name.removeprefix(OURS): tensor for name, tensor in tensors.items()}
    expected = [prefix + end for prefix in model.prefixes.values() for end in ADAPTERS]
    missing = [name for name in expected if name not in by_name]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(expected)} adapter weights are missing: "
            f"{', '.join(missing[:3])}, .."
        )
    folder.mkdir(parents=True, exist_ok=True)
    config = model.peft_config()
    config.base_model_name_or_path = str(model.files.folder)
    config.inference_mode = True
    config.save_pretrained(folder)
    written = {
        PEFT_PREFIX + name.replace(f".{ADAPTER}.", "."): by_name[name]
        .detach()
        .to("cpu", torch.float32)
        .contiguous()
        for name in expected
    }
    save_file(written, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def merge(model: AdaptedModel, weights: Mapping[str, torch.Tensor]) -> Tensors:
    """Merges the adapters of some layers into their weights, as peft does. Returns the parameters
    and buffers without adapters.

    Quantized weights are expanded to float32 first, so that the result is what was trained.

    `weights` are whole tensors, named as in `model` or `model.hf`; the result has the same names
    without `.base_layer`. A merged weight has the dtype of the given frozen weight: give the
    checkpoint's dtype to lose no precision. Raises ValueError if A or B of a layer is missing.
    """
    merged: Tensors = {}
    for name, weight in weights.items():
        if name.endswith(ADAPTERS):
            continue
        if name in model.packed:
            weight = model.packed[name].unpack(weight)
        prefix = model.prefixes.get(plain_name(name).removeprefix(OURS))
        if prefix is not None:
            layer = OURS * name.startswith(OURS) + prefix
            try:
                a, b = (weights[layer + end] for end in ADAPTERS)
            except KeyError as missing:
                raise ValueError(
                    f"{name} is given without {missing.args[0]}: give a layer's weight with its "
                    "adapters"
                ) from None
            added = b.float() @ a.float() * model.lora.scale
            weight = (weight.float() + (added.mT if prefix in model.transposed else added)).to(
                weight.dtype
            )
        merged[plain_name(name)] = weight
    return merged
