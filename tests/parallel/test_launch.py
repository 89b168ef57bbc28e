"""The launch scripts call torchrun as they should, and a command starts its processes."""

import contextlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from longctx.cli import main
from tests.training_cases import SMALL, make_store


def run_script(
    script: list[str],
    folder: Path,
    stubs: dict[str, str],
    environment: dict[str, str],
    timeout_s: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Runs a script with some commands replaced by scripts of our own."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in stubs.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    variables = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **environment}
    return subprocess.run(
        script, cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout_s
    )


SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "1",
    "SLURM_CPUS_ON_NODE": "24",
}
NODES = 'test "$1 $2 $3" = "show hostnames node[1-2]" && echo {}'
ARGUMENTS = (
    "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id {id} --rdzv-endpoint {endpoint} "
    "--rdzv-conf {conf} "
    "--max-restarts 0 -m longctx train run.yaml {own}--train.run_dir {run_dir} --resume-if-any"
)


def test_slurm_calls_torchrun(repository: Path, tmp_path: Path) -> None:
    script = str(repository / "examples" / "slurm.sh")
    subprocess.run(["bash", "-n", script], check=True)
    stubs = {
        "scontrol": NODES.format("node1; echo node2"),
        "srun": 'test "$1 $2 $3 $4" = "--kill-on-bad-exit=1 --cpus-per-task 24 torchrun" && echo '
        '"${@:5}"; '
        'echo "$OMP_NUM_THREADS threads, $TORCH_ELASTIC_SHUTDOWN_TIMEOUT s" >&2',
    }
    called = run_script(["bash", script, "run.yaml", "--train.steps", "3"], tmp_path, stubs, SLURM)
    own = {
        "id": "123456",
        "endpoint": "node1:23456",
        "conf": "join_timeout=1800,read_timeout=1800",
        "own": "--train.steps 3 ",
    }
    wanted = ARGUMENTS.format(**own, run_dir="runs/123456")
    assert called.stdout.strip() == wanted, called.stderr
    for given, threads in (({"SLURM_GPUS_ON_NODE": "8"}, 3), ({"OMP_NUM_THREADS": "7"}, 7)):
        variables = {"OMP_NUM_THREADS": "", **SLURM, **given}
        assert (
            f"{threads} threads, 300 s"
            in run_script(["bash", script, "run.yaml"], tmp_path, stubs, variables).stderr
        )
    assert run_script(["bash", script], tmp_path, stubs, SLURM).returncode == 2


QUEUE = 'if [[ $1 == requeue ]]; then echo "$2" >> requeued; else echo node1; fi'


def requeued(folder: Path) -> int:
    """How often the job was requeued."""
    file = folder / "requeued"
    return file.read_text().split().count("123456") if file.exists() else 0


def test_slurm_requeues_a_job_whose_rank_failed(repository: Path, tmp_path: Path) -> None:
    """Three times without a new checkpoint it is over; a new one begins the count again."""
    command = ["bash", str(repository / "examples" / "slurm.sh"), "run.yaml"]
    fails = {"scontrol": QUEUE, "srun": "exit 7"}
    for number in (1, 2):
        called = run_script(command, tmp_path, fails, SLURM)
        assert called.returncode == 7 and "is requeued" in called.stderr
        assert requeued(tmp_path) == number
    saves = {
        "scontrol": QUEUE,
        "srun": "mkdir -p runs/123456; ln -sfn checkpoints/step-000010 runs/123456/latest; exit 7",
    }
    called = run_script(command, tmp_path, saves, SLURM)
    assert "continues from checkpoints/step-000010" in called.stderr and requeued(tmp_path) == 3
    assert run_script(command, tmp_path, fails, SLURM).returncode == 7 and requeued(tmp_path) == 4
    called = run_script(command, tmp_path, fails, SLURM)
    assert called.returncode == 7 and requeued(tmp_path) == 4
    assert "3 failures without a new checkpoint" in called.stderr
    assert (
        run_script(command, tmp_path, {"scontrol": QUEUE, "srun": "exit 0"}, SLURM).returncode == 0
    )
    assert not (tmp_path / "runs" / "123456.failures").exists()
    assert run_script(command, tmp_path, fails, SLURM).returncode == 7 and requeued(tmp_path) == 5


