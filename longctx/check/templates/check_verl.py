"""SFT by the engine of verl 0.9 with FSDP2, on CPUs: longctx check-step FILE --processes 2."""

from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform

from longctx.check import Probe, Step, record
from longctx.check.loop import IGNORED, place


class OnCpu(PlatformCUDA):
    """verl's platform for machines without a GPU."""

    device_name = "cpu"
    device_module = torch.cpu

    def current_device(self) -> str:
        return "cpu"


set_platform(OnCpu())  # before modules of verl ask for one

from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig  # noqa: E402
from verl.workers.engine.fsdp import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.utils.losses import sft_loss  # noqa: E402


def make(probe: Probe) -> Step:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    # PUT YOURS HERE: a small model of your type, as transformers call it, such as "gemma3_text".
    model = probe.model("qwen3")

    # PUT YOURS HERE: the rows of this rank, as your data set makes them of `probe.rows`.
    rank, ranks = place()
    rows = probe.rows[rank::ranks]

    # PUT YOURS HERE: your settings.
    engine_config = FSDPEngineConfig(
        strategy="fsdp2",
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        use_torch_compile=False,
    )
    model_config = SimpleNamespace(
        use_remove_padding=True,
        lora_rank=0,
        enable_activation_offload=False,
        enable_gradient_checkpointing=False,
    )
    data = batch_of(rows)
    tensordict_utils.assign_non_tensor(
        data,
        use_remove_padding=True,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=len(rows) // probe.micro_batches,
        temperature=1.0,
    )

    with record(model) as seen:  # before the engine shards the model
        engine = FSDPEngineWithLMHead(
            model_config, engine_config, FSDPOptimizerConfig(lr=1e-3), CheckpointConfig()
        )
        engine.module = engine._build_fsdp_module(model)
        engine.forward_backward_batch(data, partial(sft_loss, None))
        return seen.step()


def batch_of(rows: list[dict[str, list[int]]]) -> TensorDict:
    """Returns rows in one batch without padding. First tokens, which nothing predicts, have no
    loss."""
    ids = []
    positions = []
    masks = []
    for row in rows:
        ids.append(torch.tensor(row["input_ids"]))
        positions.append(torch.arange(len(row["input_ids"])))
        mask = torch.tensor(row["labels"]) != IGNORED
        mask[0] = False
        masks.append(mask.int())
    columns = {"input_ids": ids, "position_ids": positions, "loss_mask": masks}
    nested = {
        name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
        for name, values in columns.items()
    }
    return TensorDict(nested, batch_size=[len(rows)])
