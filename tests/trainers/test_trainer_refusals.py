"""Every refusal of trainers, and of the checks of a run, has an example in the tests, and some have
it here."""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longctx.trainers import TrainerError, dynamic_context_parallel, refusals
from longctx.trainers.documents import CountingRows, check_shapes, cut_rows
from longctx.trainers.families import AttentionOptions
from longctx.trainers.fused_head import PlannedHead
from longctx.trainers.planned_call import PlannedCall
from longctx.trainers.refusals import refuse_long_completions
from longctx.trainers.step import Planning, StepExchange
from longctx.trainers.whole_outputs import _check_arguments
from longctx.training import checks
from tests.trainer_cases import PROFILE, model
from tests.trainers.test_trainers import as_trl, trainer

CPU = torch.device("cpu")
WORDS = 3
"""Words in a row by which an example is recognized."""


def sharded_by_version_1(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = SimpleNamespace(fsdp_version=1)
    monkeypatch.setattr(ours.accelerator.state, "fsdp_plugin", plugin, raising=False)


def without_more_arguments(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours.model_accepts_loss_kwargs = False
    ours.model.forward = lambda input_ids, labels: None


def classifying(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of_trl(ours, monkeypatch)
    ours.model.__class__ = type("ForSequenceClassification", (type(ours.model),), {})


def of_trl(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    as_trl("SFTTrainer")(ours)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("qwen2", sharded_by_version_1, "FSDP version 1 is not supported: set fsdp_version to 2"),
        ("qwen2", without_more_arguments, "Qwen2ForCausalLM takes no num_items_in_batch"),
        ("qwen2", classifying, "Classification has a head that is not for tokens: use"),
        ("bert", of_trl, "SFTTrainer trains causal models, but the model is an encoder: use"),
    ],
)
def test_what_cannot_be_exact_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, change: Any, message: str
) -> None:
    ours = trainer(tmp_path, of=model(kind))
    change(ours, monkeypatch)
    with pytest.raises(TrainerError, match=message):
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)


def planned_head_with_more_arguments() -> None:
    head = PlannedHead(StepExchange(Planning(PROFILE, 200), AttentionOptions(CPU)))
    head._refuse_unknown({"use_cache": False, "token_type_ids": 1})


def planned_call_without_a_token() -> None:
    step = SimpleNamespace(exchange=None)
    exchange: Any = SimpleNamespace(plan_and_exchange=lambda *given, **named: step)
    PlannedCall(exchange).values_of(list, torch.zeros(1, 1), lambda batch, call: torch.zeros(0))


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (
            lambda: cut_rows({"input_ids": torch.ones(1, 2)}),
            "the data collator returns no labels: return both for every document",
        ),
        (
            lambda: check_shapes({"labels": [[1, 2]]}, ["labels"]),
            r"labels is a list: return a tensor of \[rows, tokens\]",
        ),
        (
            lambda: CountingRows(list)([1]),  # type: ignore[arg-type]
            "the data collator returns a list: return a dict of tensors",
        ),
        (
            lambda: _check_arguments(None, {"input_ids": [[1, 2]]}),
            r"input_ids is a list: pass a tensor of \[rows, tokens\]",
        ),
        (
            planned_head_with_more_arguments,
            "passes token_type_ids to its model, which splitting sequences would lose",
        ),
        (planned_call_without_a_token, "no row of any rank has a token: leave such batches out"),
    ],
)
def test_batches_that_cannot_be_split_are_refused(
    refused: Callable[[], object], message: str
) -> None:
    with pytest.raises(TrainerError, match=message):
        refused()


def test_completions_that_ranks_cannot_hold_are_refused() -> None:
    args = SimpleNamespace(
        max_completion_length=256, num_generations=2, world_size=2, use_vllm=False
    )
    with pytest.raises(
        TrainerError, match="256, but 2 ranks of 128 tokens hold 256 with the prompt"
    ):
        refuse_long_completions(args, 128)
    refuse_long_completions(args, 129)
    with pytest.raises(TrainerError, match="256, but 1 ranks of 129 tokens hold 129"):
        refuse_long_completions(args, 129, degree=1)
    args.use_vllm = True
    args.vllm_max_model_length = 250
    refuse_long_completions(args, 128)
    args.vllm_max_model_length = 257
    with pytest.raises(TrainerError, match="256, but 2 ranks"):
        refuse_long_completions(args, 128)
    args.max_completion_length = None
    refuse_long_completions(args, 1)
    samples_nothing = SimpleNamespace(max_completion_length=256, world_size=2)
    refuse_long_completions(samples_nothing, 1)


def texts_in(tree: ast.AST) -> Iterator[str]:
    """Yields the texts of a module or a statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def phrases(text: str) -> set[str]:
    """Returns all rows of words in a text, or in a regular expression."""
    words = re.findall(r"\w+", text.replace("\\", "").lower())
    return {" ".join(words[at : at + WORDS]) for at in range(len(words) - WORDS + 1)}


def refusals_of(path: Path) -> Iterator[ast.AST]:
    """Yields what a module says when it refuses: what it raises, yields or adds to a list."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        said: ast.AST | None = None
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            said = node.exc
        elif isinstance(node, ast.Yield):
            said = node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "found.append":
            said = node
        texts = list(texts_in(said)) if said is not None else []
        is_note = any(text.startswith("note:") for text in texts)
        if said is not None and any(map(phrases, texts)) and not is_note:
            yield said


@pytest.mark.parametrize(
    ("modules", "uses", "least"),
    [
        (sorted(Path(refusals.__file__).parent.glob("*.py")), "longctx.trainers", 76),
        ([Path(checks.__file__)], "longctx.(cli|config|training)", 9),
    ],
    ids=["trainers", "checks of a run"],
)
def test_every_refusal_has_an_example(modules: list[Path], uses: str, least: int) -> None:
    """Words that no other refusal has stand in a test: without the refusal that test fails."""
    said = [refusal for module in modules for refusal in refusals_of(module)]
    of_each = [set().union(*map(phrases, texts_in(each))) for each in said]
    counts = Counter(phrase for phrases_of_one in of_each for phrase in phrases_of_one)
    folder = Path(__file__).parents[1]
    files = [path.read_text("utf-8") for path in sorted(folder.rglob("test_*.py"))]
    trees = [ast.parse(text) for text in files if re.search(uses, text)]
    tested = {phrase for tree in trees for text in texts_in(tree) for phrase in phrases(text)}
    without = [
        ast.unparse(each)
        for each, own in zip(said, of_each, strict=True)
        if not any(counts[phrase] == 1 for phrase in own & tested)
    ]
    assert len(said) >= least and not without
