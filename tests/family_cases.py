"""Every causal language model of the installed transformers, tiny: compares a step on two ranks
with one unpacked process."""

import warnings
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longctx.data.packing import pack_documents
from longctx.hf.attention import HuggingFaceError, model_inputs, prepare, restore_layers
from longctx.planning.layout import Placement
from tests.data_cases import placed_plan
from tests.huggingface_cases import LENGTHS, PLACEMENTS, gradients, make_documents, unpacked

FAMILIES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Model type → class."""

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
MIXING = 1e-2
"""Minimum relative change of gradients if documents see each other; a tiny model with a smaller
change proves nothing."""
VOCABULARY = 72
"""Documents use the first 64 tokens; the others are special tokens."""

SMALL: dict[str, Any] = {
    name: value
    for value, names in {
        32: "hidden_size n_embd d_model emb_dim dim_model embedding_size word_embed_proj_dim "
        "embedding_dim input_size",
        48: "intermediate_size intermediate_size_mlp ffn_dim ffn_hidden_size n_inner d_ff d_inner "
        "dim_ff feed_forward_size "
        "decoder_ffn_dim encoder_ffn_dim dff dense_intermediate_size",
        16: "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size "
        "shared_intermediate_size q_lora_rank "
        "kv_lora_rank qk_nope_head_dim moe_shared_expert_intermediate_size sliding_window "
        "sliding_window_size "
        "attention_window_size window_size local_attention keep_window_size adapter_rank lru_width "
        "mamba_d_state "
        "ssm_state_size state_size hidden_size_per_layer_input index_block_size",
        4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
        "encoder_attention_heads attention_heads "
        "num_decoder_attention_heads num_encoder_attention_heads num_local_experts num_experts "
        "n_routed_experts "
        "moe_num_experts index_n_heads num_query_groups",
        2: "num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers encoder_layers "
        "num_decoder_layers "
        "num_encoder_layers num_key_value_heads kv_n_heads num_kv_heads num_experts_per_tok "
        "num_experts_per_token moe_k "
        "moe_topk moe_top_k top_k_experts num_layers_per_stack swa_num_key_value_heads",
        8: "head_dim qk_rope_head_dim v_head_dim kv_channels d_kv d_head dim_head "
        "attention_head_dim attention_head_size "
        "index_head_dim swa_head_dim rotary_dim index_topk",
        1: "n_group topk_group num_expert_group n_shared_experts num_shared_experts "
        "moe_num_shared_experts "
        "first_k_dense_replace num_dense_layers",
        VOCABULARY: "vocab_size decoder_vocab_size vocab_size_per_layer_input",
        256: "max_position_embeddings n_positions max_seq_len n_ctx max_target_positions "
        "context_length",
    }.items()
    for name in names.split()
}
LATENT = (
    "axk1",
    "axk2",
    "bailing_hybrid",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
)
LATENT += ("kimi_linear", "minicpm3", "youtu")
"""Latent attention: equal numbers of key and query heads."""
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DOTS3 = {
    "num_key_value_heads": 4,
    "sliding_window": 16,
    "shared_experts_intermediate_size": 16,
    **{f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads")},
    **{f"swa_{name}": 16 for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim")},
    "swa_head_dim": 24,
    "swa_v_head_dim": 8,
}
_SHARED_INDEX = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "indexer_types": ["full", "shared", "full", "shared"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
_HEADS = {"num_key_value_heads": 2, "head_dim": 8}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
SPECIAL: dict[str, dict[str, Any]] = {
    **{kind: {"num_key_value_heads": 4} for kind in LATENT},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "nemotron"), _HEADS),
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "dory": {
        "initializer_range": 0.2,  # scales are divided by it
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "n_input_layers": 1,
        "n_output_layers": 1,  # the two between run twice
    },
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": 48,
    },
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "glm_moe_dsa": _SHARED_INDEX,
    "glm5_next": {
        "text_config": {"num_key_value_heads": 4, "index_kpool": 4, "qk_rope_head_dim": 0}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "hy_v4": _SHARED_INDEX,
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "kimi_k25": {"text_config": {"num_key_value_heads": 4}},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "mistral4": {"num_key_value_heads": 4},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {
            "mlp_layer_types": ["dense", "dense"],
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
        },
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": _DOTS3,
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 1,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 1,
        "attn_layer_offset": 0,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "n_mamba_heads": 8,
        "attention_head_dim": 16,
    },
    "zaya": {**_HEADS, "num_experts_per_tok": 1},
}
"""Additional settings that single model types need to be consistent when small."""


@dataclass(frozen=True)
class Finding:
    """The outcome of a model type. Errors are relative; `mixing` is the gradient error if documents
    see each other."""

    kind: str
    text: str = ""
    loss_error: float = 0.0
    gradient_error: float = 0.0
    mixing: float = 0.0


def small_settings(config_class: Any) -> dict[str, Any]:
    """Returns settings that make a model of this config tiny and disable dropout."""
    settings: dict[str, Any] = {}
    tokens = iter(range(64, VOCABULARY))
    for name, field in config_class.__dataclass_fields__.items():
        default = field.default if field.default is not MISSING else None
        if name in SMALL and default is not None:
            settings[name] = SMALL[name]
        elif isinstance(default, float) and ("drop" in name):
            settings[name] = 0.0
        elif name.endswith(("token_id", "token_index")) and isinstance(default, int):
            settings[name] = next(tokens, VOCABULARY - 1)
        elif name == "is_decoder":
            settings[name] = True
    return settings


def kinds_of_layers(config_class: Any) -> dict[str, Any]:
    """Returns settings of a layer of each kind of a config's default; none if it has one kind."""
    if "layer_types" not in config_class.__dataclass_fields__:
        return {}
    kinds = list(dict.fromkeys(config_class().layer_types or ()))
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)} if len(kinds) > 1 else {}


