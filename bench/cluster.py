"""Real multi-node training on one machine: nodes are network namespaces, joined by links of limited rate; needs root on Linux.

    python bench/cluster.py --nodes 2 --ranks-per-node 2
    python bench/cluster.py --nodes 4 --ranks-per-node 1 --network workload

Every node is a network namespace with one link to a bridge, which `tc tbf` limits in both directions; ranks of one node talk
over its loopback, which stands for NVLink. Real `torchrun --nnodes` runs in them. `longctx profile` measures this cluster, and
then `longctx compare --measure` trains the same documents under every mode in turn, planned with that profile. All that it
makes has a name with this process's number in it and is removed at the end, whatever the end is; what a killed run left is
removed by the next one. Latency is not emulated: that of the bridge remains.

Computing. Ranks outnumber cores, and a rank that waits would lend its core to the others: imbalance would look cheaper than it
is. So every rank has a control group with a quota of `--share` of a core, which it has whether the others wait or not, as a GPU
would; all quotas together must stay below the number of cores. Give the machine a rest from other work all the same.

Network. An H100 does 450e12 useful FLOP/s in bf16 (46 % of its 989e12; training reaches 40 to 50 %) and has 50e9 bytes/s of
InfiniBand (400 Gb/s a GPU): 9,000 FLOP for every byte, 18,000 for every bf16 number. A rank here does F FLOP/s, measured on
matrix products of the model's size under its quota, and sends float32, 4 bytes a number. Two rates have a meaning:
  hardware  as many FLOP per number sent as the H100: R = F / 18,000 · 4 bytes/s a rank.
  workload  the same share of time for K and V as an 8B model on H100s. A wide model computes far more for every number of K and
            V than the small one that fits here (Llama 3.1 8B: 6 · 8.03e9 FLOP a token for 32 layers · 2 · 8 heads · 128 · 3
            passes numbers), so with `hardware` K and V weigh more than they do in large models.
            R_workload = R_hardware · (FLOP per number of the 8B) / (FLOP per number here).
A node's link carries R times its ranks. Gathering of parameters (FSDP2) uses the same links: with `hardware` it, too, weighs
more than in a large model with long micro-batches, equally for all modes.

Documents. Pieces of the source of this Python's standard library, as bytes, their lengths drawn from a published mix
(`longctx.comparison.mixes`) divided by `--scale`. Attention outweighs all else from about 2,500 tokens on here and from 44,000
on for the 8B, so 1/16 of the lengths keeps the share of attention about right.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from longctx.comparison.mixes import load_mix
from longctx.model.presets import ModelShape
from longctx.planning.calibration.fit import kv_bytes_per_token
from longctx.planning.layout import longest_document

PREFIX = "longctx-bench-"
"""Of namespaces and control groups; the process's number follows."""
PORT = 29500
PERIOD_US = 10_000
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
DOCUMENTS = 2000
FLOPS_S = 4.0
"""Seconds in which F is measured."""
FLOPS_CODE = """
import json, sys, time, torch
torch.set_num_threads(1)
rows, width, wide, seconds = map(float, sys.argv[1:])
a, b = torch.randn(int(rows), int(width)), torch.randn(int(width), int(wide))
began, done = time.perf_counter(), 0
while time.perf_counter() - began < seconds:
    a @ b
    done += 1
print(2 * rows * width * wide * done / (time.perf_counter() - began))
"""


