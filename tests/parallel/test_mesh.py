"""The groups of a run: which backends they have on a CPU and on GPUs, with stand-ins for NCCL,
which no CPU build has."""

import faulthandler
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.torch_version import TorchVersion

from longctx.errors import UserError
from longctx.parallel import device as device_module
from longctx.parallel import environment, mesh
from longctx.parallel.environment import Launch
from longctx.parallel.host_memory import pinned_bytes
from longctx.parallel.meeting import meet
from longctx.trainers import groups as trainer_groups

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@dataclass
class Config:
    """Stands for NCCL's configuration of a communicator."""

    max_ctas: int | None = None


@dataclass
class Options:
    """Stands for `ProcessGroupNCCL.Options`, which torch refuses if its timeout differs from the
    group's."""

    is_high_priority_stream: bool = False
    _timeout: timedelta = timedelta(minutes=10)
    config: Config = field(default_factory=Config)


HIGH = Options(True, timedelta(seconds=7), Config(max_ctas=16))
"""Options of an exchange: its messages take the multiprocessors that attention leaves."""


@pytest.mark.parametrize(("device", "backend"), [(CPU, "gloo"), (GPU, "nccl")])
def test_a_run_joins_with_one_backend(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, backend: str
) -> None:
    """A second backend would connect all pairs of ranks of every group."""
    joined: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **options: joined.append(backend)
    )
    monkeypatch.setattr(mesh, "make_groups", lambda device, **options: None)
    mesh.join(Launch(0, 0, 1, 1), device)
    assert joined == [backend]


