"""An 8B model on 64 ranks: the memory that is estimated for a GPU, and no wait of the host, with
every split and way to save.

Not traced: compiled blocks, whose kept tensors the compiler chooses; adapters, which need a
checkpoint of that size; and the optimizer's offload, as FSDP cannot tell host from device on a CPU.
`test_fake_cuda` has the latter.
"""

import pytest
import torch

from longctx.config import load
from tests.attention.test_host_waits import IDLE, ONCE
from tests.whole_size import FakeDevice, FakeHostWaits, fullest, plan_of, step_2

RANKS, VOCABULARY = 64, 128_256
LENGTHS = [131_072, 60_000, 30_000, 20_000, *[4096] * 20]
MODEL = [
    "model.preset=llama-3.1-8b",
    "model.overrides.num_hidden_layers=8",  # all are alike
    "batch.tokens_per_rank=4096",
    "data.max_length=131072",
    "data.store=none",
    "train.dtype=bfloat16",
    "train.device=cpu",
    "train.compile=false",
    "context.kernel=cpu",  # which needs no workspace
    "context.profile=h100-nvlink-ib",
]
SELECTIVE, FULL = "train.recompute=selective", "train.recompute=full"
LONG = "batch.tokens_per_rank=16384"
TENSOR, PIPELINE = "parallel.tensor_parallel_size=", "parallel.pipeline_parallel_size=4"
CHUNKS = "parallel.pipeline_chunks=2"
FEW_RANKS = ["context.mode=static", "context.degree=8", LONG]
"""So few that blocks are the largest part."""
OFFLOADED = "train.offload_activations=true"
RECOMPUTATION = {
    "nothing saved": [],
    "norms": ["train.recompute=norms"],
    "mlp": ["train.recompute=mlp"],
    "selective": [SELECTIVE],
    "full": [FULL],
}
SETTINGS = {
    **RECOMPUTATION,
    "keys kept": [SELECTIVE, "context.keep_kv=true"],
    "one level": [SELECTIVE, "context.two_level_exchange=false"],
    "weights gathered all step": [FULL, "parallel.reshard_after=step"],
    "gradients reduced at once": [SELECTIVE, "parallel.reduce_after=micro_batch"],
    "gradients reduced at once, weights gathered all step": [
        FULL,
        "parallel.reduce_after=micro_batch",
        "parallel.reshard_after=step",
    ],
    "one micro-batch": [FULL, LONG],
    "copies in every node": [SELECTIVE, "parallel.shard_ranks=8"],
    "MLP in tiles": [SELECTIVE, "train.mlp_tile_tokens=1024"],
    "float32": [SELECTIVE, "train.dtype=float32"],
    "static": [SELECTIVE, "context.mode=static"],
    "heads swapped for tokens": [SELECTIVE, LONG, "context.ulysses_degree=4"],
    "few ranks": [FULL, *FEW_RANKS],
    "few ranks, activations offloaded": [FULL, *FEW_RANKS, OFFLOADED],
    "few ranks, selective": [SELECTIVE, *FEW_RANKS],
    "few ranks, attention offloaded too": [SELECTIVE, *FEW_RANKS, OFFLOADED],
    "matrices split over 4": [SELECTIVE, TENSOR + "4", LONG],
    "matrices split over 8, nothing saved": [TENSOR + "8", LONG],
    "pipeline": [SELECTIVE, PIPELINE, LONG],
    "pipeline, one micro-batch": [FULL, PIPELINE, "batch.tokens_per_rank=32768"],
    "pipeline, interleaved": [FULL, PIPELINE, LONG, CHUNKS],
    "pipeline, matrices split over 2": [
        FULL,
        PIPELINE,
        TENSOR + "2",
        "batch.tokens_per_rank=32768",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_of_a_whole_model(name: str) -> None:
    torch.set_num_threads(1)
    config = load(None, [*MODEL, *SETTINGS[name]], world_size=RANKS)
    plan = plan_of(config, RANKS, VOCABULARY, LENGTHS)
    rank, memory = fullest(config, RANKS, config.model_source(VOCABULARY).spec, plan)
    peak, waits = step_2(config, RANKS, rank, VOCABULARY, plan)
    ratio = memory.total / peak
    print(
        f"{name}: {peak / 2**30:.2f} GiB, estimate {memory.total / 2**30:.2f}, {ratio:.3f}, rank "
        f"{rank}, {memory.moment}"
    )
    assert waits and waits <= ONCE | IDLE
    assert 0.9 < ratio < (1.12 if "interleaved" in name else 1.1)


def test_waits_for_fake_tensors_are_found() -> None:
    fake = FakeDevice(torch.device("cpu"))
    watch = FakeHostWaits(fake)
    on_host = torch.ones(2)
    with fake, watch.watching(iter(())):
        on_device = watch.to_device(on_host) + 1
        assert float(on_host[0]) == float(on_device[0]) == 1.0
        on_host.to(torch.device("cpu"))
        with pytest.raises(RuntimeError):
            on_device.nonzero()
    assert {found.split(" at ")[0] for found in watch.found} == {
        "__float__",
        "nonzero",
        "pageable copy by to",
    }
