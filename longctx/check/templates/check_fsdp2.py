"""A loop with FSDP2, torch's fully_shard: longctx check-step FILE --processes 2."""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from longctx.check import Probe, Step, record
from longctx.check.loop import padded_batches, place, targets_of


def make(probe: Probe) -> Step:
    _, ranks = place()

    # PUT YOURS HERE: a small model of your type, as transformers call it, such as "gemma3_text".
    model = probe.model("llama")

    # PUT YOURS HERE: the micro-batches of this rank, from `probe.rows`, with your collator.
    batches = padded_batches(probe)

    with record(model) as seen:  # before anything shards the model
        if ranks > 1:
            mesh = init_device_mesh("cpu", (ranks,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)

        # PUT YOURS HERE: forward and backward of all micro-batches, without clipping.
        targets = targets_of(batches)
        for batch in batches:
            labels = batch.pop("labels")
            logits = model(**batch, use_cache=False).logits
            losses = cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
            )
            loss = losses / targets
            (loss * ranks).backward()  # FSDP2 takes the mean over ranks
        return seen.step()
