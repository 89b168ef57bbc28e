"""Shows which logits a token changes when two documents share a row: none of the other document,
under any degree.

    torchrun --standalone --nproc-per-node 2 examples/packed_documents_stay_apart.py

Takes seconds on two CPU cores; needs `pip install '.[trl]'`. Small models with random weights, so
nothing is downloaded, run documents A and B as they are, with another first token of A, and with
another last token of A. Logits that differ by a bit are counted. longctx splits both documents over
all processes. Then rank 0 runs the same row by transformers alone: with the masks that transformers
builds, and without them, as accelerate's context parallelism calls a model.
"""

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from accelerate.big_modeling import _attach_context_parallel_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from longctx import HardwareProfile, make_plan, pack_documents
from longctx.attention import warm_up
from longctx.hf.attention import model_inputs, prepare

LENGTHS = (61, 50)
WINDOW, VOCABULARY = 8, 64
SLIDING, FULL = "sliding_attention", "full_attention"
LAYERS = {"qwen3": [FULL, FULL], "ministral": [SLIDING, SLIDING], "gpt_oss": [SLIDING, FULL]}
Documents = list[torch.Tensor]
Logits = Callable[[Documents], torch.Tensor]


def build_model(name: str) -> Any:
    """Returns a model with the same random weights on every rank."""
    torch.manual_seed(0)
    size = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    size |= {
        "vocab_size": VOCABULARY,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "sliding_window": WINDOW,
    }
    # All experts take all tokens. If only some did, a new token would change how many rows others
    # share a matrix product with, and so how others are rounded: in any stack, and without any
    # attention between them.
    size |= {
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "pad_token_id": None,
        "eos_token_id": None,
    }
    config = AutoConfig.for_model(name, layer_types=LAYERS[name], **size)
    # sdpa, but of gpt_oss eager, as sdpa has no sinks.
    return AutoModelForCausalLM.from_config(config).eval()


def reach(name: str) -> int:
    """Returns the last token of A that the first can change, over all layers."""
    steps = [LENGTHS[0] if kind == FULL else WINDOW - 1 for kind in LAYERS[name]]
    return min(sum(steps), LENGTHS[0] - 1)


def split(model: Any, documents: Documents) -> torch.Tensor:
    """Returns the logits of longctx, [tokens, vocabulary], with every document on all ranks."""
    ranks, profile = dist.get_world_size(), HardwareProfile.load("cpu-2core")
    plan = make_plan(
        LENGTHS,
        ranks=ranks,
        tokens_per_rank=sum(LENGTHS),
        profile=profile,
        mode="static",
        degree=ranks,
    )
    assert plan.degrees == {ranks: 2}, plan.degrees
    (batch,), _ = pack_documents(plan, dist.get_rank(), documents)
    logits, whole = (
        model(**model_inputs(model, batch)).logits[0],
        torch.zeros(sum(LENGTHS), VOCABULARY),
    )
    for shard in batch.layout.shards:
        places = torch.cat([torch.arange(*span) for span in (shard.head, shard.tail)])
        whole[places + sum(LENGTHS[: shard.document])] = logits[
            shard.offset : shard.offset + len(places)
        ]
    dist.all_reduce(whole)  # every token is on one rank, and zero on the others
    return whole


def whole(model: Any, documents: Documents, **options: Any) -> torch.Tensor:
    """Returns the logits of transformers for one row that holds all documents."""
    return model(input_ids=torch.cat(documents).unsqueeze(0), **options).logits[0]


def report(
    title: str, run: Logits, documents: Documents, expected: torch.Tensor
) -> list[list[int]]:
    """Prints which logits change, and how far all are from `expected`, without any change.

    Returns the changed tokens of A and of B for another first token of A, then both for another
    last one.
    """
    before, changed = run(documents), []
    for place in (0, -1):
        other = documents[0].clone()
        other[place] = (other[place] + 1) % VOCABULARY
        differs = (run([other, documents[1]]) != before).any(1)
        changed += [part.nonzero().flatten().tolist() for part in differs.split(LENGTHS)]
    if dist.get_rank() == 0:
        counts = [str(len(tokens) or "none") for tokens in (changed[1], changed[3])]
        error = (before - expected).abs().max().item()
        print(
            f"  {title:40}     0 to {max(changed[0]):2}  {counts[0]:>10} {counts[1]:>10} "
            f"{error:10.0e}",
            flush=True,
        )
    return changed


@torch.no_grad()
def main() -> None:
    dist.init_process_group("gloo")
    warm_up(None, "cpu")
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    packed = {"position_ids": torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)}
    trained = {**packed, "use_cache": False}
    say = print if dist.get_rank() == 0 else lambda *words: None
    say(
        f"transformers {version('transformers')}, accelerate {version('accelerate')}: what changes "
        "in A and B,"
    )
    say(
        f"{'of ' + ' and '.join(map(str, LENGTHS)) + ' tokens':42}  A by first  B by first  B by "
        "last     off by"
    )
    for name, kinds in LAYERS.items():
        model, plain = build_model(name), build_model(name)
        prepare(model)
        alone = torch.cat([whole(plain, [document]) for document in documents])
        compare = partial(report, documents=documents, expected=alone)
        say(f"{name}: {', '.join(kinds)}; the first token of A reaches 0 to {reach(name)}")
        ours = compare(f"longctx, degree {dist.get_world_size()}", partial(split, model))
        assert ours == [list(range(reach(name) + 1)), [], [LENGTHS[0] - 1], []]
        if dist.get_rank() == 0:
            compare("transformers", partial(whole, plain))
            compare("transformers, position_ids", partial(whole, plain, **packed))
            compare("transformers, position_ids, no cache", partial(whole, plain, **trained))
            try:
                _attach_context_parallel_hooks(plain)
                compare("the same, by accelerate's CP", partial(whole, plain, **trained))
            except ValueError as refusal:
                say(f"  accelerate's CP refuses: {str(refusal).split(' (')[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
