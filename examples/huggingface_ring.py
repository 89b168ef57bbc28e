"""Fine-tunes a transformers model on packed documents, each split over the best number of
processes.

    torchrun --standalone --nproc-per-node 2 examples/huggingface_ring.py

Runs in less than a minute on two CPU cores; needs `pip install '.[huggingface]'`. The model is a
small Qwen3 with random weights, so nothing is downloaded. Loss and gradients equal those of a
single process that runs the documents one by one with plain attention.
"""

import torch
import torch.distributed as dist
from sample_documents import read_documents, report
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from longctx import HardwareProfile, Plan, make_plan, pack_documents
from longctx.attention import warm_up
from longctx.hf.attention import model_inputs, prepare


def build_model() -> PreTrainedModel:
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    config = AutoConfig.for_model(
        "qwen3", vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **size
    )
    return AutoModelForCausalLM.from_config(config)  # or from_pretrained(name, ..)


def forward_backward(model: PreTrainedModel, documents: list[torch.Tensor]) -> tuple[float, Plan]:
    """Returns the loss of a step and its plan, and leaves the gradients in the model; the same on
    every rank."""
    profile = HardwareProfile.load("cpu-2core")  # measure yours: `longctx calibrate`
    lengths = [len(document) for document in documents]
    plan = make_plan(lengths, ranks=dist.get_world_size(), tokens_per_rank=2048, profile=profile)
    micro_batches, targets = pack_documents(plan, dist.get_rank(), documents)
    loss = torch.zeros(())
    for batch in micro_batches:
        part = model(**model_inputs(model, batch, targets)).loss
        part.backward()
        loss += part.detach()
    for tensor in (loss, *(parameter.grad for parameter in model.parameters())):
        # sum, not mean: each part is already divided by the targets of the whole step.
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
        loss, plan = forward_backward(model, read_documents(step))
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss, plan)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
