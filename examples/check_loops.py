"""Loops of one's own, each with what it takes to check one of its steps (docs/check-step.md):

longctx check-step examples/check_loops.py --make with_accelerate --processes 2
longctx check-step examples/check_loops.py --make like_torchtitan --processes 2
longctx check-step examples/check_loops.py --make like_megatron --processes 2
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from longctx.check import Probe, Step, record
from longctx.check.record import reference_of, whole

IGNORED = -100


def group() -> tuple[int, int]:
    """Returns rank and number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def padded(probe: Probe, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Returns rows of ids and labels, padded at the right."""
    longest = max(len(row["input_ids"]) for row in rows)
    fillers = {"input_ids": probe.pad, "labels": IGNORED, "attention_mask": 0}
    columns = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {
        name: torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in columns])
        for name, filler in fillers.items()
    }


# --- accelerate by hand: a model of transformers, DDP, and a loss over the targets of all processes


def with_accelerate(probe: Probe) -> Step:
    from accelerate import Accelerator

    accelerator, (rank, ranks) = Accelerator(cpu=True), group()
    mine = [
        padded(probe, rows[rank::ranks])
        for rows in (probe.rows[n :: probe.micro_batches] for n in range(probe.micro_batches))
        if rows[rank::ranks]
    ]
    model = probe.model("qwen3")
    targets = torch.tensor(sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in mine))
    targets = accelerator.reduce(targets)
    with record(model) as seen:
        wrapped = accelerator.prepare(model)
        for number, batch in enumerate(mine):
            labels = batch.pop("labels")
            with (
                accelerator.accumulate(wrapped)
                if number == len(mine) - 1
                else accelerator.no_sync(wrapped)
            ):
                logits = wrapped(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)
                loss = cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / targets
                accelerator.backward(loss * ranks)  # DDP takes the mean over ranks
        return seen.step()


# --- like torchtitan: a model of its own, FSDP2, rows of a fixed length that are cut from a stream
# of documents


class Block(nn.Module):
    """A block with torchtitan's names, whose attention keeps documents apart."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, heads, keys, width = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.wq, self.wk, self.wv = (
            nn.Linear(size, count * width, bias=False) for count in (heads, keys, keys)
        )
        self.wo = nn.Linear(heads * width, size, bias=False)
        self.w1, self.w2, self.w3 = (
            nn.Linear(*pair, bias=False) for pair in _mlp(size, config.intermediate_size)
        )
        self.attention_norm, self.ffn_norm = (
            nn.RMSNorm(size, eps=config.rms_norm_eps) for _ in range(2)
        )
        self.width = width

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        q, k, v = (
            weight(normed).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for weight in (self.wq, self.wk, self.wv)
        )
        q, k = (_rotated(each, rotation) for each in (q, k))
        seen = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + self.wo(seen.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        return x + self.w2(silu(self.w1(normed)) * self.w3(normed))


def _mlp(size: int, width: int) -> tuple[tuple[int, int], ...]:
    return (size, width), (width, size), (size, width)


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Titan(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict(
            {str(n): Block(config) for n in range(config.num_hidden_layers)}
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.theta, self.width = config.rope_parameters["rope_theta"], config.head_dim

    def forward(
        self, ids: torch.Tensor, documents: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        powers = torch.arange(0, self.width, 2) / self.width
        rotation = positions[..., None] / self.theta**powers
        same = documents[:, None, :, None] == documents[:, None, None, :]
        mask = same & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = layer(x, rotation, mask)
        return self.output(self.norm(x))


NAMES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
OF_BLOCKS = {f"w{each}": f"self_attn.{each}_proj" for each in "qkvo"}
OF_BLOCKS |= {"w1": "mlp.gate_proj", "w2": "mlp.down_proj", "w3": "mlp.up_proj"}
OF_BLOCKS |= {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def theirs(name: str) -> str:
    """Returns a parameter's name in the model of transformers."""
    parts = name.split(".")
    if parts[0] == "layers":
        return f"model.layers.{parts[1]}.{OF_BLOCKS[parts[2]]}.weight"
    return f"{NAMES[parts[0]]}.weight"


def stream(probe: Probe, length: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields ids, labels, documents and positions of rows with whole documents, filled up with
    documents of padding."""
    rows: list[list[tuple[int, int, int, int]]] = [[]]
    for number, row in enumerate(probe.rows):
        labels = [*row["labels"][1:], IGNORED]
        tokens = list(
            zip(row["input_ids"], labels, [number] * len(labels), range(len(labels)), strict=True)
        )
        if len(rows[-1]) + len(tokens) > length:
            rows.append([])
        rows[-1] += tokens
    for tokens in rows:
        tokens += [(probe.pad, IGNORED, -1 - at, 0) for at in range(length - len(tokens))]
        yield tuple(torch.tensor(column)[None] for column in zip(*tokens, strict=True))


def like_torchtitan(probe: Probe) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    (rank, ranks), model = group(), probe.model("llama")
    reference, ours = reference_of(model), Titan(model.config)
    weights = dict(model.named_parameters())
    ours.load_state_dict({name: weights[theirs(name)].detach() for name in ours.state_dict()})
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        for part in (*ours.layers.values(), ours):
            fully_shard(part, mesh=mesh)
    rows = list(stream(probe, max(128, *probe.lengths)))
    rows += [
        tuple(torch.full_like(column, IGNORED if n == 1 else 0) for n, column in enumerate(rows[0]))
    ] * (-len(rows) % ranks)
    targets, calls = sum(int((row[1] != IGNORED).sum()) for row in rows), []
    for ids, labels, documents, positions in rows[rank::ranks]:
        logits = ours(ids, documents, positions)
        loss = (
            cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            / targets
        )
        (loss * ranks).backward()  # FSDP2 takes the mean over ranks
        calls.append(ids)
    gradients = {
        theirs(name): whole(weight.grad)
        for name, weight in ours.named_parameters()
        if weight.grad is not None
    }
    return Step(reference, gradients, calls)


# --- like Megatron: sums of losses and numbers of targets over micro-batches, gradients in buffers
# of their own, one all-reduce


def like_megatron(probe: Probe) -> Step:
    (rank, ranks), model = group(), probe.model("llama")
    buffers = {
        weight: torch.zeros_like(weight, dtype=torch.float32) for weight in model.parameters()
    }
    targets = torch.zeros((), dtype=torch.int64)
    with record(model) as seen:
        for rows in (
            probe.rows[n :: probe.micro_batches][rank::ranks] for n in range(probe.micro_batches)
        ):
            if not rows:
                continue
            batch = padded(probe, rows)
            labels = batch["labels"][:, 1:]
            loss_mask = (labels != IGNORED).float()
            logits = model(
                batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
            ).logits[:, :-1]
            losses = cross_entropy(
                logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED
            )
            (losses * loss_mask).sum().backward()
            targets += loss_mask.sum().long()
            for weight, main_grad in buffers.items():
                if weight.grad is not None:
                    main_grad += weight.grad
                    weight.grad = None
        if ranks > 1:
            for each in (targets, *buffers.values()):
                dist.all_reduce(each)
        for weight, main_grad in buffers.items():
            weight.grad = main_grad / targets
        return seen.step()
