"""DeepSpeed's Ulysses for transformers (ALST), for `bench.check_stacks`, with the stand-in of
extras/flash_attn_cpu where flash attention is asked for.

Its attention, and its split of batches over ranks; loss and reduction are lines here.
"""

import os
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import cross_entropy

from bench.check_stacks import Make, ranks
from bench.check_stacks_loops import add_up_over, of_all_ranks
from bench.check_stacks_ringmaster import filled
from bench.check_stacks_rings import IGNORED, WINDOW, connect
from longctx.check import Probe, Step, record

Batch = dict[str, torch.Tensor]


def rows_of(probe: Probe, packed: bool) -> list[list[Batch]]:
    """Returns the rows of each rank, all of one length, which is a multiple of the number of ranks:
    all documents of a rank in one row, or each in one."""
    _, everyone = connect()
    documents = [probe.rows[rank::everyone] for rank in range(everyone)]
    rows = [[mine] if packed else [[row] for row in mine] for mine in documents]
    lengths = [sum(len(each["input_ids"]) for each in row) for mine in rows for row in mine]
    longest = -(-max(lengths) // everyone) * everyone
    return [[filled(row, probe, longest) for row in mine] for mine in rows]


def deepspeed(attention: str, *, packed: bool, kind: str = "llama", **sizes: Any) -> Make:
    def make(probe: Probe) -> Step:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed as library
        import deepspeed.runtime.sequence_parallel.parallel_state_sp as groups
        from deepspeed.runtime.sequence_parallel.ulysses_sp import (
            UlyssesSPAttentionHF,
            UlyssesSPDataLoaderAdapter,
        )
        from flash_attn.transformers_on_cpu import allow
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        rank, everyone = connect()
        allow()
        with patch("deepspeed.comm.torch.build_shm_op", lambda: None):  # it would compile C++
            library.init_distributed("gloo")
        model = probe.model(kind, **sizes)
        model.set_attn_implementation(attention)
        plain = ALL_ATTENTION_FUNCTIONS[attention]
        groups._release_sequence_parallel_groups()  # of the set-up before
        UlyssesSPAttentionHF.register_with_transformers(
            model, attention, sequence_parallel_size=everyone, micro_batch_size=1
        )
        whole = rows_of(probe, packed)[rank]
        loader = UlyssesSPDataLoaderAdapter(
            whole,
            sp_rank=groups.get_sequence_parallel_rank(),
            sp_group=groups.get_sequence_parallel_group(),
            sp_world_size=everyone,
            device="cpu",
        )
        targets = of_all_ranks(sum(int((each["labels"][:, 1:] != IGNORED).sum()) for each in whole))
        with record(model) as seen:
            for batch in loader:
                labels = batch.pop("shift_labels")
                logits = model(**batch, use_cache=False).logits
                total = cross_entropy(logits[0], labels[0], reduction="sum")
                (total / targets).backward()
            add_up_over(model.parameters(), 1.0)
            ALL_ATTENTION_FUNCTIONS[attention] = plain
            return seen.step(rows=[batch["input_ids"][0] for batch in whole])

    return make


DEEPSPEED: dict[str, Make] = {}
if ranks() > 1:
    WINDOWED = {"kind": "mistral", "sliding_window": WINDOW}
    for attention, words in (("sdpa", "SDPA"), ("flash_attention_2", "flash")):
        name = f"DeepSpeed Ulysses, {words}"
        DEEPSPEED |= {
            f"{name}, documents alone": deepspeed(attention, packed=False),
            f"{name}, documents alone, Mistral with windows": deepspeed(
                attention, packed=False, **WINDOWED
            ),
            f"{name}, packed rows": deepspeed(attention, packed=True),
            f"{name}, packed rows, Mistral with windows": deepspeed(
                attention, packed=True, **WINDOWED
            ),
        }
