"""The wheel `longctx-check`: built from longctx/check, it checks steps where longctx cannot be
imported."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow

ROOM = Path(__file__).parents[2] / "longctx" / "check"
LOOP = """
import torch
import torch.distributed as dist
from longctx_check import record

def make(probe):
    rank, ranks = 0, 1
    if dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()
    model = probe.model()
    targets = sum(len(ids) - 1 for ids in probe.documents)
    with record(model) as seen:
        for ids in probe.documents[rank::ranks]:
            tokens = torch.tensor([ids])
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
            sum_of_losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")
            (sum_of_losses / targets).backward()
        if ranks > 1:
            for weight in model.parameters():
                dist.all_reduce(weight.grad)
        return seen.step()
"""
WRONG = LOOP.replace("/ targets", "/ (2 * targets)")
PROBE = ["--probe", "few documents"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package alone, built without network from a copy of the room."""
    folder = tmp_path_factory.mktemp("check")
    source = folder / "source"
    shutil.copytree(ROOM, source, ignore=shutil.ignore_patterns("__pycache__", "build"))
    target = folder / "installed"
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target"]
    install = [sys.executable, "-m", "pip", "install", *options, str(target), str(source)]
    subprocess.run(install, check=True)
    return target


def run_module(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(installed, folder, "-m", *words)


def run(
    installed: Path, folder: Path, *words: str, program: str = sys.executable, **given: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program, Python by default, in a folder where longctx cannot be imported."""
    (folder / "longctx.py").write_text(
        "raise ModuleNotFoundError('no longctx here', name='longctx')"
    )
    paths = os.pathsep.join([str(folder), str(installed)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | given
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [program, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_it_has_every_module_of_the_room(installed: Path) -> None:
    modules = {path.relative_to(ROOM) for path in ROOM.rglob("*.py") if "build" not in path.parts}
    package = installed / "longctx_check"
    assert {path.relative_to(package) for path in package.rglob("*.py")} == modules


def test_a_right_and_a_wrong_step(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "check.py").write_text(LOOP)
    right = run_module(installed, tmp_path, "longctx_check", "check.py", *PROBE)
    assert right.returncode == 0, right.stderr
    assert right.stdout.splitlines()[0] == "few documents: right"
    (tmp_path / "check.py").write_text(WRONG)
    script = str(installed / "bin" / "longctx-check")
    wrong = run(installed, tmp_path, script, "check.py", *PROBE)
    assert wrong.returncode == 1, wrong.stderr
    assert wrong.stdout.startswith("few documents: the loss has a wrong scale")


def test_batches_are_read(installed: Path, tmp_path: Path) -> None:
    """Those of the template, right and wrong."""
    made = run_module(installed, tmp_path, "longctx_check", "--template", "data", "-o", "check.py")
    assert made.returncode == 0, made.stderr
    right = run_module(installed, tmp_path, "longctx_check", "check.py", "--data")
    assert right.returncode == 0, right.stderr
    assert right.stdout.startswith("data: right\n")
    text = (tmp_path / "check.py").read_text()
    assert "[-100]" in text
    (tmp_path / "check.py").write_text(text.replace("[-100]", "[0]"))
    wrong = run_module(installed, tmp_path, "longctx_check", "check.py", "--data")
    assert wrong.returncode == 1, wrong.stderr
    assert wrong.stdout.startswith("data: labels are not the tokens of the input: ")


def test_a_file_for_longctx_is_told_what_to_import(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "check.py").write_text(LOOP.replace("longctx_check", "longctx.check"))
    refused = run_module(installed, tmp_path, "longctx_check", "check.py", *PROBE)
    assert refused.returncode == 3
    said = "longctx is not installed: import longctx_check in place of longctx.check"
    assert said in refused.stderr


def test_it_starts_its_own_processes(installed: Path, tmp_path: Path) -> None:
    """Nothing follows their verdict."""
    (tmp_path / "check.py").write_text(LOOP)
    words = ["longctx_check", "check.py", *PROBE, "--processes", "2"]
    right = run_module(installed, tmp_path, *words)
    assert right.returncode == 0, right.stdout + right.stderr
    (tmp_path / "check.py").write_text(WRONG)
    wrong = run_module(installed, tmp_path, *words)
    assert wrong.returncode == 1, wrong.stderr
    assert wrong.stdout.startswith("few documents: the loss has a wrong scale")
    assert not re.search("Traceback|Error|torch.distributed|OMP_NUM_THREADS", wrong.stderr)
    refused = run_module(installed, tmp_path, *words, "--allow", "nothing")
    assert refused.returncode == 2
    assert refused.stderr.count("longctx-check: error: no fault is called 'nothing'") == 1
    assert "Traceback" not in refused.stderr


def test_the_action_annotates(installed: Path, tmp_path: Path) -> None:
    """Its last step, as GitHub runs it, with its inputs' defaults but for the processes."""
    action = yaml.safe_load((ROOM / "action.yml").read_text("utf-8"))
    step = action["runs"]["steps"][-1]
    inputs = {name: each["default"] for name, each in action["inputs"].items()}
    inputs["processes"] = "1"
    inputs["arguments"] = "--probe=few documents\n--allow=documents are cut\n"
    given = {}
    for name, value in step["env"].items():
        (wanted,) = re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", value).groups()
        given[name] = inputs[wanted]
    (tmp_path / inputs["file"]).write_text(WRONG)
    bash = shutil.which("bash")
    assert bash is not None
    words = ["--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = run(installed, tmp_path, *words, program=bash, **given)
    assert done.returncode == 1, done.stderr
    place = "::error file=check.py,title=check-step%2C few documents::"
    assert f"\n{place}the loss has a wrong scale: " in done.stdout


@pytest.mark.parametrize("processes", [1, 2])
def test_the_plugin(installed: Path, tmp_path: Path, processes: int) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = "longctx_check.pytest_plugin"')
    mark = f'@pytest.mark.check_step(processes={processes}, probes=["few documents"])\n'
    body = "def test_step(probe):"
    test = "import pytest" + LOOP.replace("def make(probe):", f"{mark}{body}")
    (tmp_path / "test_right.py").write_text(test)
    (tmp_path / "test_wrong.py").write_text(test.replace("/ targets", "/ (2 * targets)"))
    done = run_module(installed, tmp_path, "pytest", "-q", "-p", "no:cacheprovider")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "few documents: the loss has a wrong scale" in done.stdout
