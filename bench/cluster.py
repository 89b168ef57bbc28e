"""Real runs of an 8B model's ratios on many ranks, with a modelled device (modelled.py), on one
machine; needs root on Linux.

    python bench/cluster.py --nodes 4 --ranks-per-node 8 --mix wlb_128k --documents-a-rank 4

Network namespaces are the nodes (namespaces.py). `longctx measure` trains the same documents under
every mode in turn.

Real are loader, planner, layouts, schedules, two-level exchange, FSDP's collectives, torchrun on
every node, and every byte on links of limited rate, between nodes and inside them. Matrix work and
attention kernels sleep for the time that the profile of an 8B model on H100s gives, times a
dilation D. K, V and their gradients are smaller by a factor

    S = 393,216 bytes per token (8B, bfloat16, 32 layers, three passes) / those of the tiny model

so links have the profile's rates / (S · D), and the same documents take D times as long. In-node
links are pooled: the ranks of a node share 8 times the rate of one.

FSDP gathers 2 bytes for each of 8.03e9 parameters for the forward of a micro-batch, 2 for its
backward, and reduces 4 at the end of a step. Here a parameter has 4 bytes, and gloo reduces by an
allreduce, of 8. So P unused parameters with 8 P = 4 · 8.03e9 / S have the true share of the links
in both. Beside a GPU gathering is hidden behind computing; here nothing hides it, in any mode: 0.1
s per micro-batch (before dilation) on 4 nodes of 8, and 0.1 s per step for the reduction. The
profile has the first in `launch_s`, and the sleep of the optimizer is shorter by the second.

What is not real: latency of links (a bridge has none), the optimizer's own work, and memory. One
process plans for all ranks. The host's own work is not dilated, so D must be so large that it is a
small share of a step; the table has it: processor time of all ranks / (cores · time of the step).
Part of it is idle: what threads that wait for messages need while all ranks sleep.
"""

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

import harness
from longctx.comparison.mixes import load_mix
from longctx.planning.cost.work import kv_bytes_per_token
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import longest_document
from namespaces import PREFIX, ClusterError, linked_namespaces, refuse_impossible

