"""Ring attention in 60 lines of plain PyTorch, which prints its messages.

    torchrun --standalone --nproc-per-node 2 examples/ring.py

Each rank has two chunks of a document, head and tail, and the result is that of one process.
longctx does the same with packed documents, any degrees, fewer messages, and backward.
"""

import torch
import torch.distributed as dist

LENGTH, HEADS, SIZE = 1000, 2, 16
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Largest score, sum of weights [heads, queries] and weighted values of the keys seen so far."""


def cut(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the positions of a rank's head and tail: a chunk from the front and the back."""
    chunks = torch.arange(LENGTH).tensor_split(2 * ranks)
    return chunks[rank], chunks[-1 - rank]


def attend(state: State, q: torch.Tensor, kv: torch.Tensor, sees: torch.Tensor) -> State:
    """Adds keys and values [2, heads, keys, size] to what queries have seen (online softmax)."""
    most, total, out = state
    scores = q @ kv[0].mT / SIZE**0.5
    scores = scores.masked_fill(~sees, -torch.inf)
    new = torch.maximum(most, scores.amax(-1))
    kept = torch.exp(most - new)
    weights = torch.exp(scores - new[..., None])
    return new, total * kept + weights.sum(-1), out * kept[..., None] + weights @ kv[1]


def nothing(q: torch.Tensor) -> State:
    return torch.full(q.shape[:2], -torch.inf).double(), q.new_zeros(q.shape[:2]), 0 * q


def ring(q: torch.Tensor, kv: torch.Tensor, rank: int, ranks: int, said: list[str]) -> torch.Tensor:
    """Returns attention of this rank's queries to the document, a neighbour's distance a round."""
    head, tail = cut(rank, ranks)
    own = torch.cat([head, tail])
    state = attend(nothing(q), q, kv, sees=own[:, None] >= own)
    for distance in range(1, ranks):
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        rows = len(head) if to > rank else len(own)  # a later rank's queries never see the tail
        positions = torch.cat(cut(source, ranks)[: 1 if source < rank else 2])
        received = kv.new_empty(2, HEADS, len(positions), SIZE)
        messages = [dist.P2POp(dist.isend, kv[:, :, :rows].contiguous(), to)]
        messages.append(dist.P2POp(dist.irecv, received, source))
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        parts = "head" if to > rank else "head and tail"
        said.append(f"round {distance}: rank {rank} sends {parts}, {rows} rows, to rank {to}")
        state = attend(state, q, received, sees=own[:, None] >= positions)
    return state[2] / state[1][..., None]


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    q, k, v = torch.randn(
        3, HEADS, LENGTH, SIZE, generator=torch.Generator().manual_seed(0)
    ).double()
    order = torch.arange(LENGTH)
    _, total, out = attend(nothing(q), q, torch.stack([k, v]), sees=order[:, None] >= order)
    alone = out / total[..., None]  # of one process
    own = torch.cat(cut(rank, ranks))
    pairs = int((own + 1).sum())
    said = [f"rank {rank} has {len(own)} tokens, and {pairs:,} pairs of query and key"]
    split = ring(q[:, own], torch.stack([k, v])[:, :, own], rank, ranks, said)
    assert torch.allclose(split, alone[:, own], rtol=0, atol=1e-12)
    everything: list[list[str]] = [[] for _ in range(ranks)]
    dist.all_gather_object(everything, [*said, f"rank {rank} has the result of one process"])
    if rank == 0:
        print("\n".join(line for lines in zip(*everything, strict=True) for line in lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