def make_config(kind: str, **more: Any) -> Any:
    """Returns the config of a tiny model with every kind of layer of the type's default, and with
    `more` settings."""
    config_class = CONFIG_MAPPING[kind]
    settings = small_settings(config_class)
    for name, inside in config_class.sub_configs.items():
        inside = type(getattr(config_class(), name)) if inside is AutoConfig else inside
        if hasattr(inside, "__dataclass_fields__"):
            settings[name] = {**small_settings(inside), **kinds_of_layers(inside)}
    settings |= kinds_of_layers(config_class)
    for name, value in {**SPECIAL.get(kind, {}), **more}.items():
        settings[name] = {**settings.get(name, {}), **value} if name.endswith("_config") else value
    return config_class(**settings)


def build(kind: str, attention: str, **settings: Any) -> PreTrainedModel:
    """Builds a model of a type with weights large enough for attention to matter."""
    torch.manual_seed(0)
    makes: Any = AutoModelForCausalLM if kind in FAMILIES else AutoModelForImageTextToText
    model: PreTrainedModel = makes.from_config(
        make_config(kind, **settings), attn_implementation=attention
    ).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.train()


def classify(kind: str) -> dict[str, Any]:
    """Runs on each rank: returns the outcome of a model type."""
    warnings.filterwarnings("ignore")
    return asdict(_classify(kind))


def _classify(kind: str) -> Finding:
    documents = make_documents()
    try:
        model = _build_plain(kind)
        plain = model.config._attn_implementation
        loss, expected = _step(model, documents)
    except Exception as error:  # any error of a model that is unrelated to longctx
        return Finding("not buildable", _text(error))
    note = ""
    if _step(model, documents)[0] != loss:
        note = "compared in evaluation mode: routing is random in training"
        model.eval()
        loss, expected = _step(model, documents)
    model.zero_grad()
    try:
        prepare(model)
        ring_loss = ring_step(model, documents)
    except HuggingFaceError as error:
        return Finding("refused", str(error))
    loss_error, gradient_error = (
        abs(ring_loss - loss) / abs(loss),
        largest_error(gradients(model), expected),
    )
    exact = (
        loss_error <= LOSS_TOLERANCE
        and gradient_error <= GRADIENT_TOLERANCE
        and router_loss_is_refused(model, documents)
    )
    model.set_attn_implementation(plain)
    restore_layers(model)
    model.zero_grad()
    unseparated(model, documents).backward()
    mixing = largest_error(gradients(model), expected)
    return Finding("exact" if exact else "WRONG", note, loss_error, gradient_error, mixing)


