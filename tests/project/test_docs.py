"""README and docs: commands run or at least parse, links and anchors resolve, figures are those of
bench/results."""

import argparse
import contextlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
import yaml

import figures
import longctx
from longctx import cli
from longctx.config import ConfigError
from longctx.config.names import FIELDS, SETTINGS
from tests import launched
from tests.training_cases import make_store

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [README, *DOCS]
SECTIONS = ("install.md", "tour.md")
"""Pages that are sections of the README."""
GENERATED = ("settings.md", "families.md", "encoders.md", "names.md", "claims.md", *SECTIONS)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def name_of(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


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
    return (
        command[command.index("longctx") + 1 :]
        if command[0] == "torchrun" and "longctx" in command
        else None
    )


# --- every command


COMMANDS = [(page, command) for page in PAGES for command in commands(page)]


def test_there_are_commands() -> None:
    assert {command[0] for _, command in COMMANDS} >= {"longctx", "torchrun", "make", "pip"}


@pytest.mark.parametrize(
    ("page", "command"),
    COMMANDS,
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.name,
)
def test_commands_exist(page: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks options, settings, files, extras and targets of every command, also of those that are
    not run below."""
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
        assert {override.split("=")[0] for override in cli.split_overrides(arguments)[1]} <= set(
            SETTINGS
        )
    elif command[0] == "make":
        assert re.search(rf"^{command[1]}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    elif command[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
            "optional-dependencies"
        ]
        assert set(re.findall(r"\[(\w+)\]", command[-1])) <= set(extras)
    else:
        assert Path(command[0]).name in (
            "torchrun",
            "python",
            "tensorboard",
            "sbatch",
            "kubectl",
            "sky",
            "lm_eval",
        )


def without_running(module_of: object) -> object:
    """Wraps `cli._module` so that the `run` of every command does nothing."""

    def module(name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(**{**vars(module_of(name)), "run": lambda arguments: 0})  # type: ignore[operator]

    return module


CALL = re.compile(r"(?:[`/]|-m )longctx ([a-z]\w*)[`\s\"]|-m\", \"longctx\", \"(\w+)\"")
"""A call of longctx: in backticks, by its path, by `python -m`, or as a list of words."""
MENTION = re.compile(rf"\blongctx ({'|'.join(cli.COMMANDS)})\b([^`\n;)|#]*)")


def files_of(*folders: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    files = [
        ROOT / name for name in listed.split("\0") if name and not name.endswith((".png", ".csv"))
    ]
    return [file for file in files if file.is_file() and not file.is_symlink()]


def options_of(command: str) -> set[str]:
    parser, module = argparse.ArgumentParser(), cli._module(command)
    module.add_arguments(parser)
    return {
        *parser._option_string_actions,
        *(["--processes"] if hasattr(module, "PROCESSES") else []),
    }


def test_every_mention_of_a_command_exists() -> None:
    """In scripts, examples, pages, help and messages: command, options and settings are those that
    parsers know."""
    known = {command: options_of(command) for command in cli.COMMANDS}
    wrong, found = [], 0
    for file in files_of(".", ":!tests", ":!tools"):
        text = re.sub(r"\\\n\s*|\"\n\s*f?\"", " ", file.read_text("utf-8"))
        # Which names no command.
        calls = [one or other for one, other in CALL.findall(text) if file.name != "launch.py"]
        wrong += [f"{file.name}: longctx {name}" for name in calls if name not in known]
        for name, rest in MENTION.findall(text.replace("\\n", "\n")):
            found += 1
            options = re.findall(
                r"(?<=\s)--[a-zA-Z_]+(?:[\w-]|\.\w)*", rest.partition("torchrun")[0]
            )
            settings = {option for option in options if option[2:].replace("-", "_") in FIELDS}
            wrong += [
                f"{file.name}: longctx {name} {option}"
                for option in {*options} - settings - known[name]
            ]
    assert found > 250 and wrong == []


# --- commands that two cores can run


SMALL = [
    "--batch.global_tokens",
    "4096",
    "--batch.tokens_per_rank",
    "2048",
    "--checkpoint.every",
    "1",
]


def why_not_run(command: list[str]) -> str:
    """Reason why a command is not run here; empty if it is run."""
    arguments, text = longctx_arguments(command), " ".join(command)
    installs = {"pip", "venv"} & set(command)
    if arguments is None and (command[0] != "python" or installs):
        return "installs, serves or schedules, or tests/project/test_examples.py runs it"
    if "s3://" in text:
        return "needs object storage: tests/data/test_remote_stores.py has one"
    if re.search(r"--processes 8|--nproc-per-node 8|-node 4|--nnodes", text):
        return "more devices than two cores"
    if re.search(
        r"smollm2|modernbert|examples/recipes/|--tokenizer \w+-?\w*/|ask"
        r"|runs/(?:mine|extended|summaries) (OUT|--store)",
        text,
    ):
        return (
            "needs a checkpoint: tests/commands/test_finetune.py, test_evaluation.py and "
            "test_encoders.py run it"
        )
    if "check-step" in command or "bench.check" in text:
        return "ends with 1, as it finds a fault, or takes minutes: tests/check/test_check_step.py"
    if re.search(
        r"-m gpu|cuda|first_contact|attention_gpu|training_gpu|pretrain_128k|python-stdlib-bytes",
        text,
    ):
        return "needs a GPU or minutes"
    return (
        "other tests run it"
        if text in ("longctx prepare", "longctx config") or "finetune" in text
        else ""
    )


def run(command: list[str], folder: Path, steps: int) -> str:
    """Runs a command in `folder`, with `steps` small steps if it trains, and returns its output.

    Processes that it starts are made by the fork server of the tests; tests/parallel/test_launch.py starts
    torchrun.
    """
    arguments, ranks = longctx_arguments(command), 1
    if command[0] == "torchrun":
        ranks = int(command[command.index("--nproc-per-node") + 1])
    if arguments is None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        process = subprocess.run(
            [sys.executable, *command[1:]],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, f"{shlex.join(command)}\n{process.stdout}\n{process.stderr}"
        return process.stdout
    if "--processes" in arguments:
        at = arguments.index("--processes")
        ranks = int(arguments[at + 1])
        arguments = arguments[:at] + arguments[at + 2 :]
    if arguments[0] == "train":
        arguments += [] if "--trace-steps" in arguments else ["--train.steps", str(steps)]
        arguments += SMALL
    with contextlib.chdir(folder):
        return launched.run(*arguments, ranks=ranks)[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that commands refer to: texts, small stores, a file of lengths,
    settings, and the examples."""
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
    (tmp_path / "groups.jsonl").write_text('{"prompt": 2048, "completions": [256, 300, 180]}\n' * 4)
    (tmp_path / "run.yaml").write_text(
        f"data: {{store: {store}, max_length: 1500}}\nmodel: {{vocab_size: 257}}\n"
    )
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


@pytest.mark.slow
def test_the_tour_of_the_readme(folder: Path) -> None:
    outputs = run_page(README, folder)
    assert len(outputs) == 4
    assert "step 2/2 loss" in outputs[3], "trains"
    assert "TRL's packing" in outputs[0] and "8 ranks" in outputs[0], "compares"


@pytest.mark.slow
@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_the_commands_of_a_page(page: Path, folder: Path) -> None:
    run_page(page, folder)


PYTHON = [
    (page, block)
    for page in PAGES
    for block in fences(page, "python")
    if block.startswith("import longctx")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "block"), PYTHON, ids=lambda value: value.name if isinstance(value, Path) else ""
)
def test_python_blocks(
    page: Path, block: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("longctx.start._train", lambda *arguments: (True, 1))
    exec(compile(block, page.name, "exec"), {})


def test_the_error_in_the_guide_is_the_one_that_is_printed(folder: Path) -> None:
    (block,) = [
        text for text in fences(ROOT / "docs" / "configuration.md", "text") if "2 problems" in text
    ]
    (folder / "run.yaml").write_text("batch: {tokens_per_rnk: 4096}\ncontext: {degree: 4}\n")
    with pytest.raises(ConfigError) as caught:
        longctx.load_config(folder / "run.yaml")
    assert block.strip() == f"longctx train: error: {caught.value}".replace(
        str(folder / "run.yaml"), "run.yaml"
    )


def test_the_check_on_the_page_is_that_of_the_example() -> None:
    page = fences(ROOT / "docs" / "check-step.md", "python")[0]
    example = (ROOT / "examples" / "check_step.py").read_text("utf-8")
    function = page.partition("def make(probe):\n")[2]
    assert function and function in example.replace(
        '    """Returns the trainer to check, on the documents of a probe."""\n', ""
    )


def test_numbers_of_exact_models_are_those_of_their_pages() -> None:
    exact = [
        re.search(r": (\d+) exact", (ROOT / "docs" / f"{name}.md").read_text("utf-8"))
        for name in ("families", "encoders")
    ]
    causal, encoders = (found[1] for found in exact if found is not None)
    pages = [
        README,
        ROOT / "CHANGELOG.md",
        ROOT / "docs" / "why-not.md",
        ROOT / "docs" / "transformers.md",
    ]
    said = [
        found
        for page in pages
        for found in re.findall(r"\b(\d+) causal and (\d+) encoder", page.read_text("utf-8"))
    ]
    assert len(said) >= 3 and set(said) == {(causal, encoders)}


def test_every_job_that_runs_has_a_test() -> None:
    page = (ROOT / "docs" / "what-runs-where.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    cells = [cell.strip() for row in rows for cell in row.split("|")[2:-1]]
    tests = [re.findall(r"`(test_\w+\.py)`", cell) for cell in cells]
    assert len(rows) > 12 and all(
        bool(named) != (cell == "–") for cell, named in zip(cells, tests, strict=True)
    )
    there = {path.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert {name for named in tests for name in named} <= there


# --- links


def slug(heading: str) -> str:
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text("utf-8"))
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=name_of
)
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
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in DOCS)
    features, evidence = (
        README.read_text("utf-8"),
        (ROOT / "docs" / "evidence" / "index.md").read_text("utf-8"),
    )
    assert all(
        f"](docs/{name})" in features
        for name in listed
        if name not in ("index.md", *SECTIONS) and not name.startswith("evidence/")
    )
    assert all(
        f"]({page.name})" in evidence
        for page in (ROOT / "docs" / "evidence").glob("*.md")
        if page.name != "index.md"
    )


def test_the_readme_is_short() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 110


def test_the_pages_are_short() -> None:
    """Without generated pages and tables. Who adds an answer shortens another one."""
    generated = re.compile(r"<!-- ([\w :-]+) -->.*?<!-- end of [\w ]+ -->", re.DOTALL)
    written = [page for page in PAGES if page.name not in GENERATED]
    words = {
        name_of(page): len(generated.sub("", page.read_text("utf-8")).split()) for page in written
    }
    assert sum(words.values()) <= 29_600, sorted(words.items(), key=lambda item: -item[1])[:5]


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    # --quiet would hide warnings.
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    process = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    linked = {
        name
        for page in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"\]\(\.\./([^)#]+)", page.read_text("utf-8"))
    }
    assert "examples/quickstart.yaml" in linked
    for name in linked:
        assert list((tmp_path / "repository").glob(f"{name}*")), f"the site lacks {name}"
    assert "repository/examples/quickstart.yaml" in (
        tmp_path / "configuration" / "index.html"
    ).read_text("utf-8")
    assert "repository/bench/results/parity.csv" in (
        tmp_path / "evidence" / "exact" / "index.html"
    ).read_text("utf-8")


