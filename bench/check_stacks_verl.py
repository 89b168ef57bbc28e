"""verl's supervised step, for `bench.check_stacks`: batches, losses and Ulysses of its FSDP engine,
with the stand-in of extras/flash_attn_cpu.

FSDP, which takes the mean of gradients over ranks, is a line here.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from bench.check_stacks import Make, ranks
from bench.check_stacks_loops import add_up_over, parts
from bench.check_stacks_rings import connect
from longctx.check import Probe, Step, record


def engine_of(model: Any, size: int) -> Any:
    """Returns an engine around a model that no FSDP wraps, with a group of Ulysses of `size`."""
    from torch.distributed.device_mesh import init_device_mesh
    from verl.models.transformers import monkey_patch
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    engine = object.__new__(FSDPEngineWithLMHead)
    engine.module = model
    engine.engine_config = SimpleNamespace()  # all by default
    engine.pad_to_length = False
    engine._autocast_dtype = torch.float32
    engine.ulysses_sequence_parallel_size = size
    engine.use_ulysses_sp = size > 1
    engine.ulysses_device_mesh = None
    group = None
    if size > 1:
        shape = (ranks() // size, size)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "sp"))
        engine.ulysses_device_mesh = mesh
        group = mesh["sp"].get_group()
    set_ulysses_sequence_parallel_group(group)
    with patch.object(monkey_patch, "is_trl_available", lambda: False):  # for PPO's values only
        monkey_patch.apply_monkey_patch(model, ulysses_sp_size=size)
    return engine


def data_of(probe: Probe, documents: list[int]) -> Any:
    """Returns documents as verl's SFT dataset gives them to an engine."""
    from verl.utils import tensordict_utils

    ids = [torch.tensor(probe.documents[number]) for number in documents]
    masks = []
    for number, each in zip(documents, ids, strict=True):
        trained = [probe.trained(number, place) for place in range(len(each))]
        masks.append(torch.tensor(trained, dtype=torch.long))
    columns = {
        "input_ids": ids,
        "position_ids": [torch.arange(len(each)) for each in ids],
        "loss_mask": masks,
    }
    nested = {
        name: torch.nested.as_nested_tensor(each, layout=torch.jagged)
        for name, each in columns.items()
    }
    settings = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": len(documents) // probe.micro_batches,
        "temperature": 1.0,
        "use_remove_padding": True,
    }
    return tensordict_utils.get_tensordict(nested, settings)


def verl(*, ulysses: bool = False, kind: str = "llama", **sizes: Any) -> Make:
    """`forward_backward_batch` with `sft_loss`: each rank has documents of its own, or with Ulysses
    a part of all."""

    def make(probe: Probe) -> Step:
        from flash_attn.transformers_on_cpu import allow
        from verl.workers.utils.losses import sft_loss

        _, everyone = connect(alone=True)
        allow()
        model = probe.model(kind, **sizes)
        model.set_attn_implementation("flash_attention_2")
        documents = list(range(len(probe.rows)))
        mine = documents if ulysses else [each for part in parts(documents, probe) for each in part]
        engine = engine_of(model, everyone if ulysses else 1)
        current = patch.object(torch.cuda, "current_device", lambda: torch.device("cpu"))
        with current, record(model) as seen:
            objective = partial(sft_loss, None)  # it reads no settings
            engine.forward_backward_batch(data_of(probe, mine), objective)
            add_up_over(model.parameters(), 1 / everyone)
            if not ulysses:
                return seen.step()
            row = [token for ids in probe.documents for token in ids]
            return seen.step(rows=[torch.tensor(row)])

    return make


VERL: dict[str, Make] = {"verl, `sft_loss`": verl()}
if ranks() > 1:
    VERL |= {
        "verl, `sft_loss`, Ulysses": verl(ulysses=True),
        "verl, `sft_loss`, Ulysses, one head of keys": verl(ulysses=True, num_key_value_heads=1),
        "verl, `sft_loss`, Ulysses, Mistral with windows": verl(
            ulysses=True, kind="mistral", sliding_window=16
        ),
    }
