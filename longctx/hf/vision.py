"""Vision: the encoder of images (tower) of a vision-language model of transformers, run by itself.

Some ranks of a document encode its images; the features travel to the ranks that hold the image's
tokens, where transformers' own forward puts them in the places of the embeddings (and, of Qwen3-VL,
adds more of them after the first layers).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from longctx.planning.cost.spec import ModelSpec
from longctx.planning.cost.tower import TowerSpec
from longctx.planning.image_work import Grid
from longctx.tokenizer_files import read_json

VISION_FAMILIES = ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3")
"""Model types whose images are supported; the tests compare a model of each with its own code."""
IN_BOTH_DIRECTIONS = ("gemma3",)
"""Those in which the tokens of an image see each other in both directions."""
FRAMES_APART = ("qwen3_vl",)
"""Those in which texts are between the pairs of frames of a video."""
VISION_CLASS = "AutoModelForImageTextToText"
"""Class of transformers that loads them, and others that read images."""
TOWERS = ("vision_tower", "visual")
"""Names of the tower in their base models."""


class ImagePlace(NamedTuple):
    """Place of an image, or of a pair of frames of a video, in a document.

    Attributes:
        start, tokens: the first token, and the number of tokens.
        grid: the grid of patches.
        fps: frames per second of the video; 0: it is an image.
    """

    start: int
    tokens: int
    grid: Grid
    fps: float = 0.0

    @property
    def patches(self) -> int:
        """Number of patches that the encoder reads."""
        return math.prod(self.grid)


@dataclass(frozen=True)
class Images:
    """Images of a micro-batch, from the view of one rank.

    Attributes:
        pixels: what the image processor makes of the images that this rank encodes, at least one,
            as arguments of the tower.
        share: sends features [tokens of these images, ..] to the ranks that hold the tokens;
            returns the features of this rank's image tokens, in the order of its buffer.
            Collective; gradients travel back.
        rows: which of these features are of images ("image") and of videos ("video"), as
            indices on the device, as the host would wait for a mask; kinds that this rank has.
    """

    pixels: Mapping[str, torch.Tensor]
    share: Callable[[torch.Tensor], torch.Tensor]
    rows: Mapping[str, torch.Tensor | slice]


def is_vision(hf: Any) -> bool:
    """Returns whether a model of transformers is of a family whose images are supported."""
    return hf.config.model_type in VISION_FAMILIES and hasattr(hf.base_model, "language_model")


def video_token(hf: Any) -> int | None:
    """Returns the token that stands for videos in a model of transformers; None if it reads
    none."""
    return getattr(hf.config, "video_token_id", None)


def class_of(model_type: str) -> str:
    """Returns the class of transformers that loads models of a type, of which texts are trained."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    reads_images = model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    alone = model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model_type in VISION_FAMILIES or (reads_images and alone):
        return VISION_CLASS
    return "AutoModelForCausalLM"


def class_of_checkpoint(folder: Path) -> str:
    """Returns the class that loads the checkpoint in a local folder."""
    return class_of(read_json(folder / "config.json").get("model_type", ""))


def text_model(hf: Any) -> tuple[str, nn.Module] | None:
    """Returns the language model inside a model that has other parts, as encoders of images, and
    its name; None without any."""
    if hf.base_model is hf or hf.config.is_encoder_decoder:
        return None
    decoder = hf.get_decoder()
    name = next(
        (name for name, module in hf.base_model.named_modules() if module is decoder and name), None
    )
    if name is None:
        return None
    return (f"{hf.base_model_prefix}.{name}", decoder)


def tower_of(hf: Any) -> nn.Module:
    tower: nn.Module = next(
        getattr(hf.base_model, name) for name in TOWERS if hasattr(hf.base_model, name)
    )
    return tower


def tower_blocks(hf: Any) -> Sequence[nn.Module]:
    """Returns the blocks of the tower: the modules of its longest list."""
    lists = [module for module in tower_of(hf).modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=()))


def blocks_outside(hf: Any) -> list[nn.Module]:
    """Returns the blocks of all encoders beside the language model: the modules of the longest list
    of each part."""
    found = text_model(hf)
    if found is None:
        parts = []
    else:
        parts = [part for part in hf.base_model.children() if part is not found[1]]
    blocks = list[nn.Module]()
    for part in parts:
        lists: list[list[nn.Module]] = [
            list(module) for module in part.modules() if isinstance(module, nn.ModuleList)
        ]
        longest: list[nn.Module] = max(lists, key=len, default=[])
        blocks += longest
    return blocks


def weights_of_images(hf: Any) -> list[nn.Parameter]:
    """Returns the weights outside of the language model; none if there is nothing else."""
    found = text_model(hf)
    if found is None:
        return []
    of_text = {
        id(weight)
        for module in (found[1], hf.get_output_embeddings())
        for weight in module.parameters()
    }
    return [weight for weight in hf.parameters() if id(weight) not in of_text]