FOREIGN = re.compile(r"pip install ['\"]?longctx\b|\blongctx\[|longctx/longctx|git clone …")


def test_no_text_names_the_registrys_package_or_an_address_that_does_not_exist() -> None:
    """`longctx` on the registry is somebody else's program, and the repository has no public
    address yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    texts = {
        name: (ROOT / name)
        for name in filter(None, listed.split("\0"))
        if name != "tests/project/test_docs.py"
    }
    for name, path in texts.items():
        if (
            path.is_file()
            and not path.is_symlink()
            and path.suffix not in (".png", ".arrow", ".distcp")
        ):
            found = FOREIGN.search(path.read_text("utf-8", "replace"))
            assert found is None, f"{name}: {found and found[0]}"


# --- figures


def test_figures_are_those_of_the_benchmarks() -> None:
    """`python bench/figures.py` writes them into the pages; nothing between its comments is written
    by hand."""
    used = []
    for page in figures.PAGES:
        text = page.read_text("utf-8")
        used += [block[2] for block in figures.BLOCK.finditer(text)]
        assert figures.filled(text) == text, f"{page.name}: run `python bench/figures.py`"
        changed = text.replace("1", "2")
        assert figures.filled(changed) != changed
    assert sorted(used) == sorted(figures.FIGURES)


FIGURE = re.compile(r"(\d+(?:\.\d+)?)(?: to (\d+(?:\.\d+)?))?( ?[×%])")


def figures_of(text: str) -> list[tuple[str, str]]:
    """Figures of a text with their units, both ends of a range."""
    found = []
    for first, last, unit in FIGURE.findall(text):
        found += [(figure, unit.strip()) for figure in (first, last) if figure]
    return found


def test_claims_have_the_figures_of_their_pages() -> None:
    """As they stand there, or rounded."""
    evidence = ROOT / "docs" / "evidence"
    checked = 0
    for line in (evidence / "index.md").read_text("utf-8").splitlines():
        row = re.match(r"\| (.*?)\]\((\w[\w-]*\.md)\)(.*?) \|", line)
        if row is None:
            continue
        there = figures_of((evidence / row[2]).read_text("utf-8"))
        for figure, unit in figures_of(row[1] + row[3]):
            places = len(figure.partition(".")[2])
            rounded = {f"{float(other):.{places}f}" for other, its in there if its == unit}
            assert figure in rounded, f"{row[2]}: {figure}{unit}"
            checked += 1
    assert checked >= 10
    claimed = (evidence / "others.md").read_text("utf-8").split("<!-- end")[0]
    (time,) = re.findall(r"for time (\d+)%", claimed)
    (memory,) = re.findall(r"for memory (\d+)%", claimed)
    stated = f"a median error of {time} %, their memory of {memory} %"
    assert stated in (evidence / "index.md").read_text("utf-8")


def test_figures_of_the_readme_are_those_of_its_pages() -> None:
    """Of pages that it links, as they stand there or rounded; those of the picture are held by
    tests/comparison/test_pictures.py."""
    text = README.read_text("utf-8")
    linked = {name for name in re.findall(r"\]\((docs/[\w/-]+\.md)", text) if "/api" not in name}
    linked.add("docs/evidence/scaling.md")  # which the claims link
    there = []
    for name in sorted(linked):
        there += figures_of((ROOT / name).read_text("utf-8"))
    (caption,) = re.findall(r"^\*One of five steps.*$", text, re.MULTILINE)
    found = figures_of(text.replace(caption, ""))
    assert len(found) > 20
    for figure, unit in found:
        places = len(figure.partition(".")[2])
        rounded = {f"{float(other):.{places}f}" for other, its in there if its == unit}
        assert figure in rounded, f"{figure}{unit}"


def test_every_emulated_run_in_the_results_is_shown() -> None:
    shown = {*figures.EMULATED.values(), *figures.EMULATED_BESIDE_MEGATRON.values()}
    assert {path.stem for path in figures.RESULTS.glob("modelled-*.json")} == shown
