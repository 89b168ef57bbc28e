"""Multi-node training on one machine, with network namespaces as nodes (namespaces.py); needs root on Linux.

    python bench/cluster.py --nodes 2 --ranks-per-node 2
    python bench/cluster.py --nodes 4 --ranks-per-node 1 --network workload

Links between nodes have a limited rate; loopback replaces NVLink; latency is that of the bridge. With `torchrun --nnodes`,
`longctx calibrate` measures this cluster, and `longctx measure` trains the same documents under every mode in turn,
planned with that profile.

Computing. There are more ranks than cores, so a waiting rank would leave its core to the others, and imbalance would seem
cheaper than it is. So the computing thread of every rank has a fixed quota of `--share` of a core, whether the others wait or
not, like a GPU; the sum of all quotas must be below the number of cores. Its other threads, which send and read, have none
(with control groups of version 2 they share the quota). The machine should be idle otherwise.

Network. An H100 reaches 450e12 useful FLOP/s in bf16 (46 % of its 989e12; training reaches 40 to 50 %) and has 50e9 bytes/s of
InfiniBand (400 Gb/s per GPU): 9,000 FLOP per byte, 18,000 per bf16 number. A rank here reaches F FLOP/s, measured on matrix
products of the model's size under its quota, and sends float32, 4 bytes per number. Two network rates can be chosen:
  hardware  as many FLOP per number sent as an H100: R = F / 18,000 · 4 bytes/s per rank.
  workload  the same share of time for K and V as an 8B model on H100s. A wide model computes far more per number of K and V
            than the small model that fits here (Llama 3.1 8B: 6 · 8.03e9 FLOP per token for 32 layers · 2 · 8 heads · 128 · 3
            passes numbers), so with `hardware` K and V take a larger share than in large models.
            R_workload = R_hardware · (FLOP per number of the 8B) / (FLOP per number here).
The link of a node has R times its ranks. Gathering parameters (FSDP2) uses the same links: with `hardware` it also takes a
larger share than in a large model with long micro-batches, equally for all modes.

Documents. Pieces of the source code of this Python's standard library, as bytes, with lengths from a published mix
(`longctx.comparison.mixes`) divided by `--scale`. Attention dominates from about 2,500 tokens on here, and from 44,000 on in
the 8B model, so lengths divided by 16 keep the share of attention about equal.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

import cluster_modelled
import harness
from longctx.comparison.mixes import load_mix
from longctx.model.presets import ModelShape
from longctx.planning.cost.work import kv_bytes_per_token
from longctx.planning.layout import longest_document
from namespaces import PREFIX, ClusterError, limited_groups, linked_namespaces, refuse_impossible

H100_FLOPS, H100_BYTES_PER_S = 450e12, 50e9
LLAMA_8B_FLOP_PER_NUMBER = 6 * 8.03e9 / (32 * 2 * 8 * 128 * 3)
MODEL = {
    "vocab_size": 257,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
OPTIONS = ("nodes", "ranks_per_node", "network", "mix", "scale", "global_tokens", "tokens_per_rank")  # recorded in the result
DOCUMENTS = 2000
FLOPS_S = 4.0  # duration of the measurement of F in seconds
FLOPS_CODE = """
import sys, time, torch
torch.set_num_threads(1)
rows, width, wide, seconds = map(float, sys.argv[1:])
a, b = torch.randn(int(rows), int(width)), torch.randn(int(width), int(wide))
began, done = time.perf_counter(), 0
while time.perf_counter() - began < seconds:
    a @ b
    done += 1