@pytest.mark.parametrize("device", [CPU, GPU])
def test_only_control_has_gloo_on_gpus(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Eight ranks, two stages: two groups of the exchange, with high priority on GPUs, four of
    stages and four of ends."""
    made: list[tuple[list[int] | None, dict[str, Any]]] = []
    timed: dict[str, timedelta] = {}

    def new_group(ranks: list[int] | None = None, **options: Any) -> str:
        made.append((ranks, options))
        return f"group of {ranks}"

    def axis(name: str) -> MagicMock:
        return MagicMock(**{"get_group.return_value": name, "get_all_groups.return_value": [name]})

    def set_timeout(timeout: timedelta, group: str) -> None:
        timed[group] = timeout

    meshes = MagicMock()
    meshes.return_value.__getitem__.side_effect = axis
    monkeypatch.setattr(mesh, "DeviceMesh", meshes)
    monkeypatch.setattr(mesh, "SET_TIMEOUT", set_timeout)
    monkeypatch.setattr(mesh, "warm_up", lambda group, device: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", MagicMock(Options=Options), raising=False)
    groups = mesh.make_groups(device, pipeline=2, timeout_s=7.0)
    chosen = [
        (ranks, options["pg_options"])
        for ranks, options in made
        if options.get("pg_options") is not None
    ]
    assert chosen == ([([0, 1, 2, 3], HIGH), ([4, 5, 6, 7], HIGH)] if device == GPU else [])
    assert len({id(options) for _, options in chosen}) == len(chosen), (
        "NCCL's group keeps it, with the name that torch writes"
    )
    assert [options["backend"] for ranks, options in made if ranks is None] == ["gloo"]
    assert not any("backend" in options for ranks, options in made if ranks is not None), (
        "the backend of the default group"
    )
    assert all(options["timeout"] == timedelta(seconds=7) for _, options in made)
    assert len(made) == 2 + 1 + 4 + 4
    assert timed == dict.fromkeys(("dp_cp", "tp"), timedelta(seconds=7))
    assert (groups.exchange, groups.pipeline) == ("group of [0, 1, 2, 3]", "group of [1, 5]")
    # Four stages of two tensor ranks: the ends are the first and the last one, and tokens are
    # summed over tensor ranks too.
    groups = mesh.make_groups(device, tensor=2, pipeline=4)
    assert (groups.pipeline, groups.ends) == ("group of [1, 3, 5, 7]", "group of [1, 7]")
    assert (groups.exchange, groups.tokens) == ("group of [1]", "group of [0, 1]")


@pytest.mark.parametrize("nodes", [1, 2])
def test_trainers_have_the_groups_of_a_run(monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    """With streams of high priority for messages, and another group for those between nodes."""
    made: list[dict[str, Any]] = []

    def new_group(*_: Any, **options: Any) -> str:
        made.append(options)
        return f"group {len(made)}"

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        os, "environ", {"LOCAL_WORLD_SIZE": str(2 // nodes), "WORLD_SIZE": "2", "RANK": "1"}
    )
    monkeypatch.setattr(dist, "ProcessGroupNCCL", MagicMock(Options=Options), raising=False)
    monkeypatch.setattr(trainer_groups, "warm_up", lambda group, device: None)
    groups = trainer_groups.Groups.made(
        SimpleNamespace(world_size=2, device=GPU, ddp_timeout_delta=timedelta(seconds=7)),
        ExitStack(),
    )
    assert [options["pg_options"] for options in made[:nodes]] == nodes * [HIGH]
    assert made[nodes]["backend"] == "gloo" and len(made) == nodes + 1
    assert groups == ("group 1", f"group {nodes + 1}", None if nodes == 1 else "group 2")


SETTINGS = "expandable_segments:True"
if TorchVersion(torch.__version__) >= "2.13":
    SETTINGS += ",pinned_max_round_threshold_mb:1"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.mark.parametrize("given", [None, *ALLOCATOR])
@pytest.mark.parametrize("device", [CPU, GPU])
def test_the_allocator_is_configured_unless_the_user_did(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, given: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {} if given is None else {given: "max_split_size_mb:64"})
    device_module.prepare_allocator(device)
    ours = {"PYTORCH_ALLOC_CONF": SETTINGS} if device == GPU else {}
    assert os.environ == (ours if given is None else {given: "max_split_size_mb:64"})


def test_a_device_is_current_only_after_its_allocator_is_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configured: list[dict[str, str]] = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: configured.append(dict(os.environ)),
    )
    assert device_module.prepare_device("cuda", Launch(1, 1, 2, 2)) == torch.device("cuda", 1)
    queues = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert configured == [{"PYTORCH_ALLOC_CONF": SETTINGS, **queues}]
    with pytest.raises(UserError, match="has 3 processes, which need a GPU each"):
        device_module.prepare_device("cuda", Launch(0, 0, 3, 3))
    assert len(configured) == 1


@pytest.mark.parametrize(
    ("device", "given", "expected"), [(GPU, None, "32"), (GPU, "1", "1"), (CPU, None, None)]
)
def test_every_stream_of_a_gpu_has_a_queue_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, given: str | None, expected: str | None
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setattr(os, "environ", {} if given is None else {name: given})
    device_module.prepare_queues(device)
    assert os.environ.get(name) == expected


def test_torch_reads_the_allocator_settings_when_it_starts() -> None:
    """Not when it is imported, which is before we know the device."""
    code = """
import torch
from longctx.parallel.device import prepare_allocator
prepare_allocator(torch.device("cuda", 0))
print(torch._C._accelerator_getAllocatorSettings())
"""
    environment = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.stdout.strip() == SETTINGS, done.stderr


def test_older_versions_of_torch_get_no_setting_that_they_do_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    device_module.prepare_allocator(GPU)
    assert (
        os.environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        and device_module.rounds_pinned()
    )


def test_pinned_memory_is_counted_as_torch_allocates_it() -> None:
    sizes = [0, 1, 3, 4096, 4097, 5 << 30]
    assert pinned_bytes(sizes, rounded=True) == 0 + 1 + 4 + 4096 + 8192 + (8 << 30)
    assert pinned_bytes(sizes, rounded=False) == sum(sizes)


@pytest.mark.parametrize(
    ("own", "local_processes", "expected"), [(None, 4, 4), (None, 32, 1), ("7", 4, None)]
)
def test_processes_of_a_node_share_the_cores_for_compiling(
    monkeypatch: pytest.MonkeyPatch, own: str | None, local_processes: int, expected: int | None
) -> None:
    from torch._inductor import config as inductor

    variables = {"LOCAL_WORLD_SIZE": str(local_processes), "WORLD_SIZE": str(local_processes)}
    monkeypatch.setattr(
        os, "environ", variables | ({} if own is None else {"TORCHINDUCTOR_COMPILE_THREADS": own})
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    before = inductor.compile_threads
    with inductor.patch(compile_threads=before):
        environment.share_compilers()
        assert inductor.compile_threads == (before if expected is None else expected)


def test_commands_prepare_the_device_before_their_processes_join(repository: Path) -> None:
    """It configures the allocator before CUDA starts."""
    sources = [
        *(repository / "longctx" / "commands").glob("*.py"),
        repository / "longctx" / "start.py",
    ]
    joining = {
        path.stem: path.read_text("utf-8")
        for path in sources
        if "join_run(" in path.read_text("utf-8")
    }
    assert {"calibrate", "eval", "measure", "start"} <= joining.keys()
    assert all("prepare_device(" in text or "Run.open(" in text for text in joining.values())


RECORDER = {"TORCH_FR_BUFFER_SIZE": "20000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"]),
        (
            {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"},
            ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"],
        ),
        (
            {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine"},
            ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"],
        ),
        ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}, ["TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"]),
    ],
)
def test_the_flight_recorder_writes_to_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, str], expected: list[str]
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(faulthandler, "enable", lambda file: None)
    device_module.record_messages(CPU, tmp_path / "nccl")
    assert os.environ == given and not (tmp_path / "nccl").exists()
    device_module.record_messages(GPU, tmp_path / "nccl")
    ours = {**RECORDER, "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "nccl" / "rank_")}
    assert os.environ == {**given, **{name: ours[name] for name in expected}}
    assert (tmp_path / "nccl").is_dir()


def test_a_process_that_is_aborted_tells_where_it_was(tmp_path: Path) -> None:
    """As NCCL's watchdog does it: from another thread, while the main thread waits."""
    code = f"""
import os, threading, time, pathlib, torch
from longctx.parallel.device import record_messages
record_messages(torch.device("cuda", 0), pathlib.Path({str(tmp_path)!r}))
def in_layer_7():
    threading.Timer(0.2, os.abort).start()
    time.sleep(60)
in_layer_7()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr and "in in_layer_7" in done.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}, 12),
        # As torchrun sets it.
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "8", "OMP_NUM_THREADS": "1"}, 12),
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "8", "OMP_NUM_THREADS": "4"}, None),
        ({"LOCAL_WORLD_SIZE": "100", "WORLD_SIZE": "100"}, 1),
        ({}, 96),
    ],
)
def test_cores_are_shared(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: int | None
) -> None:
    monkeypatch.setattr(os, "environ", given)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(96)))
    assert environment.host_threads() == expected


def test_ranks_of_one_start_meet_in_a_store_that_an_earlier_start_has_used() -> None:
    """As torchrun's store when a node joins or leaves: rank 2 of the first start is dead, and
    nothing it left is seen."""
    server = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )

    def start(rank: int, ranks: int, wait_s: float) -> tuple[Any, list[str | None]]:
        client = TCPStore(
            "127.0.0.1", server.port, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        time.sleep(wait_s)
        return meet(client, rank, ranks, f"host-{ranks}-{rank}", timeout_s=30)

    for ranks in (3, 2, 3):
        with ThreadPoolExecutor(ranks) as pool:
            found = [*pool.map(start, range(ranks), [ranks] * ranks, (0.3, 0.0, 0.1))]
        stores, hosts = zip(*found, strict=True)
        assert hosts == ([f"host-{ranks}-{rank}" for rank in range(ranks)],) * ranks
        assert not stores[0].check(["left"])
        stores[0].set("left", "by rank 0")
        assert all(store.get("left") == b"by rank 0" for store in stores)


def test_ranks_that_did_not_come_have_no_host() -> None:
    server = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    assert meet(server, 0, 3, "here", timeout_s=0.1)[1] == ["here", None, None]
    assert meet(server, 1, 3, "here", timeout_s=0.1)[1] == [None, "here", ""]
