"""A model of your own, on rows of whole documents: longctx check-step FILE --processes 2."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from longctx.check import Probe, Step
from longctx.check.loop import packed_batches, place, targets_of
from longctx.check.recording import reference_of
from longctx.check.tensors import whole


def make(probe: Probe) -> Step:
    _, ranks = place()

    # PUT YOURS HERE: the rows of this rank, as your data set makes them of `probe.rows`.
    batches = packed_batches(probe)

    # PUT YOURS HERE: your model, below, with the weights of a model of transformers.
    llama = probe.model("llama")
    model = Model(llama.config)
    weights = dict(llama.named_parameters())
    model.load_state_dict({name: weights[theirs(name)].detach() for name in model.state_dict()})
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        fully_shard(model, mesh=mesh)

    # PUT YOURS HERE: forward and backward of all micro-batches, without clipping.
    targets = targets_of(batches, shifted=True)
    calls = []
    for batch in batches:
        logits = model(batch["input_ids"], batch["documents"], batch["positions"])
        losses = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        loss = losses / targets
        (loss * ranks).backward()  # FSDP2 takes the mean over ranks
        calls.append(batch["input_ids"])

    gradients = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            gradients[theirs(name)] = whole(weight.grad)
    return Step(reference_of(llama), gradients, calls)


NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "queries": "self_attn.q_proj",
    "keys": "self_attn.k_proj",
    "values": "self_attn.v_proj",
    "projection": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


def theirs(name: str) -> str:
    """Returns a parameter's name in the model of transformers: `layers.0.gate.weight` is
    `model.layers.0.mlp.gate_proj.weight`."""
    *layer, ours, kind = name.split(".")
    if layer:
        return ".".join(["model", *layer, NAMES[ours], kind])
    return f"{NAMES[ours]}.{kind}"


class Model(nn.Module):
    """A small Llama whose attention keeps documents apart."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.theta = config.rope_parameters["rope_theta"]
        self.width = config.head_dim

    def forward(
        self, ids: torch.Tensor, documents: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Returns logits [rows, tokens, vocabulary]; ids, documents and positions are [rows,
        tokens]."""
        powers = torch.arange(0, self.width, 2) / self.width
        angles = positions[..., None] / self.theta**powers
        tokens = ids.shape[1]
        earlier = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        same = documents[:, None, :, None] == documents[:, None, None, :]
        mask = same & earlier
        states = self.embedding(ids)
        for layer in self.layers:
            states = layer(states, angles, mask)
        return self.output(self.norm(states))


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        inner = config.intermediate_size
        self.width = config.head_dim
        self.queries = nn.Linear(size, config.num_attention_heads * self.width, bias=False)
        self.keys = nn.Linear(size, config.num_key_value_heads * self.width, bias=False)
        self.values = nn.Linear(size, config.num_key_value_heads * self.width, bias=False)
        self.projection = nn.Linear(config.num_attention_heads * self.width, size, bias=False)
        self.gate = nn.Linear(size, inner, bias=False)
        self.up = nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)
        self.attention_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.mlp_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)

    def forward(
        self, states: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        normed = self.attention_norm(states)
        queries = rotated(self.heads(self.queries(normed)), angles)
        keys = rotated(self.heads(self.keys(normed)), angles)
        values = self.heads(self.values(normed))
        seen = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        states = states + self.projection(seen.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(states)
        outputs = self.down(silu(self.gate(normed)) * self.up(normed))
        return states + outputs

    def heads(self, states: torch.Tensor) -> torch.Tensor:
        """Returns [rows, heads, tokens, width] of [rows, tokens, heads * width]."""
        return states.unflatten(-1, (-1, self.width)).transpose(1, 2)


def rotated(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    cos = angles.cos()[:, None]
    sin = angles.sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
