"""Trains heads of an encoder on whole documents, each split over the best number of processes: a
classifier and embeddings.

    torchrun --standalone --nproc-per-node 2 examples/encoder_heads.py

Runs in less than a minute on two CPU cores; needs `pip install '.[huggingface]'`. The encoder is a
small ModernBERT with random weights, so nothing is downloaded. The classifier learns from which
file a document is, by its first token; embeddings, the mean of all tokens, learn which two
documents are halves of one text. Loss and gradients equal those of a single process that runs the
documents one by one with plain attention.
"""

from typing import Any

import torch
import torch.distributed as dist
from sample_documents import read_documents, report
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel

from longctx import HardwareProfile, Plan, make_plan, pack_documents
from longctx.attention import warm_up
from longctx.hf.attention import model_inputs, prepare
from longctx.planning.layout import Layout

FILES = 3
TEMPERATURE = 0.1


class Heads(torch.nn.Module):
    """An encoder, a classifier of documents and a projection to embeddings."""

    def __init__(self) -> None:
        super().__init__()
        size = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        }
        none = dict.fromkeys(
            ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
        )
        config = AutoConfig.for_model(
            "modernbert", vocab_size=256, global_attn_every_n_layers=2, **size, **none
        )
        # Or from_pretrained(name); of BERT with add_pooling_layer=False.
        self.encoder = AutoModel.from_config(config)
        self.classifier = torch.nn.Linear(64, FILES)
        self.projection = torch.nn.Linear(64, 32)

    def loss(
        self, first: torch.Tensor, mean: torch.Tensor, labels: torch.Tensor, mine: torch.Tensor
    ) -> torch.Tensor:
        """Returns the part of the step's loss that belongs to the documents `mine`; first and mean
        are [documents, 64]."""
        classified = F.cross_entropy(self.classifier(first[mine]), labels[mine], reduction="sum")
        embedded = F.normalize(self.projection(mean), dim=1)
        itself = torch.eye(len(mean), dtype=torch.bool)
        similar = (embedded @ embedded.T / TEMPERATURE).masked_fill(itself, -torch.inf)
        # Documents 2k and 2k + 1 are halves of one text.
        matched = F.cross_entropy(similar[mine], mine ^ 1, reduction="sum")
        return (classified + matched) / len(labels)


def pool_documents(hidden: torch.Tensor, layout: Layout, documents: int, how: str) -> torch.Tensor:
    """Returns the mean or the first token's hidden states of every document, [documents, hidden],
    the same on every rank.

    Documents of other micro-batches are zero, so that the results of all micro-batches of a step
    can be added. `hidden` is [tokens, hidden] in the order of the layout; rows after its tokens are
    padding. Backward sums the gradients of all ranks, so each document's loss is computed on one
    rank only. Collective: every rank calls it for every micro-batch, in the same order.
    """
    states = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    # So that a rank without tokens takes part in backward.
    places, vectors = list[int](), [states[:0]]
    for shard in layout.shards:
        rows = states[shard.offset : shard.offset + shard.tokens]
        if how == "mean":
            vectors.append(rows.sum(0, keepdim=True) / shard.length)
        elif any(start == 0 < stop for start, stop in (shard.head, shard.tail)):
            vectors.append(rows[:1])
        else:
            continue
        places.append(shard.document)
    pooled = states.new_zeros(documents, states.shape[1])
    return SumOverRanks.apply(
        pooled.index_add(0, torch.tensor(places, dtype=torch.int64), torch.cat(vectors))
    )


class SumOverRanks(torch.autograd.Function):
    """Sums a tensor over ranks; backward sums the gradients, as every rank's sum contains every
    rank's part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def build_model() -> Heads:
    torch.manual_seed(0)
    return Heads()


def read_halves(step: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns the halves of every text of a step, and from which file each is."""
    texts = read_documents(step)
    halves = [half for text in texts for half in text.tensor_split(2)]
    return halves, torch.tensor(
        [(step + text) % FILES for text in range(len(texts)) for _ in range(2)]
    )


def forward_backward(
    model: Heads, documents: list[torch.Tensor], labels: torch.Tensor
) -> tuple[float, Plan]:
    """Returns the loss of a step and its plan, and leaves the gradients in the model; the same on
    every rank."""
    profile, rank, ranks = HardwareProfile.load("cpu-2core"), dist.get_rank(), dist.get_world_size()
    plan = make_plan(
        [len(document) for document in documents],
        ranks=ranks,
        tokens_per_rank=1024,
        profile=profile,
    )
    micro_batches, _ = pack_documents(plan, rank, documents)
    first, mean = torch.zeros(len(documents), 64), torch.zeros(len(documents), 64)
    # Embeddings of all documents meet in the loss, so backward comes after all of them.
    for batch in micro_batches:
        hidden = model.encoder(**model_inputs(model.encoder, batch)).last_hidden_state[0]
        first = first + pool_documents(hidden, batch.layout, len(documents), how="first")
        mean = mean + pool_documents(hidden, batch.layout, len(documents), how="mean")
    loss = model.loss(first, mean, labels, torch.arange(rank, len(documents), ranks))
    loss.backward()
    loss = loss.detach()
    for tensor in (loss, *(parameter.grad for parameter in model.parameters())):
        dist.all_reduce(tensor)  # sum, not mean: every rank has the loss of other documents
    return loss.item(), plan


def main() -> None:
    dist.init_process_group("gloo")
    # Connects all ranks, as the first messages may concern only some; on GPUs give the rank's
    # device.
    warm_up(None, "cpu")
    model = build_model()
    # Switches to ring attention; raises an error if this encoder would not be exact.
    prepare(model.encoder, causal=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(10):
        loss, plan = forward_backward(model, *read_halves(step))
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss, plan)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