def test_slurm_requeues_before_the_time_limit(repository: Path, tmp_path: Path) -> None:
    stubs = {"scontrol": QUEUE, "srun": 'kill -USR1 "$PPID"; sleep 1'}
    command = ["bash", str(repository / "examples" / "slurm.sh"), "run.yaml"]
    assert run_script(command, tmp_path, stubs, SLURM).returncode == 0
    assert requeued(tmp_path) == 1 and not (tmp_path / "runs").exists(), "no failure"


def test_slurm_starts_a_container(repository: Path, tmp_path: Path) -> None:
    stubs = {"scontrol": NODES.format("node1"), "srun": 'echo "${@:4:7}"'}
    command = ["bash", str(repository / "examples" / "slurm.sh"), "run.yaml"]
    called = run_script(command, tmp_path, stubs, {**SLURM, "IMAGE": "registry#longctx:0.1.0"})
    assert called.stdout.split() == [
        *("--container-image", "registry#longctx:0.1.0"),
        *("--container-mounts", f"{tmp_path}:{tmp_path}"),
        *("--container-workdir", str(tmp_path), "torchrun"),
    ]


def test_skypilot_calls_torchrun(repository: Path, tmp_path: Path) -> None:
    task = yaml.safe_load((repository / "examples" / "skypilot.yaml").read_text())
    for rank in (0, 1):
        environment = {
            **task["envs"],
            "RUN_DIR": str(tmp_path / "run"),
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        }
        called = run_script(
            ["bash", "-c", task["run"]], tmp_path, {"torchrun": 'echo "$@"'}, environment
        )
        own = {
            "id": "longctx",
            "endpoint": "10.0.0.1:29500",
            "conf": f"is_host={int(rank == 0)},join_timeout=1800,read_timeout=1800",
            "own": "",
        }
        wanted = ARGUMENTS.format(**own, run_dir=tmp_path / "run")
        assert called.stdout.strip() == wanted, called.stderr
    assert task["resources"]["job_recovery"]["max_restarts_on_errors"] == 3
    assert any(task["envs"]["RUN_DIR"].startswith(place) for place in task["volumes"])


