"""GPT-2 of transformers: other names of fields and tensors, matrices stored as [in, out], and q, k and v in one matrix."""

import re
from typing import Any

from longctx.model.family import ACTIVATIONS, Family
from longctx.model.presets import GPT_STYLE, ModelShape, NoNativeModel

FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
    "tie_word_embeddings": "tie_word_embeddings",
}
"""Names of sizes, ours → theirs."""
DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
SUMMARY = ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout")
"""Fields of models with another head."""
OUTSIDE = {"embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f"}
BLOCK = {
    "input_layernorm": "ln_1",
    "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
"""Modules, ours → theirs."""


class Gpt2(Family):
    """GPT-2. Dropout is refused, as in all families: set it to 0 in config.json."""

    def shape(self, config: Any) -> ModelShape:
        if dropped := {name: getattr(config, name) for name in DROPOUT if getattr(config, name)}:
            raise NoNativeModel(f"config.json has {dropped}, and dropout is not supported: set it to 0 there")
        width, heads = config.n_embd, config.n_head
        if width % heads:
            raise NoNativeModel(f"n_embd is {width}, which is not divisible by n_head {heads}")
        values = {ours: getattr(config, theirs) for ours, theirs in FIELDS.items()} | dict(self.always)
        values |= {"num_key_value_heads": heads, "head_dim": width // heads, "hidden_act": self._activation(config)}
        values["intermediate_size"] = config.n_inner or 4 * width
        return self._checked(config, values)

    def config(self, shape: ModelShape, longest: int, end: int | None) -> dict[str, Any]:
        activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == shape.hidden_act)
        values = {theirs: getattr(shape, ours) for ours, theirs in FIELDS.items() if getattr(shape, ours) is not None}
        values |= {self.activation: activation, "n_inner": shape.intermediate_size, **dict.fromkeys(DROPOUT, 0.0)}
        return {**values, "bos_token_id": None, "eos_token_id": end, "pad_token_id": None}

    def parts(self, name: str) -> tuple[str, tuple[str, ...]]:
        module, _, kind = name.rpartition(".")
        block = re.match(r"layers\.(\d+)\.", name)
        if block is None:
            return (f"{self.prefix}{OUTSIDE[module]}.{kind}" if module in OUTSIDE else name), (name,)
        inside, theirs = module.removeprefix(block[0]), f"{self.prefix}h.{block[1]}."
        if inside in BLOCK:
            return f"{theirs}{BLOCK[inside]}.{kind}", (name,)
        return f"{theirs}attn.c_attn.{kind}", tuple(f"{block[0]}self_attn.{part}_proj.{kind}" for part in "qkv")

    def transposed(self, theirs: str) -> bool:
        return re.search(r"\.c_\w+\.weight$", theirs) is not None


GPT2 = Gpt2(
    "gpt2",
    "GPT2LMHeadModel",
    GPT_STYLE,
    activation="activation_function",
    prefix="transformer.",
    buffers=(".attn.bias", ".attn.masked_bias"),
    ignored=(*FIELDS.values(), "n_inner", *DROPOUT, *SUMMARY),
)
