"""What checkpoints and signs of life cost a run: seconds that a step waits, and share of a core.

    python -m bench.saving --parameters 100e6 --folder /data

Saves model and AdamW state of one rank several times, in the foreground and beside training in
turn, and compares how long `start` and `finish` keep the run waiting; the first copy also makes its
memory. Writes one row per save.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from bench.harness import Table, command, device_facts, facts
from longctx.parallel.peers import Peers
from longctx.training.saved.saving import Saver

COLUMNS = ["what", "parameters", "waits_s", "written_s", "share"]
WIDTH = 2048


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--saves", type=int, default=6, help="of each kind")
    parser.add_argument(
        "--folder", type=Path, help="where to write checkpoints (default: a temporary folder)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "saving.csv"
    )
    given = parser.parse_args()
    table = Table(
        given.out,
        COLUMNS,
        facts("torch") | {**device_facts(), "command": command(given.out)},
        overwrite=True,
    )

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = max(1, round(given.parameters / WIDTH**2))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        savers = {
            kind: Saver(Path(folder), dist.group.WORLD, 2, beside=kind == "beside")
            for kind in ("foreground", "beside")
        }
        for step in range(1, 2 * given.saves + 1):
            kind = ("beside", "foreground")[step % 2]
            waits, written = save(savers[kind], model, optimizer, step)
            row = {
                "what": kind,
                "parameters": layers * WIDTH**2,
                "waits_s": waits,
                "written_s": written,
            }
            table.append({**row, "share": waits / written})
    table.append({"what": "signs of life, share of a core", "share": signs_of_life(10.0)})


def save(
    saver: Saver, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> tuple[float, float]:
    """Returns the seconds that a run would wait for a checkpoint, and those until it is
    published."""
    waited, began = 0.0, time.perf_counter()
    calls: list[Callable[[], object]] = [
        lambda: saver.start(model, optimizer, {"step": step}),
        saver.advance,
        saver.advance,
    ]
    for call in calls:
        while not saver.written and saver.beside:
            time.sleep(0.001)
        now = time.perf_counter()
        call()
        if not saver.beside:
            saver.finish()
        waited += time.perf_counter() - now
    return waited, time.perf_counter() - began


def signs_of_life(seconds: float) -> float:
    """Returns the CPU time of rank 0 of two for its signs of life and its look at the other's, per
    second."""
    server = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    both = [Peers(server, rank, 2, 600.0) for rank in range(2)]
    time.sleep(2)
    began = time.process_time()
    time.sleep(seconds)
    spent = time.process_time() - began
    for peers in both:
        peers.close()
    return spent / seconds


if __name__ == "__main__":
    main()
