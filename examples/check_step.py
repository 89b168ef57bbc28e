"""What `longctx check-step` says of transformers' padding-free collator, with a model that does not
keep documents apart in it:

longctx check-step examples/check_step.py
"""

from typing import Any

from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from longctx.check import Probe
from longctx.check.trainer import arguments


def make(probe: Probe) -> Any:
    """Returns the trainer to check, on the documents of a probe."""
    args = TrainingArguments(
        **arguments(per_device_train_batch_size=12, gradient_accumulation_steps=probe.micro_batches)
    )
    return Trainer(probe.model("gpt_oss"), args, DataCollatorWithFlattening(), probe.rows)
