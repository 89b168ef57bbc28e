"""What checksums and comparisons between ranks cost: share of a step, and of `longctx prepare`. Writes results/checks.csv.

    longctx prepare
    torchrun --nproc-per-node 4 -m bench.checks

Trains the model of examples/quickstart.yaml with two copies of the weights, so that there is something to compare, and times
steps, the comparison of all copies (every 100 steps), and the agreement of ranks on a plan (every step). Prepares the embedded
corpus again and times the checksums of its store.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from bench.harness import Table, facts
from longctx.checksums import checksums
from longctx.config import load
from longctx.data.prepare import prepare
from longctx.parallel.mesh import make_groups
from longctx.training import agreement
from longctx.training.assembly import assemble
from longctx.training.build import sizes_of_groups
from longctx.training.run import Run

SETTINGS = ["train.device=cpu", "parallel.shard_ranks=2", "checkpoint.every=1000"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "checks.csv")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        step_s, compare_s, agree_s = steps(Path(folder), given.steps)
        rows["copies compared, every 100 steps"] = compare_s / agreement.EVERY, step_s
        rows["plans compared, every step"] = agree_s, step_s
        if dist.get_rank() == 0:
            store = Path(folder) / "store"
            prepare_s = seconds(lambda: prepare("python-stdlib", store))
            files = [file for file in store.rglob("*") if file.is_file()]
            rows["checksums of a store"] = (
                median(seconds(lambda: [checksums(file) for file in files]) for _ in range(5)),
                prepare_s,
            )
        dist.barrier()
    if dist.get_rank() == 0:
        about = facts("torch") | {"command": "torchrun --nproc-per-node 4 -m bench.checks"}
        table = Table(given.out, ["check", "seconds", "of_seconds", "share"], about, overwrite=True)
        for check, (taken, whole) in rows.items():
            table.append(
                {"check": check, "seconds": f"{taken:.4g}", "of_seconds": f"{whole:.4g}", "share": f"{taken / whole:.3%}"}
            )
            print(table.rows[-1])
    dist.destroy_process_group()


def steps(folder: Path, count: int) -> tuple[float, float, float]:
    """Returns the median seconds of a step, of a comparison of copies, and of an agreement on a plan."""
    config = load(Path("examples/quickstart.yaml"), [*SETTINGS, f"train.run_dir={folder}"], world_size=dist.get_world_size())
    mesh = make_groups(torch.device("cpu"), **sizes_of_groups(config), timeout_s=600.0)
    trainer = assemble(Run.open(config), mesh)
    with trainer.loader:
        step_s = median([seconds(trainer.step) for _ in range(count + 1)][1:])
        compare_s = median(seconds(lambda: agreement.require_same_copies(trainer.model, 1, mesh.control)) for _ in range(count))
        agree_s = median(seconds(lambda: mesh.agree("0" * 64, "a plan")) for _ in range(10 * count))
    return step_s, compare_s, agree_s


def seconds(work: Callable[[], object]) -> float:
    """Returns the time of a call, from a moment at which all ranks are ready if they take part."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