def test_kubernetes_calls_torchrun(repository: Path, tmp_path: Path) -> None:
    service, job = yaml.safe_load_all((repository / "examples" / "kubernetes.yaml").read_text())
    template = job["spec"]["template"]["spec"]
    container = template["containers"][0]
    environment: dict[str, Any] = {
        variable["name"]: variable["value"] for variable in container["env"]
    }
    name = job["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed" and template["restartPolicy"] == "Never"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(environment["NODES"])
    resources = container["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == int(environment["GPUS"])
    assert int(resources["requests"]["cpu"]) == int(environment["GPUS"]) * int(
        environment["OMP_NUM_THREADS"]
    )
    assert template["terminationGracePeriodSeconds"] > int(
        environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    )
    assert any(name.startswith("rdma/") for name in resources["limits"])
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {
        "job-name": name
    }
    assert template["subdomain"] == service["metadata"]["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in template["volumes"]
    }
    environment |= {"NODES": "2", "GPUS": "1", "RUN_DIR": str(tmp_path / "run")}
    command = [*container["command"], *container["args"]]
    for index in (0, 1):
        called = run_script(
            command,
            tmp_path,
            {"torchrun": 'echo "$@"'},
            {**environment, "JOB_COMPLETION_INDEX": str(index)},
        )
        own = {
            "id": name,
            "endpoint": f"{name}-0.{template['subdomain']}:{service['spec']['ports'][0]['port']}",
            "conf": f"is_host={int(index == 0)},join_timeout=1800,read_timeout=1800",
            "own": "",
        }
        assert called.stdout.strip() == ARGUMENTS.format(**own, run_dir=tmp_path / "run"), (
            called.stderr
        )


def test_kubernetes_prepares_all_shares(repository: Path, tmp_path: Path) -> None:
    job = yaml.safe_load((repository / "examples" / "kubernetes_prepare.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == int(environment["SHARES"]) >= job["spec"]["parallelism"]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some text")
    environment |= {"SHARES": "2", "SOURCE": "texts", "TOKENIZER": "bytes", "STORE": "store"}
    command = [*container["command"], *container["args"]]
    for index in (1, 0):
        assert not (tmp_path / "store").exists() or index == 0
        given = {**environment, "JOB_COMPLETION_INDEX": str(index)}
        asked = run_script(command, tmp_path, {"longctx": 'printf "%s\\n" "$@"'}, given)
        words = asked.stdout.splitlines()
        assert words[words.index("--share") + 1] == f"{index + 1}/2"
        with contextlib.chdir(tmp_path):
            assert main(words) == 0
    assert (tmp_path / "store" / "manifest.json").is_file()


def test_the_image_is_that_of_the_kubernetes_job(repository: Path) -> None:
    lines = (repository / "examples" / "Dockerfile").read_text().splitlines()
    (image,) = [line.split(" -t ")[1].split()[0] for line in lines if " -t " in line]
    _, job = yaml.safe_load_all((repository / "examples" / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    job = yaml.safe_load((repository / "examples" / "kubernetes_prepare.yaml").read_text())
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == image
    assert container["image"] == image and f"WORKDIR {container['workingDir']}" in lines
    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = [
        extra
        for line in lines
        for found in re.findall(r"EXTRAS=(\S+)", line)
        for extra in found.split(",")
    ]
    assert len(named) == 5 and set(named) <= set(extras)


@pytest.mark.slow
def test_a_mistake_in_a_process_is_said_without_a_traceback() -> None:
    command = [sys.executable, "-m", "longctx", "train", "nowhere.yaml", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert (
        done.stderr.count("configuration file nowhere.yaml not found") == 1
        and "Traceback" not in done.stderr
    )


@pytest.mark.slow
def test_a_command_starts_its_processes(tmp_path: Path) -> None:
    """`train --processes 2` is a run on two ranks, which prints each line once."""
    run = tmp_path / "run"
    settings = [
        *SMALL,
        f"data.store={make_store(tmp_path)}",
        f"train.run_dir={run}",
        "train.steps=1",
        "checkpoint.every=null",
    ]
    command = [
        sys.executable,
        "-m",
        "longctx",
        "train",
        *(f"--{setting}" for setting in settings),
        "--processes",
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "optimizer.warmup_steps 2 is shortened to train.steps 1" in done.stderr
    assert done.stdout.count("on 2 ranks (cpu, float32, attention by cpu)") == 1
    assert (
        (run / "config.yaml").read_text().startswith("# 2 ranks: cpu, float32, attention by cpu\n")
    )
    assert done.stdout.count("step 1/1 loss") == 1


def test_another_package_of_the_name_in_the_working_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """New processes look there first, unlike the script that pip installs."""
    (tmp_path / "longctx").mkdir()
    (tmp_path / "longctx" / "__init__.py").write_text("raise SystemExit('the other program ran')")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "run.yaml", "--processes", "2"]) == 2
    said = capsys.readouterr().err
    assert (
        f"would import another longctx, {tmp_path / 'longctx'}" in said
        and "start the command in another folder" in said
    )


def test_a_process_of_torchrun_starts_no_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert main(["train", "nowhere.yaml", "--processes", "2"]) == 2
    assert "--processes is 2, but torchrun started 4 on this machine" in capsys.readouterr().err
    assert main(["train", "nowhere.yaml", "--processes", "4"]) == 2
    assert "configuration file nowhere.yaml not found" in capsys.readouterr().err
