"""Tiny vision-language models of transformers with their processors, and documents with images."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from longctx.hf.vision import ImagePlace
from longctx.planning.layout import Placement
from longctx.trainers.image_shares import Image, Pixels, Places
from tests.huggingface_cases import SIZE

TEXT = {**SIZE, "vocab_size": 96, "max_position_embeddings": 512}
TOWER = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
MERGING = {
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_heads": 2,
    "depth": 3,
}
QWEN_TOKENS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **TOWER, "image_size": 16},
        "image_token_index": 90,
        "image_seq_length": 16,
        "vision_feature_layer": -2,
    },
    "qwen2_vl": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {**MERGING, "embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2},
        **QWEN_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {
            **MERGING,
            "hidden_size": 24,
            "intermediate_size": 32,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        **QWEN_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {
            **MERGING,
            "hidden_size": 24,
            "intermediate_size": 32,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        **QWEN_TOKENS,
    },
    "gemma3": {
        "text_config": {
            **TEXT,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            **TOWER,
            "image_size": 16,
            "vision_use_head": False,
        },
        "image_token_id": 90,
        "mm_tokens_per_image": 16,
    },
}
IMAGE = 90
"""Token of all images."""

LENGTHS = (83, 7, 24, 90, 41, 2)
PLACES: Places = {
    0: (ImagePlace(3, 16, (1, 4, 4)), ImagePlace(35, 16, (1, 4, 4)), ImagePlace(60, 16, (1, 4, 4))),
    3: (ImagePlace(30, 16, (1, 4, 4)),),
    4: (ImagePlace(1, 16, (1, 4, 4)),),
}
MERGED: Places = {
    0: (ImagePlace(3, 12, (1, 6, 8)), ImagePlace(35, 16, (1, 8, 8)), ImagePlace(60, 4, (1, 2, 8))),
    3: (ImagePlace(30, 24, (1, 8, 12)),),
    4: (ImagePlace(1, 6, (1, 6, 4)),),
}
"""Places of images; of towers that merge two by two patches of any grid."""
PLACEMENTS: dict[int, tuple[tuple[Placement, ...], ...]] = {
    1: (tuple(Placement(document, 0, 1) for document in range(len(LENGTHS))),),
    2: (
        (Placement(0, 0, 2), Placement(1, 0, 1), Placement(2, 1, 1)),
        (Placement(3, 0, 2, reversed=True), Placement(5, 1, 1)),
        (Placement(4, 0, 1),),
    ),
    3: (
        (Placement(0, 0, 3), Placement(1, 0, 1)),
        (Placement(3, 1, 2, reversed=True), Placement(2, 0, 1)),
        (Placement(4, 2, 1),),
        (Placement(5, 2, 1),),
    ),
    4: (
        (Placement(0, 0, 4), Placement(1, 2, 1)),
        (Placement(3, 0, 3), Placement(4, 3, 1)),
        (Placement(2, 0, 2), Placement(5, 3, 1)),
    ),
}
"""By number of ranks: images cut by the edges of a ring, documents without images beside others,
ranks without tokens."""


def save_model(folder: Path, family: str, **changes: Any) -> Path:
    """Saves a model whose weights are large enough for attention and images to matter."""
    settings = {**CONFIGS[family], **changes}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(family, **settings), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return folder


def places_of(family: str) -> Places:
    return PLACES if family in ("llava", "gemma3") else MERGED


def documents(family: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(0, 88, (length,), generator=generator) for length in LENGTHS]
    for document, places in places_of(family).items():
        for place in places:
            made[document][place.start : place.start + place.tokens] = IMAGE
    return made


def labels(family: str) -> list[torch.Tensor]:
    return [torch.where(document == IMAGE, -100, document) for document in documents(family)]


def pixels(family: str, images: Sequence[Image]) -> Pixels:
    """Returns random pixels of images. A blank image is of the smallest size."""
    parts, grids = [], []
    for document, number in images or [(-1, 0)]:
        generator = torch.Generator().manual_seed(100 * document + number + 101)
        grid = places_of(family)[document][number].grid if document >= 0 else (1, 2, 2)
        shape = (
            (1, 3, 16, 16) if family in ("llava", "gemma3") else (grid[1] * grid[2], 3 * 2 * 4 * 4)
        )
        parts.append(torch.randn(shape, generator=generator))
        grids.append(grid)
    made = {"pixel_values": torch.cat(parts)}
    return (
        made if family in ("llava", "gemma3") else {**made, "image_grid_thw": torch.tensor(grids)}
    )


QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ "
    "m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' "
    "%}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor "
    "%}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As that of Qwen2-VL."""
LLAVA_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}{% endif %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% "
    "endfor %}"
    "{% if m['role'] != 'assistant' %}{% for c in m['content'] | selectattr('type', 'equalto', "
    "'text') %}{{ c['text'] + ' ' }}"
    "{% endfor %}{% else %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ c['text'] + '</s>' }}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""As that of LLaVA 1.5, with an end of turns."""
GEMMA_TEMPLATE = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] "
    "}}\n"
    "{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<start_of_image>{% elif c['type'] == 'text' %}{{ c['text'] | "
    "trim }}{% endif %}{% endfor %}"
    "{% endif %}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% "
    "endif %}"
)
TOKENS = {
    "llava": ("</s>", "<image>"),
    "gemma3": (
        "<eos>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
    ),
}
QWEN_TOKEN_TEXTS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def save_checkpoint(folder: Path, family: str, **changes: Any) -> Path:
    """Saves a model with a tokenizer of bytes and its processor."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Gemma3Processor, LlavaProcessor, PreTrainedTokenizerFast
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    special = TOKENS.get(family, QWEN_TOKEN_TEXTS)
    inner = Tokenizer(
        models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
    )
    inner.add_special_tokens(list(special))
    extra = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=special[0],
        **({"extra_special_tokens": extra} if family == "gemma3" else {}),
    )
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in special}
    square = {"height": 16, "width": 16}
    processor: Any
    if family == "llava":
        images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=square)
        options = {
            "patch_size": 4,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        }
        processor = LlavaProcessor(images, tokenizer, chat_template=LLAVA_TEMPLATE, **options)
        changed = {"image_token_index": ids["<image>"]}
    elif family == "gemma3":
        images = Gemma3ImageProcessorPil(size=square)
        processor = Gemma3Processor(
            images, tokenizer, chat_template=GEMMA_TEMPLATE, image_seq_length=16
        )
        names = {
            "image_token_id": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        }
        changed = {key: ids[name] for key, name in names.items()}
    else:
        edges = {"shortest_edge": 64, "longest_edge": 2048}
        images = Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, temporal_patch_size=2, size=edges
        )
        names = {
            "vision_start": "<|vision_start|>",
            "vision_end": "<|vision_end|>",
            "image": "<|image_pad|>",
            "video": "<|video_pad|>",
        }
        changed = {f"{key}_token_id": ids[name] for key, name in names.items()}
    text = {
        **CONFIGS[family]["text_config"],
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 2048,
    }
    save_model(folder, family, **{"text_config": text, **changed, **changes})
    if family in ("llava", "gemma3"):
        processor.save_pretrained(folder)
        return folder
    tokenizer.chat_template = QWEN_TEMPLATE  # the processor itself needs torchvision, for videos
    tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)
    if family == "qwen3_vl":
        sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": edges}
        colours = {"image_mean": images.image_mean, "image_std": images.image_std}
        of_videos = {"video_processor_type": "Qwen3VLVideoProcessor", **sizes, **colours}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(of_videos))
    return folder