print(2 * rows * width * wide * done / (time.perf_counter() - began))
"""


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--network", choices=("hardware", "workload"), default="hardware")
    parser.add_argument("--compute", choices=("real", "modelled"), default="real", help="modelled: see cluster_modelled.py")
    parser.add_argument("--dilation", type=float, default=40.0, help="modelled: factor of all times")
    parser.add_argument("--documents-a-rank", type=int, default=4, help="modelled: documents per step and rank")
    parser.add_argument("--seed", type=int, default=0, help="modelled: of the documents drawn")
    parser.add_argument("--rival", default="", help="modelled: baseline that is measured as mode bins, such as megatron-dev")
    parser.add_argument("--share", type=float, default=0.25, help="share of a core for every rank")
    parser.add_argument("--mix", default="wlb_128k")
    parser.add_argument("--scale", type=int, default=16, help="lengths of the mix are divided by this")
    parser.add_argument("--tokens-per-rank", type=int, default=2048)
    parser.add_argument("--global-tokens", type=int, default=12288)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--modes", help="default: auto, static and every static degree that holds the longest document")
    parser.add_argument("--profile", type=Path, help="use this profile instead of measuring one")
    parser.add_argument("--rate", type=float, help="bytes/s per rank instead of those of --network, to compare two versions")
    parser.add_argument("--settings", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the runs")
    parser.add_argument("--timeout", type=float, default=1500, help="seconds, for profile and comparison each")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/cluster-NODESxRANKS-NETWORK.json)")
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    modelled = given.compute == "modelled"
    label = f"{given.mix}-{given.documents_a_rank}" if modelled else given.network
    kind = "modelled" if modelled else "cluster"
    out = given.out or harness.RESULTS / f"{kind}-{given.nodes}x{given.ranks_per_node}-{label}.json"
    try:
        with ExitStack() as stack:
            result = cluster_modelled.run(given, stack) if modelled else run(given, stack)
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cluster: interrupted; namespaces and control groups are removed", file=sys.stderr)
        return 130
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    table = out.parent / ("cluster-32.md" if modelled else "cluster.md")
    results = [json.loads(path.read_text("utf-8")) for path in sorted(out.parent.glob(f"{kind}-*.json"))]
    table.write_text(cluster_modelled.page(results) if modelled else page(results), "utf-8")
    print(f"written to {out}; {table} has those whose name starts with {kind}-")
    return 0


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ends the run at the first signal; later signals are ignored during clean-up."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def run(given: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Runs the whole measurement; `stack` removes namespaces, control groups and files."""
    nodes, per_node = given.nodes, given.ranks_per_node
    ranks = nodes * per_node
    refuse_impossible(ranks, given.share)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)))
    groups = stack.enter_context(limited_groups(ranks, given.share))
    speeds = [measure_flops(groups, given.tokens_per_rank)]
    rate, arithmetic = network_rate(given.network, speeds[0])
    if given.rate is not None:
        rate = arithmetic["bytes_per_s_of_a_rank"] = given.rate
    print("; ".join(f"{name} {value:,.4g}" for name, value in arithmetic.items()), flush=True)
    cluster = stack.enter_context(linked_namespaces(nodes, rate * per_node))
    lengths = make_lengths(given.mix, given.scale, longest_document(ranks, given.tokens_per_rank))
    holding = [f"static:{d}" for d in range(1, ranks + 1) if longest_document(d, given.tokens_per_rank) >= max(lengths)]
    modes = given.modes or ",".join(["auto", "static", *holding])
    settings = {
        "model": MODEL,
        "data": {"store": str(harness.make_store(lengths, folder))},
        "batch": {"global_tokens": given.global_tokens, "tokens_per_rank": given.tokens_per_rank},
        "train": {"device": "cpu", "timeout_s": 300.0},
    }
    config, profile, measured = folder / "run.yaml", given.profile or folder / "profile.yaml", folder / "measured.json"
    config.write_text(yaml.safe_dump(settings), "utf-8")
    if not given.profile:
        cluster.torchrun(["calibrate", str(config), "--out", str(profile)], per_node, groups, given.timeout)
    speeds.append(measure_flops(groups, given.tokens_per_rank))
    words = ["measure", str(config), "--modes", modes, "--steps", str(given.steps)]
    words += ["--warmup", str(given.warmup), "--out", str(measured), f"--context.profile={profile}"]
    words += [f"--{setting}" for setting in given.settings]
    cluster.torchrun(words, per_node, groups, given.timeout)
    speeds.append(measure_flops(groups, given.tokens_per_rank))
    versions = harness.facts("longctx", "torch", "numpy")
    return {
        "about": {
            "command": harness.command(),
            "date": versions.pop("date"),
            "machine": f"{versions.pop('machine')}, Linux {platform.release()}",
            "load_average": os.getloadavg()[0],
            "versions": versions,
        },
        "cluster": {
            **{name: getattr(given, name) for name in OPTIONS},
            "share_of_a_core": given.share,
            **arithmetic,
            "flops_at_start_before_and_after_comparison": speeds,
            "longest": max(lengths),
        },
        "profile": yaml.safe_load(profile.read_text("utf-8")),
        "measured": json.loads(measured.read_text("utf-8")),
    }


def measure_flops(groups: Sequence[Path], rows: int) -> float:
    """Returns the mean FLOP/s of a rank on the matrix products of its MLP, with all ranks running."""
    sizes = [str(value) for value in (rows, MODEL["hidden_size"], MODEL["intermediate_size"], FLOPS_S)]
    words = shlex.join([sys.executable, "-c", FLOPS_CODE, *sizes])
    started = [
        subprocess.Popen(["sh", "-c", f"echo 0 > {group}/cgroup.procs && exec {words}"], stdout=subprocess.PIPE, text=True)
        for group in groups
    ]
    try:
        return statistics.mean(float(process.communicate(timeout=60 + 10 * FLOPS_S)[0]) for process in started)
    finally:
        for process in started:
            process.kill()
            process.wait()


