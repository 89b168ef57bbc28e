"""Axolotl's context parallelism, and axolotl-ringmaster, for `bench.check_stacks`: on their own
hooks, with the stand-in of extras/flash_attn_cpu where they call flash-attn.

FSDP2, which takes the mean of gradients over ranks, is a line here.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from bench.check_stacks import Make, ranks
from bench.check_stacks_loops import add_up_over
from bench.check_stacks_rings import IGNORED, WINDOW, connect, let_ring_flash_attn_import
from longctx.check import Probe, Step, record


def batch_of(rows: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    """Returns documents in one row, as a collator of packed rows does: labels are not shifted, and
    none is at the first token of a document."""
    ids = [token for row in rows for token in row["input_ids"]]
    labels = [token for row in rows for token in (IGNORED, *row["labels"][1:])]
    positions = [place for row in rows for place in range(len(row["input_ids"]))]
    columns = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {name: torch.tensor([column]) for name, column in columns.items()}


def filled(rows: Sequence[dict[str, list[int]]], probe: Probe, multiple: int) -> dict[str, Any]:
    """Returns documents in one row, with padding as a last document up to a multiple of tokens."""
    more = -sum(len(row["input_ids"]) for row in rows) % multiple
    padding = {"input_ids": [probe.pad] * more, "labels": [IGNORED] * more}
    return batch_of([*rows, padding] if more else rows)


def ringmaster(
    backend: str, *, inner: str = "sdpa", balance: str = "none", kind: str = "llama", **sizes: Any
) -> Make:
    """The model's loss over `num_items_in_batch`, as Trainer takes it, under
    `ContextParallelContextManager`."""

    def make(probe: Probe) -> Step:
        import ringmaster as library
        from flash_attn.transformers_on_cpu import allow

        _, everyone = connect()
        allow()
        model = probe.model(kind, **sizes)
        config = library.RingmasterConfig(
            size=everyone,
            backend=library.Backend(backend),
            load_balance=library.LoadBalance(balance),
        )
        runtime = library.setup(
            config,
            num_kv_heads=model.config.num_key_value_heads,
            device_type="cpu",
            inner_attn=inner,
        )
        model.set_attn_implementation(runtime.attn_implementation)
        batches = [
            batch_of(probe.rows[number :: probe.micro_batches])
            for number in range(probe.micro_batches)
        ]
        targets = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)
        parallel = library.ContextParallelContextManager(
            [model],
            runtime.cp_group,
            gradient_accumulation_steps=probe.micro_batches,
            load_balance=runtime.shard_load_balance,
        )
        model.train()
        with record(model) as seen, parallel:
            for batch in batches:
                model(**batch, num_items_in_batch=targets, use_cache=False).loss.backward()
            add_up_over(model.parameters(), 1 / everyone)
            return seen.step(rows=[batch["input_ids"][0] for batch in batches])

    return make


@cache
def manager_of_axolotl() -> Any:
    """Returns Axolotl's context of sequence parallelism over all ranks: flash attention of
    transformers is ring-flash-attn's llama3 from then on."""
    from flash_attn.transformers_on_cpu import allow

    allow()
    let_ring_flash_attn_import()
    from axolotl.utils.ctx_managers.sequence_parallel import SequenceParallelContextManager
    from axolotl.utils.schemas.enums import RingAttnFunc
    from torch.distributed.device_mesh import init_device_mesh

    return SequenceParallelContextManager(
        models=[],
        context_parallel_size=ranks(),
        gradient_accumulation_steps=1,
        ring_attn_func=RingAttnFunc.VARLEN_LLAMA3,
        heads_k_stride=1,
        gather_outputs=False,
        device_mesh=init_device_mesh("cpu", (ranks(),), mesh_dim_names=("cp",)),
    )


def mean_as_nccl(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
    """Reduces as NCCL does, which rounds a mean of whole numbers down, and Gloo refuses."""
    if op == dist.ReduceOp.AVG and not tensor.is_floating_point():
        sum_of_ranks(tensor, group=group)
        tensor //= dist.get_world_size(group)
    else:
        sum_of_ranks(tensor, op=op, group=group)


sum_of_ranks = dist.all_reduce


def axolotl(kind: str = "llama", **sizes: Any) -> Make:
    """`SequenceParallelContextManager` with `varlen_llama3`, on one row of packed documents."""

    def make(probe: Probe) -> Step:
        _, everyone = connect()
        model = probe.model(kind, **sizes)
        parallel = manager_of_axolotl()
        model.set_attn_implementation("flash_attention_2")
        parallel.models = [model]
        batch = filled(probe.rows, probe, everyone)
        row = batch["input_ids"][0]
        targets = int((batch["labels"][:, 1:] != IGNORED).sum())
        model.train()
        on_cpu = patch.object(torch.cuda, "current_device", lambda: torch.device("cpu"))
        means = patch.object(dist, "all_reduce", mean_as_nccl)
        with on_cpu, means, record(model) as seen, parallel:
            model(**batch, num_items_in_batch=targets, use_cache=False).loss.backward()
            add_up_over(model.parameters(), 1 / everyone)
            return seen.step(rows=[row])

    return make


RINGMASTER: dict[str, Make] = {}
AXOLOTL_PARALLEL: dict[str, Make] = {}
if ranks() > 1:
    WINDOWED = {"kind": "mistral", "sliding_window": WINDOW}
    FLASH = {"inner": "flash_attention_2"}
    RINGMASTER = {
        "ringmaster, Ulysses, SDPA": ringmaster("ulysses"),
        "ringmaster, Ulysses, SDPA, Mistral with windows": ringmaster("ulysses", **WINDOWED),
        "ringmaster, Ulysses, flash": ringmaster("ulysses", **FLASH),
        "ringmaster, Ulysses, flash, Mistral with windows": ringmaster(
            "ulysses", **FLASH, **WINDOWED
        ),
        "ringmaster, ring, flash": ringmaster("ring", **FLASH),
        "ringmaster, ring, flash, Mistral with windows": ringmaster("ring", **FLASH, **WINDOWED),
        "ringmaster, ring, flash, `head_tail`": ringmaster("ring", balance="head_tail", **FLASH),
        "ringmaster, ring, flash, `distflash`": ringmaster("ring", balance="distflash", **FLASH),
    }
    AXOLOTL_PARALLEL = {
        "Axolotl, `context_parallel_size=2`": axolotl(),
        "Axolotl, `context_parallel_size=2`, Mistral with windows": axolotl(**WINDOWED),
    }
