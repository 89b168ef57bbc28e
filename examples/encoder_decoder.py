"""Trains an encoder-decoder of transformers on packed documents, sources and targets each split
over several processes.

    torchrun --standalone --nproc-per-node 2 examples/encoder_decoder.py

Runs in less than a minute on two CPU cores; needs `pip install '.[huggingface]'`. The model is a
small T5Gemma with random weights, so nothing is downloaded. It learns to continue a text: the
source is the first two thirds of a document, the target the rest. Loss and gradients equal those of
a single process that runs the documents one by one with plain attention.
"""

import torch
import torch.distributed as dist
from sample_documents import read_documents, report
from transformers import PreTrainedModel, T5GemmaConfig, T5GemmaForConditionalGeneration

from longctx import HardwareProfile, Plan, make_plan
from longctx.attention import warm_up
from longctx.data.packing import pack_seq2seq
from longctx.hf.attention import model_inputs, prepare

START = 2
"""First token that the decoder reads."""


def build_model() -> PreTrainedModel:
    torch.manual_seed(0)
    size = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
    }
    part = {
        "vocab_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 128,
        **size,
    }
    # Or from_pretrained(..).
    return T5GemmaForConditionalGeneration(
        T5GemmaConfig(encoder=part, decoder=part, vocab_size=256)
    )


def read_parts(step: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns sources and targets of a step."""
    documents = read_documents(step)
    cuts = [len(document) * 2 // 3 for document in documents]
    return (
        [document[:cut] for document, cut in zip(documents, cuts, strict=True)],
        [document[cut:] for document, cut in zip(documents, cuts, strict=True)],
    )


def forward_backward(
    model: PreTrainedModel, sources: list[torch.Tensor], targets: list[torch.Tensor]
) -> tuple[float, Plan]:
    """Returns the loss of a step and its plan, and leaves the gradients in the model; the same on
    every rank."""
    profile = HardwareProfile.load("cpu-2core")  # measure yours: `longctx calibrate`
    lengths = [len(source) + len(target) for source, target in zip(sources, targets, strict=True)]
    plan = make_plan(lengths, ranks=dist.get_world_size(), tokens_per_rank=2048, profile=profile)
    micro_batches, labels = pack_seq2seq(plan, dist.get_rank(), sources, targets, start_token=START)
    loss = torch.zeros(())
    for batch in micro_batches:
        part = model(**model_inputs(model, batch, labels)).loss
        part.backward()
        loss += part.detach()
    for tensor in (loss, *(parameter.grad for parameter in model.parameters())):
        # sum, not mean: each part is already divided by the labels of the whole step.
        dist.all_reduce(tensor)
    return loss.item(), plan


def main() -> None:
    dist.init_process_group("gloo")
    # Connects all ranks, as the first messages may concern only some; on GPUs give the rank's
    # device.
    warm_up(None, "cpu")
    model = build_model()
    prepare(model)  # switches to ring attention; raises an error if this model would not be exact
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(10):
        loss, plan = forward_backward(model, *read_parts(step))
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss, plan)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