def network_rate(network: str, flops: float) -> tuple[float, dict[str, float]]:
    """Returns bytes/s per rank, and the values it is derived from (see the module's docstring)."""
    shape = ModelShape.model_validate(MODEL)
    numbers = kv_bytes_per_token(shape.num_hidden_layers, shape.num_key_value_heads, shape.head_dim, 4) / 4
    # The embedding is tied; its matrix is multiplied once, in the head.
    flop_per_number = 6 * shape.spec.parameters / numbers
    hardware = flops / (H100_FLOPS / H100_BYTES_PER_S * 2) * 4
    rates = {"hardware": hardware, "workload": hardware * LLAMA_8B_FLOP_PER_NUMBER / flop_per_number}
    found = {"flops_of_a_rank": flops, "flop_per_kv_number": flop_per_number, "bytes_per_s_of_a_rank": rates[network]}
    return rates[network], found | {f"{name}_bytes_per_s": value for name, value in rates.items()}


def make_lengths(mix: str, scale: int, longest: int) -> list[int]:
    """Returns document lengths: those of a mix divided by `scale`, at most `longest`."""
    return [min(longest, max(2, length // scale)) for length in load_mix(mix).draw(DOCUMENTS, 0)]


def page(results: Sequence[dict[str, Any]]) -> str:
    """Returns the page: one row per run, and the commands that reproduce them."""
    head = (
        *("nodes × ranks, network", "auto, median step", "best static", "**auto over best static**", "in total"),
        *("auto over oracle", "in total", "prediction error of auto", "of best static", "losses differ by"),
        *("exchange wait per step of auto", "of best static"),
    )
    lines = []
    for result in results:
        cluster, measured = result["cluster"], result["measured"]
        modes = {mode["mode"]: mode for mode in measured["modes"]}
        single = [mode for name, mode in modes.items() if name.startswith("static:")]
        if "auto" not in modes or not single:
            continue
        auto, best, oracle = modes["auto"], min(single, key=lambda mode: mode["total_s"]), modes.get("static")
        rate = cluster["bytes_per_s_of_a_rank"] / 1e6
        line = [
            f"{cluster['nodes']} × {cluster['ranks_per_node']}, {cluster['network']}: {rate:.1f} MB/s per rank",
            f"{auto['median_s']:.2f} s",
            f"{best['mode']}, {best['median_s']:.2f} s",
            *harness.speedups(best, auto, "**"),
            *(harness.speedups(oracle, auto) if oracle else ("—", "—")),
            *(f"{mode['prediction_error']:+.1%}" for mode in (auto, best)),
            f"{measured['loss_difference']:.0e}",
            *map(exchange_wait, (auto, best)),
        ]
        lines.append(line)
    words = (
        "Measured times of training steps on emulated clusters (`bench/cluster.py` explains them and the two networks). Best "
        "static: the fastest single degree that holds the longest document. Oracle: the best static degree of every step by "
        "the cost model, which a static run cannot use. Speedups: medians over steps, measured (predicted); in total: ratios "
        "of the sums over steps, as are prediction errors."
    )
    runs = [f"- `{result['about']['command']}`: {told(result)}" for result in results]
    return "\n".join([words, "", *harness.markdown(head, lines), "", *runs, ""])


def told(result: dict[str, Any]) -> str:
    """Returns a description of a run: documents, speeds, machine and versions."""
    about, cluster = result["about"], result["cluster"]
    speeds = ", ".join(f"{flops / 1e9:.1f}" for flops in cluster["flops_at_start_before_and_after_comparison"])
    return (
        f"{cluster['mix']} lengths / {cluster['scale']}, longest {cluster['longest']:,} tokens; "
        f"steps of {cluster['global_tokens']:,} tokens, {cluster['tokens_per_rank']:,} per rank in a micro-batch; "
        f"{cluster['share_of_a_core']} of a core per rank: {speeds} GFLOP/s at the start, before and after the comparison; "
        f"{about['machine']}, load {about['load_average']:.1f} at the end; "
        f"{', '.join(f'{name} {number}' for name, number in about['versions'].items())}; {about['date']}"
    )


def exchange_wait(mode: dict[str, Any]) -> str:
    """Returns the mean wait of a rank for messages; older results lack it."""
    waits = [step["exchange_wait_s"] for step in mode["steps"] if "exchange_wait_s" in step]
    return f"{statistics.mean(waits):.2f} s" if waits else "—"


if __name__ == "__main__":
    sys.exit(main())