def tokens_of_image(hf: Any) -> int:
    """Returns the tokens of an image of a model whose images are all of one size."""
    config = hf.config
    vision = hf.config.vision_config
    first = any(name.endswith("class_embedding") for name, _ in tower_of(hf).named_parameters())
    patches = (vision.image_size // vision.patch_size) ** 2 + first
    return int(
        getattr(config, "mm_tokens_per_image", 0)
        or patches - (config.vision_feature_select_strategy == "default")
    )


def tower_sizes(hf: Any) -> tuple[int, int]:
    """Returns the parameters outside of the language model, and the values that they keep for a
    token of an image."""
    parameters = sum(weight.numel() for weight in weights_of_images(hf))
    blocks = tower_blocks(hf)
    config = hf.config
    vision = hf.config.vision_config
    linear = (
        module for block in blocks for module in block.modules() if isinstance(module, nn.Linear)
    )
    values = sum(module.in_features + module.out_features for module in linear)
    patches = getattr(vision, "spatial_merge_size", 1) ** 2
    if patches > 1:  # RoPE in float32, and copies per image
        values += 6 * len(blocks) * (getattr(vision, "embed_dim", None) or vision.hidden_size)
    if tokens := getattr(config, "mm_tokens_per_image", None):
        patches = (vision.image_size // vision.patch_size) ** 2 // tokens
    features = (
        1 + len(getattr(vision, "deepstack_visual_indexes", ()))
    ) * config.get_text_config().hidden_size
    return parameters, patches * values + 2 * features


def tower_spec(hf: Any) -> TowerSpec:
    """Returns the sizes of the tower and of what projects its features, from which its work is
    counted."""
    blocks = tower_blocks(hf)
    config = hf.config
    vision = hf.config.vision_config
    of_blocks, of_text = (
        {id(weight) for module in part for weight in module.parameters()}
        for part in (blocks, [hf.base_model.language_model])
    )
    tables = {
        id(module.weight) for module in hf.base_model.modules() if isinstance(module, nn.Embedding)
    }
    outside = [
        weight
        for weight in hf.base_model.parameters()
        if id(weight) not in of_blocks | of_text | tables
    ]
    full = getattr(vision, "fullatt_block_indexes", None)
    used = getattr(config, "vision_feature_layer", len(blocks))
    # Before and after blocks.
    states = [state % (len(blocks) + 1) for state in ([used] if isinstance(used, int) else used)]
    merged = hasattr(vision, "spatial_merge_size")
    return TowerSpec(
        patch_weights=sum(weight.numel() for weight in outside if weight.dim() > 3),
        block_weights=sum(weight.numel() for weight in blocks[0].parameters() if weight.dim() > 1),
        token_weights=sum(weight.numel() for weight in outside if weight.dim() == 2),
        blocks=len(blocks),
        width=getattr(vision, "embed_dim", None) or vision.hidden_size,
        windowed=0 if full is None else len(blocks) - len(full),
        unused=len(blocks) - max(states),
        merge=getattr(vision, "spatial_merge_size", 1),
        window=0
        if full is None
        else vision.window_size // vision.spatial_merge_size // vision.patch_size,
        patches=None if merged else (vision.image_size // vision.patch_size) ** 2,
        more=sum(name.endswith("class_embedding") for name, _ in tower_of(hf).named_parameters()),
    )


def with_tower(spec: ModelSpec, hf: Any) -> ModelSpec:
    """Returns the spec of a model of transformers with the sizes of its tower, if it has one."""
    if not is_vision(hf):
        return spec
    parameters, values = tower_sizes(hf)
    return replace(spec, tower_parameters=parameters, tower_values=values, tower=tower_spec(hf))


@contextmanager
def encoded(hf: Any, images: Images) -> Iterator[dict[str, Any] | None]:
    """Encodes this rank's images and frames. Yields what transformers' forward takes for the image
    tokens of this rank; None if it has none. Collective.

    Inside, a zero made of the features is added to all embeddings: so on every rank the same layers
    have a backward, which exchanges gradients, and features have one after it, whichever weights
    are trained.
    """
    outputs, zero = _encode(hf, images)
    hook = hf.get_input_embeddings().register_forward_hook(
        lambda _, __, embedded: embedded + zero.to(embedded.dtype)
    )
    try:
        yield outputs
    finally:
        hook.remove()


def _encode(hf: Any, images: Images) -> tuple[dict[str, Any] | None, torch.Tensor]:
    out = hf.base_model.get_image_features(**images.pixels, return_dict=True)
    deep = [_joined(features) for features in getattr(out, "deepstack_features", None) or ()]
    features = images.share(torch.stack([_joined(out.pooler_output), *deep], dim=1))
    zero = features[:0].sum()
    if not len(features):
        return None, zero
    found = {}
    for kind, rows in images.rows.items():
        first, *others = features[rows].unbind(1)
        pooled = [first] if isinstance(out.pooler_output, list | tuple) else first[None]
        found[kind] = SimpleNamespace(
            pooler_output=pooled, deepstack_features=[[part] for part in others]
        )
    return found, zero


def _joined(features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the features [tokens, hidden] of all images."""
    if isinstance(features, torch.Tensor):
        return features.flatten(0, 1)
    return torch.cat(list(features))


def image_positions(hf: Any, length: int, places: Sequence[ImagePlace]) -> torch.Tensor | None:
    """Returns the positions [axes, length] of a document whose images, and pairs of frames, are at
    `places`.

    They are those that the model's own code computes; None if a token's position is its place in
    the document.
    """
    model = hf.base_model
    if not hasattr(model, "get_rope_index"):
        return None
    kinds = torch.zeros(1, length, dtype=torch.int32)
    images: list[Sequence[int]] = []
    videos: list[list[int]] = []
    seconds = []
    end = -1
    for start, tokens, grid, rate in places:
        kinds[0, start : start + tokens] = 2 if rate else 1
        if not rate:
            images.append(grid)
        elif start == end:  # goes on: of Qwen3-VL, each pair of frames is a video of its own
            videos[-1][0] += grid[0]
        else:
            videos.append(list(grid))
            seconds.append(hf.config.vision_config.temporal_patch_size / rate)
        end = start + tokens if rate else -1
    grids = [torch.tensor(kind, dtype=torch.int64) if kind else None for kind in (images, videos)]
    options = {"second_per_grid_ts": torch.tensor(seconds)} if videos else {}
    positions, _ = model.get_rope_index(
        torch.zeros(1, length, dtype=torch.int64), kinds, *grids, **options
    )
    found: torch.Tensor = positions[:, 0]
    return found
