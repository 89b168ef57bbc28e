"""A loop with accelerate: longctx check-step FILE --processes 2."""

from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from longctx.check import Probe, Step, record
from longctx.check.loop import padded_batches, targets_of


def make(probe: Probe) -> Step:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=probe.micro_batches)

    # PUT YOURS HERE: a small model of your type, as transformers call it, such as "gemma3_text".
    model = probe.model("qwen3")

    # PUT YOURS HERE: the micro-batches of this rank, from `probe.rows`, with your collator.
    batches = padded_batches(probe)

    with record(model) as seen:  # before `prepare` wraps the model
        wrapped = accelerator.prepare(model)

        # PUT YOURS HERE: forward and backward of all micro-batches, without clipping.
        targets = targets_of(batches)
        for batch in batches:
            labels = batch.pop("labels")
            with accelerator.accumulate(wrapped):
                logits = wrapped(**batch, use_cache=False).logits
                losses = cross_entropy(
                    logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
                )
                loss = losses / targets
                # DDP takes the mean over ranks, and accelerate that over micro-batches.
                scale = accelerator.num_processes * probe.micro_batches
                accelerator.backward(loss * scale)
        return seen.step()
