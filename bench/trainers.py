"""CPU seconds of TRL's SFTTrainer on two processes: dynamic context parallelism beside plain
batches and TRL's packing.

    torchrun --nproc-per-node 2 bench/trainers.py          # about 20 minutes on two cores

An epoch of 64 documents, of which one in eight is long, with the same model, optimizer and
documents per step. Every way is trained in turn, several rounds long, in the same processes with
one thread each. A rank that waits uses no CPU time, so the slowest rank's CPU time is the time that
the epoch would take on a core for each rank. Writes results/trainers.csv.

Plain transformers has no kernel for packed rows on CPUs: it computes all pairs of a packed row
under a mask. With flash-attn on a GPU it computes only those inside documents.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import torch.distributed as dist
import transformers
from trl import SFTConfig, SFTTrainer

from harness import Table, command, facts, options
from longctx.trainers import dynamic_context_parallel

DOCUMENTS, LONG, STEPS = 64, 8, 4
SHORT_TOKENS, LONG_TOKENS = (64, 512), (2048, 4096)
VOCABULARY, LAYERS, HIDDEN = 4096, 6, 192
COLUMNS = [
    "way",
    "round",
    "slowest_cpu_s",
    "fastest_cpu_s",
    "slowest_of_steps_cpu_s",
    "wall_s",
    "sharing_cpu_share",
    "sharing_wait_share",
    "degrees",
]


@dataclass(frozen=True)
class Way:
    """A way to train: options of SFTConfig, and whether documents are split."""

    name: str
    options: dict[str, Any]
    dynamic: bool = False


def ways(ranks: int) -> list[Way]:
    """Returns the ways to train, all with as many documents, or packed rows, per step as an epoch
    has in STEPS steps."""

    def batches(size: int) -> dict[str, Any]:
        return {
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": DOCUMENTS // STEPS // ranks // size,
            "max_length": None,
        }

    packed = {
        "packing": True,
        "packing_strategy": "bfd",
        "max_length": LONG_TOKENS[1],
        "per_device_train_batch_size": 1,
    }
    return [
        Way("longctx", batches(DOCUMENTS // STEPS // ranks), dynamic=True),
        Way("one document per batch", batches(1)),
        Way("two documents, padded", batches(2)),
        Way("TRL's packing", packed),
    ]


def main() -> None:
    def by_round(number: int, folder: Path) -> Iterator[dict[str, Any]]:
        for way in ways(dist.get_world_size()):
            yield {"way": way.name, "round": number} | measured(way, str(folder))

    in_rounds(__doc__, "trainers.csv", COLUMNS, by_round)


QUIET: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 1,
}
"""Arguments of a trainer on CPUs that saves and reports nothing."""


def in_rounds(
    doc: str | None,
    name: str,
    columns: list[str],
    by_round: Callable[[int, Path], Iterator[dict[str, Any]]],
) -> None:
    """Runs a benchmark over the processes of torchrun, round by round, and writes its rows. All
    ranks share a folder."""
    parser = options(doc, name)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, rows = dist.get_rank(), []
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        for number in range(arguments.rounds):
            for row in by_round(number, Path(folders[0])):
                rows.append(row)
                if rank == 0:
                    print(row, flush=True)
        dist.barrier()  # before the folder goes
    if rank == 0:
        known = facts("torch", "transformers", "trl", "longctx")
        known |= {"ranks": str(dist.get_world_size()), "command": command(arguments.out)}
        table = Table(arguments.out, columns, known, overwrite=True)
        for row in rows:
            table.append(row)
    dist.barrier()


def measured(way: Way, folder: str) -> dict[str, Any]:
    """Trains an epoch, and returns its times."""
    trainer = made(way, folder)
    shared = Shared()
    if way.dynamic:
        dynamic_context_parallel(trainer, tokens_per_rank=LONG_TOKENS[1], profile="cpu-2core")
        shared.watch(trainer)
    steps = StepTimes()
    trainer.add_callback(steps)
    dist.barrier()
    trainer.train()
    cpu_s, wall_s = (
        of_all_ranks(torch.tensor(times).diff()) for times in (steps.cpu_s, steps.wall_s)
    )
    sharing_s, waited_s = of_all_ranks(torch.tensor([shared.cpu_s, shared.waited_s])).unbind(1)
    degrees = (
        sorted({degree for plan in trainer.dynamic.plans for degree in plan.degrees})
        if way.dynamic
        else []
    )
    return {
        "slowest_cpu_s": cpu_s.sum(1).max().item(),
        "fastest_cpu_s": cpu_s.sum(1).min().item(),
        "slowest_of_steps_cpu_s": cpu_s.max(0).values.sum().item(),
        "wall_s": wall_s.sum(1).max().item(),
        "sharing_cpu_share": (sharing_s / cpu_s.sum(1)).max().item(),
        "sharing_wait_share": (waited_s / wall_s.sum(1)).max().item(),
        "degrees": " ".join(map(str, degrees)),
    }


def of_all_ranks(values: torch.Tensor) -> torch.Tensor:
    """Returns the values of all ranks, [ranks, ..]."""
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    return torch.stack(gathered)


class StepTimes(transformers.TrainerCallback):
    """CPU seconds, by a clock, and wall-clock seconds at the start of training and after every
    step."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.clock = clock
        self.cpu_s: list[float] = []
        self.wall_s: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.cpu_s.append(self.clock())
        self.wall_s.append(time.perf_counter())

    on_step_end = on_train_begin


