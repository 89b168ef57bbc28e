"""What pages show as output is what is printed: each block is written by `tools.outputs`, or held
by a test that `HELD` names."""

import re
from pathlib import Path

import pytest

import longctx
from longctx import cli
from tests import launched
from tests.marks import slow_unless
from tools import outputs

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}\S.*\n)+", re.MULTILINE)
NO_OUTPUT = {
    ("coming-from.md", "--seq-length"): "options of Megatron-LM",
    ("how-it-works.md", "documents -> lengths"): "the parts of a step",
}
HELD = {
    ("README.md", "step 3/100"): "test_lines_of_a_run",
    ("block-diffusion.md", "keys: N0"): "test_the_page_shows_who_sees_whom",
    ("check-step.md", "data: trained by role"): "test_the_template_prints_what_the_page_shows",
    ("clusters.md", "0.918M parameters"): "test_lines_of_a_run",
    ("configuration.md", "longctx train: error"): "test_the_error_in_the_guide",
    ("evidence/check-step.md", "transformers"): "test_packed_documents_stay_apart",
    ("reliability.md", "longctx train: rank 0"): "test_pages_show_how_a_dead_rank_is_named",
    ("trainers.md", "profile cpu-2core"): "test_two_processes_on_a_laptop",
    ("troubleshooting.md", "longctx train: error: peak"): "test_the_page_shows_too_little_memory",
    ("troubleshooting.md", "longctx train: rank 0"): "test_pages_show_how_a_dead_rank_is_named",
}
"""The test that holds a block, by page and first words."""
WRITTEN = ("names.md", "settings.md", "families.md", "encoders.md", "install.md", "tour.md")


def name_of(page: Path) -> str:
    if page.name == "README.md":
        return page.name
    return str(page.relative_to(ROOT / "docs"))


def blocks(page: Path) -> list[str]:
    """Blocks of text on a page that are no code, but those that `tools.outputs` writes."""
    text = outputs.BLOCK.sub("", page.read_text("utf-8"))
    fenced = [block for kind, block in FENCE.findall(text) if kind in ("", "text")]
    indented = INDENTED.findall(FENCE.sub("", text))
    return [block.strip() for block in [*fenced, *indented]]


@pytest.mark.parametrize("page", outputs.PAGES, ids=name_of)
def test_every_block_has_a_test(page: Path) -> None:
    known = {**HELD, **NO_OUTPUT}
    expected = {first for name, first in known if name == name_of(page)}
    found = set()
    for block in blocks(page) if page.name not in WRITTEN else ():
        first = [words for words in expected if block.startswith(words)]
        assert first, f"{page.name}: which test holds {block[:60]!r}?"
        found.update(first)
    assert found == expected


def test_the_tests_that_hold_blocks_exist() -> None:
    texts = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    for name in HELD.values():
        assert any(f"def {name}" in text for text in texts), name


SHOWING = [page for page in outputs.PAGES if outputs.BLOCK.search(page.read_text("utf-8"))]


# Its commands take longest.
LONG = "parallelism.md"


@pytest.mark.parametrize("page", slow_unless(lambda page: page.name != LONG, SHOWING), ids=name_of)
def test_output_is_that_of_the_commands_above(
    page: Path,
) -> None:
    text = page.read_text("utf-8")
    assert outputs.filled(text) == text, "run python -m tools.pages"
    assert text.count("<!-- output") == len(outputs.BLOCK.findall(text)), "each is below a command"


def without_numbers(line: str) -> str:
    return re.sub(r"\d[\d.,]*[kM]?", "0", line)


def shapes(line: str) -> str:
    """A line without its numbers, names of folders and units that depend on the machine."""
    line = re.sub(r"(store|run folder|profile) \S+", r"\1 ..", line)
    line = re.sub(r"(eta) \S+|degrees \S+", r"\1 ..", line)
    return without_numbers(line)


def test_lines_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes, as the README and the page of clusters show them."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(8):
        words = [f"word{(7 * number + place) % 97}" for place in range(200)]
        (texts / f"{number}.txt").write_text(" ".join(words), "utf-8")
    longctx.prepare(str(texts), tmp_path / "store", tokenizer="bytes")
    settings = {
        "data.store": tmp_path / "store",
        "data.max_length": 768,
        "model.vocab_size": 4096,
        "data.long_documents": "split",
        "batch.global_tokens": 1024,
        "batch.tokens_per_rank": 512,
        "context.profile": ROOT / "examples" / "slow_network.yaml",
        "train.run_dir": tmp_path / "run",
        "train.steps": 2,
    }
    given = [f"--{name}={value}" for name, value in settings.items()]
    monkeypatch.chdir(ROOT)
    printed, _ = launched.run("train", "examples/quickstart.yaml", *given, ranks=2)
    said = {shapes(line) for line in printed.splitlines()}
    (lines,) = [
        block
        for block in blocks(ROOT / "docs" / "clusters.md")
        if block.startswith("0.918M parameters")
    ]
    (step,) = blocks(ROOT / "README.md")
    for line in [*lines.splitlines(), step]:
        assert shapes(line) in said, (shapes(line), printed)


def test_the_page_shows_too_little_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a text " * 50, "utf-8")
    longctx.prepare(str(tmp_path / "texts"), tmp_path / "store", tokenizer="bytes")
    (shown,) = [
        block
        for block in blocks(ROOT / "docs" / "troubleshooting.md")
        if block.startswith("longctx train: error: peak")
    ]
    settings = {
        "data.store": tmp_path / "store",
        "model.vocab_size": 2_000_000_000,
        "train.run_dir": tmp_path / "run",
    }
    assert cli.main(["train", *(f"--{name}={value}" for name, value in settings.items())]) == 2
    said = of_no_part(capsys.readouterr().err)
    pattern = ".*".join(re.escape(part) for part in of_no_part(shown).split(".."))
    assert re.match(pattern, said), (pattern, said)


def of_no_part(text: str) -> str:
    """An error about memory without its numbers, its moment and what takes memory."""
    text = re.sub(r"at: [^;]+;", "at: ..;", without_numbers(text))
    return re.sub(r"parts: [a-z ]+", "parts: ", text)