def _build_plain(kind: str) -> PreTrainedModel:
    """Builds the model with eager attention, or its default if it has none."""
    try:
        return build(kind, "eager")
    except ValueError as error:
        try:
            return build(kind, "sdpa")
        except Exception:
            raise error from None


def _step(
    model: PreTrainedModel, documents: list[torch.Tensor]
) -> tuple[float, list[torch.Tensor]]:
    """Returns loss and gradients of one process that trains one document at a time."""
    model.zero_grad()
    loss, found = unpacked(model, documents)
    return loss, [gradient.clone() for gradient in found]


def largest_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Returns the largest relative error of a parameter's gradient; tiny gradients count as 1/1000
    of the largest."""
    floor = 1e-3 * max(float(gradient.norm()) for gradient in expected)
    pairs = zip(found, expected, strict=True)
    return max(
        float((mine - theirs).norm()) / max(float(theirs.norm()), floor) for mine, theirs in pairs
    )


def router_loss_is_refused(model: PreTrainedModel, documents: list[torch.Tensor]) -> bool:
    """Returns whether requesting the auxiliary loss in the call is an error; True for models
    without one."""
    if not hasattr(model.config.get_text_config(), "output_router_logits"):
        return True
    (batch,), targets = pack_documents(
        placed_plan(LENGTHS[:1], 1, [[Placement(0, 0, 1)]]), 0, documents[:1]
    )
    try:
        with torch.no_grad():
            plain, asked = (
                model(**model_inputs(model, batch, targets), **extra).loss
                for extra in ({}, {"output_router_logits": True})
            )
    except HuggingFaceError:
        return True
    return bool(plain == asked)


def ring_step(model: PreTrainedModel, documents: list[torch.Tensor]) -> float:
    """Returns the loss of a step over all ranks and leaves its gradients in the model."""
    plan = placed_plan(LENGTHS, dist.get_world_size(), PLACEMENTS)
    micro_batches, targets = pack_documents(plan, dist.get_rank(), documents)
    return summed_step(
        model, (model(**model_inputs(model, batch, targets)).loss for batch in micro_batches)
    )


def summed_step(model: PreTrainedModel, parts: Iterable[torch.Tensor]) -> float:
    """Returns the sum of parts of a loss over all ranks and leaves its gradients in the model."""
    loss = torch.zeros((), dtype=torch.float64)
    for part in parts:
        part.backward()
        loss += part.detach()
    dist.all_reduce(loss)
    for parameter, gradient in zip(model.parameters(), gradients(model), strict=True):
        dist.all_reduce(gradient)
        parameter.grad = gradient
    return loss.item()


def unseparated(model: PreTrainedModel, documents: list[torch.Tensor]) -> torch.Tensor:
    """Returns the loss if all documents share one row and see each other, as with a wrong
    integration."""
    labels = torch.cat(
        [torch.cat([document[1:], torch.tensor([-100])]) for document in documents]
    ).unsqueeze(0)
    ids = torch.cat(documents).unsqueeze(0)
    loss: torch.Tensor = model(
        input_ids=ids,
        position_ids=torch.cat([torch.arange(len(document)) for document in documents]).unsqueeze(
            0
        ),
        # Keeps transformers from deriving documents from the positions.
        attention_mask=torch.ones_like(ids),
        labels=labels,
        shift_labels=labels,
        num_items_in_batch=sum(LENGTHS) - len(LENGTHS),
        use_cache=False,
    ).loss
    return loss


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
