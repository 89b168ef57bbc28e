"""What DeepSeek V3's split documents send, and its predicted step at 128k, with keys and values or
latents on the wire.

    python bench/latents.py     # a minute; writes results/latents.csv

A step has 32 documents of 131,072 tokens. Sizes are the defaults of transformers' config, 671B
parameters without values; experts are spread over 64 ranks, and backward recomputes everything.
Constants are those of the H100's shipped profile, scaled to this model; nothing was measured.
`received_gb` are the rows of one document that a rank receives in one layer, before they are
expanded. That 64 GPUs hold the model's weights and optimizer is not claimed: only times are
predicted.
"""

import sys
from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness import Table, facts, options
from longctx.hf.attention import replace_attention
from longctx.hf.model import block_name
from longctx.hf.spec import spec_of
from longctx.planning.cost.scaling import scale
from longctx.planning.cost.spec import NO_LATENT, ModelSpec
from longctx.planning.cost.work import work_of
from longctx.planning.planners.planner import make_plan
from longctx.training.described import read_described

PROFILE, LENGTH, DOCUMENTS, EXPERT_RANKS = "h100-nvlink-ib", 131_072, 32, 64
GPUS, BUDGETS, LEVELS = (64, 256), (4096, 8192, 16384), (1, 2)
COLUMNS = [
    "gpus",
    "tokens_per_rank",
    "levels",
    "sent",
    "values",
    "bytes_per_token",
    "received_gb",
    "degree",
    "step_s",
    "exposed_share",
]


def deepseek_v3() -> ModelSpec:
    """Returns the sizes of DeepSeek V3."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("deepseek_v3"), dtype=torch.bfloat16
        )
    replace_attention(model)
    return spec_of(model, model.get_submodule(block_name(model)))


def main() -> None:
    arguments = options(__doc__, "latents.csv").parse_args()
    table = Table(arguments.out, COLUMNS, facts("longctx", "numpy", "transformers"), overwrite=True)
    latents = deepseek_v3()
    keys = replace(
        latents, layers=tuple(replace(layer, latent=NO_LATENT) for layer in latents.layers)
    )
    profile, described = read_described(PROFILE)
    assert described is not None
    for gpus in GPUS:
        for budget in BUDGETS:
            for levels in LEVELS:
                for name, spec in (("keys and values", keys), ("latents", latents)):
                    work = work_of(
                        spec, "bfloat16", recompute="full", expert=EXPERT_RANKS, gpus=gpus
                    )
                    scaled = replace(scale(profile, described.work, work), exchange_levels=levels)
                    plan = make_plan(
                        [LENGTH] * DOCUMENTS, ranks=gpus, tokens_per_rank=budget, profile=scaled
                    )
                    (degree,) = set(plan.degrees)
                    values = spec.layers[0].sent_values(1)
                    received = 2 * values * LENGTH * (degree - 1) / degree / 1e9
                    row = [
                        gpus,
                        budget,
                        levels,
                        name,
                        values,
                        work.kv_bytes,
                        received,
                        degree,
                        plan.makespan_s,
                        plan.exposed_share,
                    ]
                    table.append(dict(zip(COLUMNS, row, strict=True)))
                    print(*row, file=sys.stderr)


if __name__ == "__main__":
    main()
