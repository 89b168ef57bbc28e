"""axolotl-ringmaster, Axolotl's context parallelism, for `bench.check_stacks`: on its own hooks,
with the stand-in of extras/flash_attn_cpu where it calls flash-attn.

FSDP2, which takes the mean of gradients over ranks, is a line here.
"""

from collections.abc import Sequence
from typing import Any

import torch

from bench.check_stacks import Make, ranks
from bench.check_stacks_loops import add_up_over
from bench.check_stacks_rings import IGNORED, WINDOW, connect
from longctx.check import Probe, Step, record


def batch_of(rows: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    """Returns documents in one row, as a collator of packed rows does: labels are not shifted, and
    none is at the first token of a document."""
    ids = [token for row in rows for token in row["input_ids"]]
    labels = [token for row in rows for token in (IGNORED, *row["labels"][1:])]
    positions = [place for row in rows for place in range(len(row["input_ids"]))]
    columns = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {name: torch.tensor([column]) for name, column in columns.items()}


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


RINGMASTER: dict[str, Make] = {}
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