class ClusterError(Exception):
    """What this machine cannot do, or a run that failed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--network", default="hardware", help="hardware, workload, or bytes/s a rank")
    parser.add_argument("--share", type=float, default=0.25, help="of a core, for every rank")
    parser.add_argument("--mix", default="wlb_128k")
    parser.add_argument("--scale", type=int, default=16, help="lengths of the mix are divided by this")
    parser.add_argument("--tokens-per-rank", type=int, default=2048)
    parser.add_argument("--global-tokens", type=int, default=12288)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--modes", help="default: auto, static and every static degree that holds the longest document")
    parser.add_argument("--profile", type=Path, help="do not measure a profile, take this one")
    parser.add_argument("--timeout", type=float, default=1500, help="seconds, for each of profile and comparison")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/cluster-NODESxRANKS-NETWORK.json)")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    out = arguments.out or (
        Path(__file__).parent / "results" / f"cluster-{arguments.nodes}x{arguments.ranks_per_node}-{arguments.network}.json"
    )
    try:
        with ExitStack() as stack:
            result = run(arguments, stack)
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cluster: interrupted; everything it made is removed", file=sys.stderr)
        return 130
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    table = out.parent / "cluster.md"
    table.write_text(
        markdown([json.loads(path.read_text("utf-8")) for path in sorted(out.parent.glob("cluster-*.json"))]), "utf-8"
    )
    print(f"written to {out} and {table}")
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    """The first signal ends the run; later ones must not disturb cleaning up."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def run(arguments: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """The whole measurement; `stack` removes what it made."""
    refuse_impossible(arguments)
    remove_leftovers()
    nodes, per_node = arguments.nodes, arguments.ranks_per_node
    ranks = nodes * per_node
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)))
    groups = stack.enter_context(limited_groups(ranks, arguments.share))
    flops = measure_flops(groups, arguments.tokens_per_rank)
    rate, arithmetic = network_rate(arguments.network, flops)
    print("; ".join(f"{name} {value:,.4g}" for name, value in arithmetic.items()), flush=True)
    cluster = stack.enter_context(linked_namespaces(nodes, rate * per_node))
    longest = make_store(arguments.mix, arguments.scale, longest_document(ranks, arguments.tokens_per_rank), folder)
    holding = [f"static:{d}" for d in range(1, ranks + 1) if longest_document(d, arguments.tokens_per_rank) >= longest]
    modes = arguments.modes or ",".join(["auto", "static", *holding])
    settings = {
        "model": MODEL,
        "data": {"store": str(folder / "store")},
        "batch": {"global_tokens": arguments.global_tokens, "tokens_per_rank": arguments.tokens_per_rank},
        "train": {"device": "cpu", "timeout_s": 300.0},
    }
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(settings), "utf-8")
    profile = folder / "profile.yaml"
    if arguments.profile:
        shutil.copyfile(arguments.profile, profile)
    else:
        cluster.torchrun(["profile", str(config), "--out", str(profile)], per_node, groups, folder, arguments.timeout)
    measured = folder / "measured.json"
    options = ["--modes", modes, "--steps", str(arguments.steps), "--warmup", str(arguments.warmup), "--out", str(measured)]
    speeds = [flops, measure_flops(groups, arguments.tokens_per_rank)]
    words = ["compare", "--measure", str(config), *options, f"--context.profile={profile}"]
    cluster.torchrun(words, per_node, groups, folder, arguments.timeout)
    speeds.append(measure_flops(groups, arguments.tokens_per_rank))
    about = {
        "command": shlex.join(["python", "bench/cluster.py", *sys.argv[1:]]),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{processor()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "load_average": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("longctx", "torch", "numpy")}},
    }
    cluster_facts = {
        "nodes": nodes,
        "ranks_per_node": per_node,
        "share_of_a_core": arguments.share,
        "network": arguments.network,
        **arithmetic,
        "flops_at_start_before_and_after_comparison": speeds,
        "mix": arguments.mix,
        "scale": arguments.scale,
        "longest": longest,
        "global_tokens": arguments.global_tokens,
        "tokens_per_rank": arguments.tokens_per_rank,
    }
    return {
        "about": about,
        "cluster": cluster_facts,
        "profile": yaml.safe_load(profile.read_text("utf-8")),
        "measured": json.loads(measured.read_text("utf-8")),
    }


# --- what the machine must be able to do


def refuse_impossible(arguments: argparse.Namespace) -> None:
    if os.geteuid() != 0:
        raise ClusterError("making network namespaces needs root")
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            raise ClusterError(f"there is no `{tool}`: install it (apt-get install {package})")
    ranks, cores = arguments.nodes * arguments.ranks_per_node, os.cpu_count() or 1
    if ranks * arguments.share > cores:
        raise ClusterError(f"{ranks} ranks of {arguments.share} cores are more than the {cores} there are: lower --share")


def command(*words: str) -> str:
    """Output of a short command. Raises ClusterError with what it said if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise ClusterError(f"`{shlex.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def remove_leftovers() -> None:
    """Removes namespaces and control groups of runs that were killed."""
    for line in command("ip", "netns", "list").splitlines():
        name = line.split()[0]
        if _is_left_over(name):
            remove_namespace(name)
    for folder in _group_root().glob(f"{PREFIX}*"):
        if _is_left_over(folder.name):
            remove_groups(folder)


def _is_left_over(name: str) -> bool:
    number = name.removeprefix(PREFIX).split("-")[0]
    return name.startswith(PREFIX) and number.isdecimal() and not Path(f"/proc/{number}").exists()


# --- ranks with a quota of a core


def _group_root() -> Path:
    """Where control groups that limit CPU time are made: version 2, or the cpu controller of version 1."""
    root = Path("/sys/fs/cgroup")
    controllers = root / "cgroup.controllers"
    if controllers.exists() and "cpu" in controllers.read_text().split():
        return root
    if (root / "cpu" / "cpu.cfs_quota_us").exists() or (root / "cpu").is_dir():
        return root / "cpu"
    raise ClusterError("there is no cpu controller under /sys/fs/cgroup, so ranks cannot be given a share of a core")


@contextmanager
def limited_groups(ranks: int, share: float) -> Iterator[list[Path]]:
    """One control group a rank, with `share` of a core; together they go before everything else on the machine."""
    root = _group_root()
    top = root / f"{PREFIX}{os.getpid()}"
    quota = int(share * PERIOD_US)
    try:
        top.mkdir()
        second = (top / "cpu.max").exists()
        if second:
            (top / "cgroup.subtree_control").write_text("+cpu")
        (top / ("cpu.weight" if second else "cpu.shares")).write_text("10000" if second else "262144")
        groups = []
        for rank in range(ranks):
            group = top / f"rank-{rank}"
            group.mkdir()
            if second:
                (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            groups.append(group)
        yield groups
    except OSError as error:
        raise ClusterError(f"control groups cannot be made: {error}") from error
    finally:
        remove_groups(top)


def remove_groups(top: Path) -> None:
    for group in [*top.glob("rank-*"), top]:
        for _ in range(50):
            with suppress(OSError):
                for number in (group / "cgroup.procs").read_text().split():
                    _kill(int(number))
                group.rmdir()
            if not group.exists():
                break
            time.sleep(0.1)


def _kill(number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)


def measure_flops(groups: Sequence[Path], rows: int) -> float:
    """FLOP/s of a rank on the products of its MLP, all ranks at once."""
    sizes = [str(value) for value in (rows, MODEL["hidden_size"], MODEL["intermediate_size"], FLOPS_S)]
    words = shlex.join([sys.executable, "-c", FLOPS_CODE, *sizes])
    started = [
        subprocess.Popen(["sh", "-c", f"echo 0 > {group}/cgroup.procs && exec {words}"], stdout=subprocess.PIPE, text=True)
        for group in groups
    ]
    try:
        found = [float(process.communicate(timeout=60 + 10 * FLOPS_S)[0]) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return statistics.mean(found)


def network_rate(network: str, flops: float) -> tuple[float, dict[str, float]]:
    """Bytes/s of a rank, and the figures that it follows from (see the module's description)."""
    shape = ModelShape.model_validate(MODEL)
    # The embedding is tied: its matrix is used once, in the head.
    flop_per_token = 6 * shape.parameters()
    numbers = kv_bytes_per_token(shape.num_hidden_layers, shape.num_key_value_heads, shape.head_dim, 4) / 4
    hardware = flops / (H100_FLOPS / H100_BYTES_PER_S * 2) * 4
    workload = hardware * LLAMA_8B_FLOP_PER_NUMBER / (flop_per_token / numbers)
    rates = {"hardware": hardware, "workload": workload}
    try:
        rate = rates[network] if network in rates else float(network)
    except ValueError:
        raise ClusterError(f"--network is {network!r}: give hardware, workload or bytes/s") from None
    return rate, {
        "flops_of_a_rank": flops,
        "flop_per_kv_number": flop_per_token / numbers,
        "hardware_bytes_per_s": hardware,
        "workload_bytes_per_s": workload,
        "bytes_per_s_of_a_rank": rate,
    }


# --- nodes


@dataclass(frozen=True)
class Cluster:
    """Namespaces that stand for nodes; `addresses` are theirs."""

    namespaces: tuple[str, ...]
    addresses: tuple[str, ...]

    def torchrun(self, words: Sequence[str], per_node: int, groups: Sequence[Path], folder: Path, timeout_s: float) -> None:
        """Runs `longctx WORDS` on all ranks, node 0's output on ours. Raises ClusterError if it fails or takes too long."""
        program = shlex.join([sys.executable, "-m", "longctx", *words])
        # Every rank enters its group (0 is the writer itself) before Python starts.
        entry = f"echo 0 > {groups[0].parent}/rank-$RANK/cgroup.procs && exec {program}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONUNBUFFERED": "1"}
        started: list[subprocess.Popen[str]] = []
        logs = [folder / f"{words[0]}-{node}.log" for node in range(len(self.namespaces))]
        try:
            for node, (namespace, log) in enumerate(zip(self.namespaces, logs, strict=True)):
                launcher = [
                    # Not `ip netns exec`, which hides the control groups.
                    *("nsenter", f"--net=/run/netns/{namespace}", sys.executable, "-m", "torch.distributed.run"),
                    *("--nnodes", str(len(self.namespaces)), "--node-rank", str(node), "--nproc-per-node", str(per_node)),
                    *("--rdzv-backend", "static", "--master-addr", self.addresses[0], "--master-port", str(PORT)),
                    *("--no-python", "sh", "-c", entry),
                ]
                stream = None if node == 0 else log.open("w", encoding="utf-8")
                started.append(
                    subprocess.Popen(launcher, env=environment, stdout=stream, stderr=stream, text=True, start_new_session=True)
                )
            deadline = time.monotonic() + timeout_s
            while any(process.poll() is None for process in started):
                if any(process.poll() not in (None, 0) for process in started):
                    break
                if time.monotonic() > deadline:
                    raise ClusterError(f"`longctx {words[0]}` took longer than {timeout_s:.0f} s")
                time.sleep(0.2)
        finally:
            self._end(started)
        failed = [node for node, process in enumerate(started) if process.returncode]
        if failed:
            text = "\n".join(log.read_text("utf-8")[-3000:] for log in logs if log.exists())
            raise ClusterError(f"`longctx {words[0]}` failed on node(s) {', '.join(map(str, failed))}\n{text}")

    def _end(self, started: Sequence[subprocess.Popen[str]]) -> None:
        """Ends launchers, which end their ranks; whatever is left in our namespaces after that is killed."""
        running = [process for process in started if process.poll() is None]
        for process in running:
            process.terminate()
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
        for namespace in self.namespaces:
            kill_inside(namespace)
        for process in started:
            process.wait(timeout=10)


@contextmanager
def linked_namespaces(nodes: int, bytes_per_s: float) -> Iterator[Cluster]:
    """Namespaces on one bridge (in a namespace of its own), each link limited to `bytes_per_s` in each direction."""
    base = f"{PREFIX}{os.getpid()}"
    hub, names = f"{base}-hub", [f"{base}-node{node}" for node in range(nodes)]
    addresses = [f"10.77.0.{node + 1}" for node in range(nodes)]
    try:
        for name in (hub, *names):
            command("ip", "netns", "add", name)
        command("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        command("ip", "-n", hub, "link", "set", "bridge", "up")
        for node, (name, address) in enumerate(zip(names, addresses, strict=True)):
            port = f"port{node}"
            command("ip", "link", "add", port, "netns", hub, "type", "veth", "peer", "name", "eth0", "netns", name)
            command("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
            command("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            command("ip", "-n", name, "link", "set", "eth0", "up")
            command("ip", "-n", name, "link", "set", "lo", "up")
            for namespace, device in ((name, "eth0"), (hub, port)):
                limit(namespace, device, bytes_per_s)
        yield Cluster(tuple(names), tuple(addresses))
    finally:
        for name in (*names, hub):
            remove_namespace(name)


def limit(namespace: str, device: str, bytes_per_s: float) -> None:
    """Lets the device send at most so many bytes/s. The bucket holds half a millisecond, or ten packets.

    What the bucket holds is sent at once after every pause: a larger one makes the many short exchanges of a step faster than
    the rate, by up to a quarter.
    """
    burst = max(16_384, int(bytes_per_s * 0.0005))
    # A queue that never overflows: the networks of GPU clusters lose no packet where several senders meet, and TCP would wait.
    limits = ("rate", f"{int(bytes_per_s * 8)}bit", "burst", str(burst), "limit", str(256 << 20))
    command("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limits)


def kill_inside(namespace: str) -> None:
    """Kills what runs in a namespace that we made, so only what we started."""
    with suppress(ClusterError):
        for number in command("ip", "netns", "pids", namespace).split():
            _kill(int(number))


def remove_namespace(name: str) -> None:
    """Removes a namespace and, with it, its devices; none of that name is fine."""
    if any(line.split()[0] == name for line in command("ip", "netns", "list").splitlines()):
        kill_inside(name)
        command("ip", "netns", "delete", name)


# --- documents


def make_store(mix: str, scale: int, longest: int, folder: Path) -> int:
    """A store of documents with the lengths of a mix over `scale`, at most `longest`. Returns the longest there is."""
    from longctx.data.corpus import open_corpus
    from longctx.data.prepare import prepare
    from longctx.data.store import Store

    lengths = [min(longest, max(2, length // scale)) for length in load_mix(mix).draw(DOCUMENTS, 0)]
    library = Path(sysconfig.get_path("stdlib"))
    text, needed = "", sum(lengths)
    for path in sorted(library.rglob("*.py")):
        if len(text) >= needed:
            break
        text += path.read_bytes().decode("ascii", "ignore")
    source, start = folder / "documents.jsonl", 0
    with source.open("w", encoding="ascii") as file:
        for length in lengths:  # the end of a document is a token as well
            file.write(json.dumps({"text": text[start : start + length - 1]}) + "\n")
            start += length - 1
    prepare(open_corpus(str(source)), folder / "store", tokenizer="bytes")
    return int(Store.open(folder / "store").lengths.max())


# --- what is written


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """A row a run, and below how to make them again."""
    columns = (
        "nodes × ranks, network",
        "tokens a rank",
        "auto, median step",
        "best static",
        "**auto over best static**",
        "in total",
        "auto over oracle",
        "in total",
        "prediction error of auto",
        "of best static",
        "losses differ by",
    )
    lines = [
        "Measured times of training steps on emulated clusters (`bench/cluster.py` explains them and the two networks). Best "
        "static: the fastest single degree that holds the longest document. Oracle: the degree that is best for each step by "
        "the cost model, changed at every step, which a static run cannot. Speedups: medians over the steps, measured "
        "(predicted); in total: of all steps together, as are prediction errors.",
        "",
        "| " + " | ".join(columns) + " |",
        "|---" * len(columns) + "|",
    ]
    for result in results:
        cluster, measured = result["cluster"], result["measured"]
        modes = {mode["mode"]: mode for mode in measured["modes"]}
        single = [mode for name, mode in modes.items() if name.startswith("static:")]
        if "auto" not in modes or not single:
            continue
        auto, best = modes["auto"], min(single, key=lambda mode: mode["total_s"])
        oracle = modes.get("static")
        rate = cluster["bytes_per_s_of_a_rank"] / 1e6
        cells = [
            f"{cluster['nodes']} × {cluster['ranks_per_node']}, {cluster['network']}: {rate:.1f} MB/s a rank",
            f"{cluster['tokens_per_rank']:,}",
            f"{auto['median_s']:.2f} s",
            f"{best['mode']}, {best['median_s']:.2f} s",
            f"**{ratio(best, auto, 'seconds'):.2f}×** ({ratio(best, auto, 'predicted_s'):.2f}×)",
            totals(best, auto),
            f"{ratio(oracle, auto, 'seconds'):.2f}× ({ratio(oracle, auto, 'predicted_s'):.2f}×)" if oracle else "—",
            totals(oracle, auto) if oracle else "—",
            f"{auto['prediction_error']:+.1%}",
            f"{best['prediction_error']:+.1%}",
            f"{measured['loss_difference']:.0e}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    for result in results:
        about, cluster = result["about"], result["cluster"]
        speeds = ", ".join(f"{flops / 1e9:.1f}" for flops in cluster["flops_at_start_before_and_after_comparison"])
        versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
        facts = (
            f"{cluster['mix']} lengths / {cluster['scale']}, longest {cluster['longest']:,} tokens",
            f"steps of {cluster['global_tokens']:,} tokens",
            f"{cluster['share_of_a_core']} of a core a rank: {speeds} GFLOP/s at the start, before and after the comparison",
            f"{about['machine']}, load {about['load_average']:.1f} in the end",
            versions,
            about["date"],
        )
        lines.append(f"- `{about['command']}`: {'; '.join(facts)}")
    return "\n".join(lines) + "\n"


def ratio(slow: dict[str, Any], fast: dict[str, Any], key: str) -> float:
    """Median over the steps."""
    return statistics.median(float(a[key] / b[key]) for a, b in zip(slow["steps"], fast["steps"], strict=True))


def totals(slow: dict[str, Any], fast: dict[str, Any]) -> str:
    """Ratio of all steps together, measured (predicted)."""
    measured, predicted = slow["total_s"] / fast["total_s"], slow["predicted_s"] / fast["predicted_s"]
    return f"{measured:.2f}× ({predicted:.2f}×)"


if __name__ == "__main__":
    sys.exit(main())