class Shared:
    """CPU seconds that the thread of a trainer spends on planning and exchanging ids, and seconds
    that steps wait for it."""

    def __init__(self) -> None:
        self.cpu_s = self.waited_s = 0.0

    def watch(self, trainer: Any) -> None:
        sharing = trainer.dynamic
        share, get_batch_samples = sharing.share, trainer.get_batch_samples

        def timed_share(*arguments: Any) -> Any:
            began = time.thread_time()
            result = share(*arguments)
            self.cpu_s += time.thread_time() - began
            return result

        def timed_get(*arguments: Any) -> Any:
            assert threading.current_thread() is threading.main_thread()
            began = time.perf_counter()
            result = get_batch_samples(*arguments)
            self.waited_s += time.perf_counter() - began
            return result

        sharing.share, trainer.get_batch_samples = timed_share, timed_get


def made(way: Way, folder: str) -> SFTTrainer:
    """Returns a trainer of a small model with random weights, for one epoch."""
    random = np.random.default_rng(0)
    lengths = [
        *random.integers(*SHORT_TOKENS, DOCUMENTS - LONG),
        *random.integers(*LONG_TOKENS, LONG),
    ]
    documents = [
        {"input_ids": random.integers(0, VOCABULARY, length).tolist()}
        for length in random.permutation(lengths)
    ]
    defaults = {
        "output_dir": folder,
        "num_train_epochs": 1,
    }
    args = SFTConfig(**{**defaults, **QUIET, **way.options})
    data = datasets.Dataset.from_list(documents)
    trainer = SFTTrainer(model(), args=args, train_dataset=data, processing_class=tokenizer())
    if args.packing:  # as many steps as the others have
        args.gradient_accumulation_steps = max(
            1, round(len(trainer.train_dataset) / STEPS / dist.get_world_size())
        )
        trainer.accelerator.gradient_accumulation_steps = args.gradient_accumulation_steps
    return trainer


def model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=LONG_TOKENS[1],
    )
    return transformers.Qwen2ForCausalLM(config)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["[P]", "[E]", "[U]"]
    vocabulary = {
        word: number
        for number, word in enumerate([*special, *(f"w{n}" for n in range(VOCABULARY - 3))])
    }
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[U]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[P]", eos_token="[E]", unk_token="[U]"
    )


if __name__ == "__main__":
    main()
