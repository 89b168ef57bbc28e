"""README and docs: commands run or at least parse, links and anchors resolve, figures are those of bench/results."""

import contextlib
import csv
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

import harness
import longctx
from longctx import cli
from longctx.config import ConfigError
from longctx.config.reading import SETTINGS
from tests import launched
from tests.training_cases import make_store

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, *DOCS]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def name_of(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


def fences(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in this language."""
    return [text for kind, text in FENCE.findall(page.read_text("utf-8")) if kind == language]


def commands(page: Path) -> list[list[str]]:
    """Every command of the page's bash blocks, as words without comments and redirections."""
    lines = "".join(fences(page, "bash")).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[: line.index(">")] if ">" in line else line for line in words if line]


def longctx_arguments(command: list[str]) -> list[str] | None:
    """Arguments of `longctx`, called directly or under torchrun; None for other commands."""
    if command[0] == "longctx":
        return command[1:]
    return command[command.index("longctx") + 1 :] if command[0] == "torchrun" and "longctx" in command else None


# --- every command


COMMANDS = [(page, command) for page in PAGES for command in commands(page)]


def test_there_are_commands() -> None:
    assert {command[0] for _, command in COMMANDS} >= {"longctx", "torchrun", "make", "pip"}
    assert len(commands(README)) > 10


@pytest.mark.parametrize(
    ("page", "command"), COMMANDS, ids=lambda value: " ".join(value) if isinstance(value, list) else value.name
)
def test_commands_exist(page: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks options, settings, files, extras and targets of every command, also of those that are not run below."""
    while "=" in command[0]:
        command = command[1:]
    for word in command:
        if word.startswith(("examples/", "bench/")):
            assert (ROOT / word).exists()
    if (arguments := longctx_arguments(command)) is not None:
        monkeypatch.setattr(cli, "_module", without_running(cli._module))
        monkeypatch.setattr("longctx.parallel.launch.launch", lambda *arguments: 0)
        if arguments[-1] == "--help":
            with pytest.raises(SystemExit, match="0"):
                cli.main(arguments)
        else:
            assert cli.main(arguments) == 0
        assert {override.split("=")[0] for override in cli.split_overrides(arguments)[1]} <= set(SETTINGS)
    elif command[0] == "make":
        assert re.search(rf"^{command[1]}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    elif command[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
        assert set(re.findall(r"\[(\w+)\]", command[-1])) <= set(extras)
    else:
        assert command[0] in ("torchrun", "python", "tensorboard", "sbatch", "kubectl", "lm_eval")


def without_running(module_of: object) -> object:
    """Wraps `cli._module` so that the `run` of every command does nothing."""

    def module(name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(**{**vars(module_of(name)), "run": lambda arguments: 0})  # type: ignore[operator]

    return module


# --- commands that two cores can run


SMALL = ["--batch.global_tokens", "4096", "--batch.tokens_per_rank", "2048", "--checkpoint.every", "1"]


def why_not_run(command: list[str]) -> str:
    """Reason why a command is not run here; empty if it is run."""
    arguments, text = longctx_arguments(command), " ".join(command)
    if arguments is None and command[0] != "python":
        return "installs, serves or schedules, or tests/test_examples.py runs it"
    if re.search(r"--processes 8|--nproc-per-node 8|-node 4|--nnodes", text):
        return "more devices than two cores"
    if re.search(r"smollm2|modernbert|runs/mine (OUT|--needle|--store)|generate", text):
        return "needs a checkpoint: tests/test_finetune.py, test_evaluation.py, test_encoders.py and test_generate.py run it"
    if re.search(r"-m gpu|first_contact|attention_gpu|training_gpu|pretrain_128k|python-stdlib-bytes", text):
        return "needs a GPU or minutes"
    return "other tests run it" if text in ("longctx prepare", "longctx train --help") or "finetune" in text else ""


def run(command: list[str], folder: Path, steps: int) -> str:
    """Runs a command in `folder`, with `steps` small steps if it trains, and returns its output.

    Processes that it starts are made by the fork server of the tests; tests/test_launch.py starts torchrun.
    """
    arguments, ranks = longctx_arguments(command), 1
    if command[0] == "torchrun":
        ranks = int(command[command.index("--nproc-per-node") + 1])
    if arguments is None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        process = subprocess.run([sys.executable, *command[1:]], cwd=folder, env=environment, capture_output=True, text=True)
        assert process.returncode == 0, f"{shlex.join(command)}\n{process.stdout}\n{process.stderr}"
        return process.stdout
    if "--processes" in arguments:
        at = arguments.index("--processes")
        ranks = int(arguments[at + 1])
        arguments = arguments[:at] + arguments[at + 2 :]
    if arguments[0] == "train":
        arguments += [] if "--profile-steps" in arguments else ["--train.steps", str(steps)]
        arguments += [] if "retrieval.yaml" in " ".join(command) else SMALL
    with contextlib.chdir(folder):
        return launched.run(*arguments, ranks=ranks)[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that commands refer to: texts, small stores, a file of lengths, settings, and the examples."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        words = [f"word{(7 * number + place) % 97}" for place in range(60 * (1 + number % 5))]
        (texts / f"{number}.txt").write_text(" ".join(words))
    (tmp_path / "made").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "stores").mkdir()
    store = make_store(tmp_path / "made")
    for name in ("python-stdlib", "other"):
        (tmp_path / "stores" / name).symlink_to(store)
    (tmp_path / "lengths.txt").write_text("\n".join(["60000", "9000", *["700"] * 60]))
    (tmp_path / "run.yaml").write_text(f"data: {{store: {store}, max_length: 1500}}\nmodel: {{vocab_size: 257}}\n")
    for name in ("examples", "bench"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run_page(page: Path, folder: Path) -> list[str]:
    steps, outputs = 1, []
    for command in commands(page):
        if not why_not_run(command):
            steps += "train" in command
            outputs.append(run(command, folder, steps))
    return outputs


def test_the_tour_of_the_readme(folder: Path) -> None:
    outputs = run_page(README, folder)
    assert len(outputs) == 6
    assert "step 2 loss" in outputs[2], "trains"
    assert "from step 2" in outputs[3] and "step 3 loss" in outputs[3], "resumes"
    assert (folder / "compare.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_the_commands_of_a_page(page: Path, folder: Path) -> None:
    run_page(page, folder)


PYTHON = [(page, block) for page in PAGES for block in fences(page, "python") if block.startswith("import longctx")]


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=lambda value: value.name if isinstance(value, Path) else "")
def test_python_blocks(page: Path, block: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("longctx.start._train", lambda *arguments: (True, 1))
    exec(compile(block, page.name, "exec"), {})


def test_the_error_in_the_guide_is_the_one_that_is_printed(folder: Path) -> None:
    (block,) = [text for text in fences(ROOT / "docs" / "configuration.md", "text") if "2 problems" in text]
    (folder / "run.yaml").write_text("batch: {tokens_per_rnk: 4096}\ncontext: {degree: 4}\n")
    with pytest.raises(ConfigError) as caught:
        longctx.load_config(folder / "run.yaml")
    assert block.strip() == f"longctx train: error: {caught.value}".replace(str(folder / "run.yaml"), "run.yaml")


# --- links


def slug(heading: str) -> str:
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text("utf-8"))
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=name_of)
def test_links_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text("utf-8"))
    for link in re.findall(r"\]\(<?([^)>\s]+)>?\)", text):
        target, _, anchor = link.partition("#")
        if target.startswith("http"):
            continue
        file = page if not target else page.parent / target
        assert file.exists(), f"{page.name}: {link}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {link}"


def test_the_navigation_has_every_page() -> None:
    def files(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [file for part in parts for file in files(part)]

    listed = files(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    assert sorted(listed) == [page.name for page in DOCS]
    features = README.read_text("utf-8")
    assert all(f"](docs/{name})" in features for name in listed if name != "index.md")


def test_the_readme_is_short() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 150


def test_the_site_builds(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]  # --quiet would hide warnings
    process = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    linked = {name for page in DOCS for name in re.findall(r"\]\(\.\./([^)#]+)", page.read_text("utf-8"))}
    assert "examples/quickstart.yaml" in linked
    for name in linked:
        assert list((tmp_path / "repository").glob(f"{name}*")), f"the site lacks {name}"
    assert "repository/examples/quickstart.yaml" in (tmp_path / "configuration" / "index.html").read_text("utf-8")


FOREIGN = re.compile(r"pip install ['\"]?longctx\b|\blongctx\[|longctx/longctx|git clone …")


def test_no_text_names_the_registrys_package_or_an_address_that_does_not_exist() -> None:
    """`longctx` on the registry is somebody else's program, and the repository has no public address yet."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = {name: (ROOT / name) for name in filter(None, listed.split("\0")) if name != "tests/test_docs.py"}
    for name, path in texts.items():
        if path.is_file() and not path.is_symlink() and path.suffix not in (".png", ".arrow", ".distcp"):
            found = FOREIGN.search(path.read_text("utf-8", "replace"))
            assert found is None, f"{name}: {found and found[0]}"


# --- figures


RESULTS = ["mix", "ranks", "documents", "fixed", "auto", "without barriers", "over best static", "bins", "best static"]
RESULTS += ["plain static", "Megatron main", "Megatron dev", "FlexSP-like", "limit"]
"""The first columns of bench/results/plan.md; documents are per rank."""


def results() -> list[dict[str, str]]:
    """The rows of the first table of bench/results/plan.md."""
    lines = (ROOT / "bench" / "results" / "plan.md").read_text("utf-8").splitlines()
    table = lines[next(number for number, line in enumerate(lines) if line.startswith("| mix | ranks |")) + 2 :]
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table[: table.index("")]]
    return [dict(zip(RESULTS, row[: len(RESULTS)], strict=True)) for row in rows]


COLUMNS = ["auto", "without barriers", "over best static", "bins", "FlexSP-like", "Megatron dev", "Megatron main", "limit"]


def test_modelled_speedups_are_those_of_the_benchmark() -> None:
    text = (ROOT / "docs" / "planning.md").read_text("utf-8")
    rows = {f"{row['mix']}, {row['documents']}": row for row in results() if row["ranks"] == "64"}
    quoted = re.findall(r"^\| (\w+, \d+) \|(.*)\|$", text, re.MULTILINE)
    assert {name for name, _ in quoted} == set(rows)
    for name, cells in quoted:
        assert [cell.strip(" *") for cell in cells.split("|")] == [rows[name][column] for column in COLUMNS], name


def test_the_figures_of_the_readme_are_those_of_the_benchmark() -> None:
    readme = README.read_text("utf-8")
    rows = [row for row in results() if row["ranks"] == "64"]
    exact = [row for row in _speedups() if (row["ranks"], row["planner"]) == ("64", "auto")]
    for column, digits in (("speedup_over_fixed", 1), ("speedup_over_best_static", 2)):
        values = [float(row[column]) for row in exact]
        assert f"{min(values):.{digits}f} to {max(values):.{digits}f}×" in readme
    lowest = min(min(float(row["auto"]), float(row["without barriers"])) for row in rows)
    assert f"{lowest:.2f} to" in readme
    (example,) = [row for row in rows if (row["mix"], row["documents"]) == ("wlb_128k", "4")]
    assert f"**{float(example['auto']):.1f}× as fast" in readme
    assert f"the {float(example['auto']):.1f}× become {float(example['without barriers']):.1f}×" in readme


def _speedups() -> list[dict[str, str]]:
    """The rows of the first table as bench/results/plan.csv has them."""
    with (ROOT / "bench" / "results" / "plan.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["table"] == "speedups"]


def test_the_ranges_over_all_settings_are_those_of_the_benchmark() -> None:
    rows = _speedups()
    text = (ROOT / "docs" / "planning.md").read_text("utf-8")
    for documents in ("1", "4", "16"):
        cells = []
        for column in ("speedup_over_fixed", "speedup_over_best_static"):
            for planner in ("auto", "bins"):
                ours = [row for row in rows if (row["planner"], row["documents_a_rank"]) == (planner, documents)]
                values = [float(row[column]) for row in ours]
                cells.append(f"{min(values):.2f}, {statistics.median(values):.2f}, {max(values):.2f}")
        cells.append(f"{sum(value > 1 for value in values)} of {len(values)}")
        assert f"| {documents} | {' | '.join(cells)} |" in text


def test_the_figures_of_32_ranks_are_those_of_the_benchmark() -> None:
    text, readme = (ROOT / "docs" / "planning.md").read_text("utf-8"), README.read_text("utf-8")
    section = text.partition("### Measured on 32 ranks")[2].partition("### Measured on emulated")[0]
    head, _, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    table = {name: dict(zip(head[1:], cells, strict=True)) for name, *cells in rows}
    names = {"static:8": "fixed static (degree 8)", "megatron-dev": "Megatron dev", "bins": "mode bins"}
    names |= {"best static of every step": "the best static degree of every step"}
    found: dict[str, list[float]] = {name: [] for name in names}
    folder = ROOT / "bench" / "results"
    results = [json.loads(path.read_text("utf-8")) for path in folder.glob("modelled-4x8-*.json")]
    settings = [f"{result['cluster']['mix']}, {result['cluster']['documents_a_rank']}" for result in results]
    assert sorted(settings) == sorted(head[1:])
    for result, setting in zip(results, settings, strict=True):
        modes = {mode["mode"]: mode for mode in result["measured"]["modes"]}
        auto = modes["auto"]
        assert len(auto["steps"]) == 10
        assert table["dilation"][setting] == f"{result['cluster']['dilation']:g}"
        assert table["step of auto, median"][setting] == f"{statistics.median(step['seconds'] for step in auto['steps']):.1f} s"
        share = sum(step["slept_s"] for step in auto["steps"]) / auto["total_s"]
        assert table["computing under auto, mean rank"][setting] == f"{share:.0%}".replace("%", " %")
        for mode, values in modes.items():
            name = names.get(mode, "auto")
            error = f"{values['prediction_error']:+.1%}".replace("%", " %").replace("-", "−")
            assert table[f"prediction error of {name}"][setting] == error
            if mode != "auto":
                median = harness.speedups(values, auto)[0]
                assert table[f"auto over {name}"][setting].replace("**", "") == median
                found[mode].append(float(median.partition("×")[0]))
    for mode in ("static:8", "best static of every step"):
        assert f"| {min(found[mode]):.2f} to {max(found[mode]):.2f}× |" in readme
    within = [abs(mode["prediction_error"]) <= 0.1 for result in results for mode in result["measured"]["modes"]]
    assert f"{sum(within)} of {len(within)} predictions are within 10 %" in section
    for mix, documents in (("magi_192k", 1), ("magi_192k", 4), ("wlb_128k", 4), ("wlb_128k", 16)):
        name = f"modelled-4x8-{mix}-{documents}.json"
        first, again = ({mode["mode"]: mode for mode in _measured(folder / file)} for file in (name, f"again-{name}"))
        for mode in first.keys() - {"auto", "megatron-dev"}:
            figures = [harness.speedups(modes[mode], modes["auto"])[0].partition(" ")[0] for modes in (first, again)]
            assert all(figure in re.split(rf"{mix} with {documents} documents?: ", section)[1] for figure in figures)
    large = {mode["mode"]: mode for mode in _measured(folder / "short-modelled-8x8-magi_192k-1.json")}
    assert f"had {harness.speedups(large['static:8'], large['auto'])[0]} over fixed static" in section


def _measured(file: Path) -> list[dict[str, Any]]:
    """Returns the modes that a run of `bench/cluster.py` measured."""
    modes: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))["measured"]["modes"]
    return modes
