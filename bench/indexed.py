"""Indexed attention on CPUs: seconds of a step beside the dense path, and bytes on the wire.

    OMP_NUM_THREADS=1 python bench/indexed.py     # minutes; writes results/indexed.csv

Seconds are CPU time of one process (other work on the machine changes it little), forward and
backward of one document by a DeepSeek V3.2 of two layers with four heads, the median of three: with
256 selected keys, and with as many as the document has, which dense kernels compute alone: on CPUs
the reference, as torch's own has no keys that are wider than values. Bytes are counted in what two
ranks hand to their exchange, per row and layer, in bfloat16. Heads, latents and index keys have the
published sizes. Not measured: GPUs.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from harness import Table, facts, options
from longctx.attention.exchange import Exchange
from longctx.data.packing import pack_documents
from longctx.hf.attention import model_inputs, prepare
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.planners.planner import make_plan

LENGTHS = (1024, 2048)
SELECTED = 256
TIMES = 3
PASSES = ("index", "forward", "backward")
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "vocab_size": 512,
    "first_k_dense_replace": 2,
    "index_n_heads": 4,
}
OF_HEADS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
"""Published sizes; those of queries and values are the defaults, 192 and 128."""
COLUMNS = ("what", "tokens", "indexed_s", "dense_s", *(f"{name}_bytes" for name in PASSES))


def made(selected: int, **sizes: int) -> Any:
    config = AutoConfig.for_model("deepseek_v32", index_topk=selected, **SMALL, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    prepare(model)
    return model


def inputs_of(model: Any, length: int, rank: int, ranks: int) -> dict[str, Any]:
    """Returns the inputs of a rank for one document over all ranks."""
    plan = make_plan(
        [length],
        ranks=ranks,
        tokens_per_rank=-(-length // ranks),
        profile=HardwareProfile.load("h100-nvlink-ib"),
    )
    document = torch.arange(length) % 500
    (batch,), targets = pack_documents(plan, rank, [document])
    return model_inputs(model, batch, targets)


def seconds(model: Any, length: int) -> float:
    times = []
    for _ in range(TIMES):
        began = time.process_time()
        model(**inputs_of(model, length, 0, 1)).loss.backward()
        times.append(time.process_time() - began)
    return statistics.median(times)


def count(rank: int, folder: str) -> None:
    """Writes the bytes per row that rank 0 sends in each pass."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    rows = dict.fromkeys(PASSES, 0)
    sent = dict.fromkeys(PASSES, 0)
    start = Exchange.start

    def counting(self: Exchange, outgoing: Sequence[tuple[int, Tensor]], *others: Any) -> Any:
        (name,) = (name for name in PASSES if f", {name} pass" in self.where)
        for _, message in outgoing:
            rows[name] += len(message)
            sent[name] += message.numel() * message.element_size()
        return start(self, outgoing, *others)

    Exchange.start = counting
    model = made(16, **OF_HEADS).bfloat16()
    prepare(model)
    model(**inputs_of(model, 64, rank, 2)).loss.backward()
    if rank == 0:
        of_row = [str(sent[name] // max(1, rows[name])) for name in PASSES]
        Path(folder, "bytes").write_text(" ".join(of_row))
    dist.destroy_process_group()


def main() -> None:
    arguments = options(__doc__, "indexed.csv").parse_args()
    table = Table(arguments.out, COLUMNS, facts("longctx", "torch", "transformers"), overwrite=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(count, (folder,), nprocs=2)
        counted = Path(folder, "bytes").read_text().split()
    names = [f"{name}_bytes" for name in PASSES]
    table.append({"what": "a row of a layer", **dict(zip(names, counted, strict=True))})
    for length in LENGTHS:
        indexed = seconds(made(SELECTED, **OF_HEADS), length)
        dense = seconds(made(length, **OF_HEADS), length)
        row = {"what": "a step", "tokens": length, "indexed_s": indexed, "dense_s": dense}
        table.append(row)
    for row in table.rows:
        print(row)


if __name__ == "__main__":
    main()
