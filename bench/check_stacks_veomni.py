"""VeOmni's collator, Ulysses and losses, for `bench.check_stacks`, with the stand-in of
extras/flash_attn_cpu.

The step is that of `BaseTrainer.train_step`; FSDP, which takes the mean of gradients over ranks, is
a line here.
"""

from typing import Any

import torch

from bench.check_stacks import Make, ranks
from bench.check_stacks_loops import add_up_over, parts
from bench.check_stacks_rings import WINDOW, connect
from longctx.check import Probe, Step, record


def veomni(*, ulysses: bool, kind: str = "llama", **sizes: Any) -> Make:
    """A step on packed documents: each rank has some, or with Ulysses a part of all."""

    def make(probe: Probe) -> Step:
        from flash_attn.transformers_on_cpu import allow

        _, everyone = connect(alone=True)
        allow()
        from veomni.data.data_collator import MainCollator
        from veomni.distributed.parallel_state import init_parallel_state
        from veomni.ops.kernels.attention import apply_veomni_attention_patch
        from veomni.ops.kernels.cross_entropy import ForCausalLMLoss
        from veomni.utils.loss_utils import count_loss_token, mean_global_loss

        size = everyone if ulysses else 1
        init_parallel_state(
            dp_size=everyone // size,
            dp_shard_size=everyone // size,
            ulysses_size=size,
            device_type="cpu",
        )
        apply_veomni_attention_patch()
        model = probe.model(kind, **sizes)
        model.config._attn_implementation = "veomni_flash_attention_2_with_sp"
        rows = [{name: torch.tensor(values) for name, values in row.items()} for row in probe.rows]
        micro_batches = parts(rows, probe)
        if ulysses:  # all ranks read the same
            micro_batches = [
                rows[number :: probe.micro_batches] for number in range(probe.micro_batches)
            ]
        whole = [torch.cat([row["input_ids"] for row in each]) for each in micro_batches]
        collate = MainCollator()
        batches = [collate(each) for each in micro_batches]
        counted = count_loss_token(batches)
        with record(model) as seen:
            for batch in batches:
                labels = batch.pop("labels")
                logits = model(**batch, use_cache=False).logits
                loss, _, _ = ForCausalLMLoss(logits, labels, probe.vocab_size)
                mine = count_loss_token({"labels": labels})
                sum(mean_global_loss(loss, mine, counted).values()).backward()
            add_up_over(model.parameters(), 1 / everyone)
            return seen.step(rows=whole if ulysses else ())

    return make


VEOMNI: dict[str, Make] = {}
if ranks() == 1:
    VEOMNI = {
        "VeOmni, packed": veomni(ulysses=False),
        "VeOmni, packed, Mistral with windows": veomni(
            ulysses=False, kind="mistral", sliding_window=WINDOW
        ),
    }
else:
    VEOMNI = {
        "VeOmni, Ulysses": veomni(ulysses=True),
        "VeOmni, Ulysses, one head of keys": veomni(ulysses=True, num_key_value_heads=1),
        "VeOmni, Ulysses, Mistral with windows": veomni(
            ulysses=True, kind="mistral", sliding_window=WINDOW
        ),
    }
