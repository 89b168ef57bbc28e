"""A Trainer of transformers: longctx check-step FILE --processes 2."""

from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from longctx.check import Probe
from longctx.check.loop import place
from longctx.check.trainer import arguments


def make(probe: Probe) -> Trainer:
    # PUT YOURS HERE: a small model of your type, as transformers call it, such as "gemma3_text".
    model = probe.model("qwen3")

    # PUT YOURS HERE: your collator.
    collator = DataCollatorWithFlattening()

    # PUT YOURS HERE: what you pass to your trainer, and its class.
    _, ranks = place()
    rows = max(1, len(probe.rows) // (ranks * probe.micro_batches))
    given = arguments(
        per_device_train_batch_size=rows, gradient_accumulation_steps=probe.micro_batches
    )
    return Trainer(
        model=model,
        args=TrainingArguments(**given),
        train_dataset=probe.rows,
        data_collator=collator,
    )