PROFILE = "h100-nvlink-ib"
TINY = {
    "vocab_size": 257,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "tie_word_embeddings": True,
}
PARAMETERS = 8.03e9
TOKENS_PER_RANK = 16384
OPTIONS = ("nodes", "ranks_per_node", "mix", "documents_a_rank", "dilation", "rival", "seed")
MODES = "auto,bins,static,static:8"
HEAD = (
    *(
        "mode",
        "median step",
        "**auto over it**",
        "in total",
        "prediction error",
        "computing, mean rank",
        "busiest rank",
    ),
    *("waits for exchange, mean rank", "host", "of it idle"),
)


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--dilation", type=float, default=40.0, help="factor of all times")
    parser.add_argument("--mix", default="wlb_128k")
    parser.add_argument(
        "--documents-a-rank", type=int, default=4, help="documents per step and rank"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the documents drawn")
    parser.add_argument(
        "--rival", default="", help="planner that is measured as mode bins, such as megatron-dev"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--modes", default=MODES)
    parser.add_argument(
        "--settings", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the runs"
    )
    parser.add_argument("--timeout", type=float, default=1500, help="seconds")
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON file (default: bench/results/modelled-NODESxRANKS-MIX-DOCUMENTS.json)",
    )
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    label = f"{given.nodes}x{given.ranks_per_node}-{given.mix}-{given.documents_a_rank}"
    out = given.out or harness.RESULTS / f"modelled-{label}.json"
    try:
        with ExitStack() as stack:
            result = run(given, stack)
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cluster: interrupted; namespaces are removed", file=sys.stderr)
        return 130
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    table = out.parent / "cluster-32.md"
    results = [
        json.loads(path.read_text("utf-8")) for path in sorted(out.parent.glob("modelled-*.json"))
    ]
    table.write_text(page(results), "utf-8")
    print(f"written to {out}; {table} has those whose name starts with modelled-")
    return 0


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ends the run at the first signal; later signals are ignored during clean-up."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def run(given: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Trains under every mode in turn; `stack` removes namespaces and files."""
    refuse_impossible()
    ranks, per_node, layers = (
        given.nodes * given.ranks_per_node,
        given.ranks_per_node,
        int(TINY["num_hidden_layers"]),
    )
    h100 = replace(
        HardwareProfile.load(PROFILE),
        ranks_per_node=per_node,
        latency_s=0.0,
        split_document_s=0.0,  # what the modelled device does not wait for
    )
    kv_bytes = kv_bytes_per_token(
        layers * 2 * int(TINY["num_key_value_heads"]) * int(TINY["head_dim"]), 4
    )
    smaller = h100.kv_bytes_per_token / kv_bytes
    ballast = round(PARAMETERS / 2 / smaller / layers)
    weights_s = 4 * PARAMETERS * (ranks - 1) / ranks / (h100.inter_node_bytes_per_s * per_node)
    here = dilated(
        replace(h100, launch_s=h100.launch_s + weights_s), given.dilation, smaller, kv_bytes
    )
    steps = given.warmup + given.steps
    longest = longest_document(ranks, TOKENS_PER_RANK)
    documents = load_mix(given.mix).draw(given.documents_a_rank * ranks * (steps + 1), given.seed)
    lengths = [min(longest, max(2, length)) for length in documents]

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)))
    names = ("h100.yaml", "profile.yaml", "device.json", "run.yaml", "measured.json", "work.jsonl")
    undilated, profile, device, config, measured, work = (folder / name for name in names)
    undilated.write_text(yaml.safe_dump(plain(h100)), "utf-8")
    profile.write_text(yaml.safe_dump(plain(here)), "utf-8")
    settings: dict[str, Any] = {
        "profile": str(undilated),
        "dilation": given.dilation,
        "layers": layers,
        "ballast": ballast,
    }
    settings |= {
        "step_s": max(0.0, h100.step_s - weights_s),
        "rival": given.rival,
        "work": str(work),
    }
    device.write_text(json.dumps(settings), "utf-8")
    settings = {
        "model": TINY,
        "data": {"store": str(harness.make_store(lengths, folder))},
        "batch": {"global_tokens": sum(lengths) // (steps + 1), "tokens_per_rank": TOKENS_PER_RANK},
        "train": {"device": "cpu", "timeout_s": 900.0},
    }
    config.write_text(yaml.safe_dump(settings), "utf-8")

    rates = (rate * per_node for rate in (here.inter_node_bytes_per_s, here.intra_node_bytes_per_s))
    cluster = stack.enter_context(linked_namespaces(given.nodes, *rates))
    words = ["measure", str(config), "--modes", given.modes, "--steps", str(given.steps)]
    words += ["--warmup", str(given.warmup), "--out", str(measured), f"--context.profile={profile}"]
    words += [f"--{setting}" for setting in given.settings]
    cluster.torchrun(("bench.modelled", str(device), *words), per_node, given.timeout)
    result: dict[str, Any] = json.loads(measured.read_text("utf-8"))
    rows = [json.loads(line) for line in work.read_text("utf-8").splitlines()][
        given.warmup * len(result["modes"]) :
    ]
    for number, row in enumerate(rows):
        result["modes"][number % len(result["modes"])]["steps"][number // len(result["modes"])] |= (
            row
        )
    for mode in result["modes"]:
        mode["mode"] = {"bins": given.rival or "bins", "static": "best static of every step"}.get(
            mode["mode"], mode["mode"]
        )
    versions = harness.facts("longctx", "torch", "numpy")
    return {
        "about": {"command": harness.command(), "load_average": os.getloadavg()[0], **versions},
        "cluster": {name: getattr(given, name) for name in OPTIONS}
        | {
            "cores": os.cpu_count(),
            "smaller": smaller,
            "ballast": ballast * layers,
            "longest": max(lengths),
        },
        "profile": plain(here),
        "measured": result,
    }


def dilated(
    h100: HardwareProfile, dilation: float, smaller: float, kv_bytes: int
) -> HardwareProfile:
    """Returns the profile of this cluster: all times longer by the dilation, bytes and rates
    smaller."""
    times = (
        "linear_s_per_token",
        "attention_s_per_token2",
        "split_document_s",
        "launch_s",
        "step_s",
    )
    rates = ("intra_node_bytes_per_s", "inter_node_bytes_per_s")
    changes = {name: getattr(h100, name) * dilation for name in times}
    changes |= {name: getattr(h100, name) / smaller / dilation for name in rates}
    return replace(h100, **changes, kv_bytes_per_token=float(kv_bytes))


def plain(profile: HardwareProfile) -> dict[str, Any]:
    """Returns the values of a profile for YAML."""
    values = asdict(profile)
    values["attention_efficiency"] = [list(row) for row in values["attention_efficiency"]]
    return values


def page(results: Sequence[dict[str, Any]]) -> str:
    """Returns the page: a table per run with one row per mode."""
    words = (
        "Measured steps of runs with a modelled device: everything is real but matrix work and "
        "attention kernels, which sleep (`bench/cluster.py` explains it). All modes trained the "
        "same documents, a step of each in turn. Speedups: medians over steps, measured "
        "(predicted); in total: ratios of the sums over steps, as are prediction errors. "
        "Computing and waits: shares of the mode's time. Host: processor time of all ranks, as a "
        "share of that of the cores; idle: what of it asleep ranks take, in the same unit. "
        "static:8 packs documents in the order drawn (fixed static); they are cut at what 8 ranks "
        "hold."
    )
    parts = [words]
    for result in results:
        cluster, about, measured = result["cluster"], result["about"], result["measured"]
        modes = {mode["mode"]: mode for mode in measured["modes"]}
        auto = modes["auto"]
        lines = [_line(mode, auto, cluster["cores"]) for mode in modes.values()]
        tokens, rate = auto["steps"][0]["tokens"], result["profile"]["inter_node_bytes_per_s"] / 1e6
        place = f"{cluster['nodes']} × {cluster['ranks_per_node']} ranks"
        versions = ", ".join(
            f"{name} {value}"
            for name, value in about.items()
            if name not in ("command", "load_average")
        )
        parts += [
            f"## {place}, {cluster['mix']}, {cluster['documents_a_rank']} documents per rank",
            "\n".join(harness.markdown(HEAD, lines)),
            f"{len(auto['steps'])} steps of about {tokens:,} tokens, longest document drawn "
            f"{cluster['longest']:,}; dilation {cluster['dilation']:g}, link {rate:.2f} MB/s per "
            f"rank; losses differ by {measured['loss_difference']:.0e}; {versions}; load "
            f"{about['load_average']:.1f} at the end: `{about['command']}`",
        ]
    return "\n\n".join(parts) + "\n"


def _line(mode: dict[str, Any], auto: dict[str, Any], cores: int) -> list[str]:
    total = mode["total_s"]
    shares = [
        sum(step[key] for step in mode["steps"]) / total
        for key in ("slept_s", "slept_most_s", "exchange_wait_s")
    ]
    host, idle = (
        sum(step.get(key, math.nan) for step in mode["steps"]) / cores / total
        for key in ("host_s", "idle_s")
    )
    seconds = [step["seconds"] for step in mode["steps"]]
    return [
        mode["mode"],
        f"{statistics.median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})",
        *(harness.speedups(mode, auto, "**") if mode is not auto else ("", "")),
        f"{mode['prediction_error']:+.1%}",
        *("" if math.isnan(share) else f"{share:.0%}" for share in (*shares, host, idle)),
    ]


if __name__ == "__main__":
    sys.exit(main())
