"""The examples for trainers of other people run under torchrun, and equal one process that takes
document after document."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests import launched
from tests.workers import Workers

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ["huggingface_ring", "own_trainer"]
TOLERANCE = 1e-5


def load(name: str) -> ModuleType:
    """An example as a module, found as torchrun finds what it imports: beside it."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def build(name: str, example: ModuleType, ring: bool) -> torch.nn.Module:
    if name == "huggingface_ring":
        model = example.build_model()
        if ring:
            example.prepare(model)
        return model
    torch.manual_seed(0)
    return example.Model()


def ring_steps(name: str, sharded: bool) -> list[tuple[float, list[torch.Tensor], dict[int, int]]]:
    """On each rank: loss, gradients and degrees of the example's first two steps, with an update
    between them."""
    example = load(name)
    model = build(name, example, ring=True)
    if sharded:
        example.shard(model)
    steps = []
    for step in range(2):
        loss, plan = example.forward_backward(model, example.read_documents(step))
        steps.append((loss, *take_gradients(model), plan.degrees))
    return steps


def take_gradients(model: torch.nn.Module) -> tuple[list[torch.Tensor]]:
    """The gradients; then goes down them and clears them."""
    whole = (parameter.grad for parameter in model.parameters())
    gradients = [
        grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for grad in whole
    ]
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.zero_grad()
    return (gradients,)


def plain_loss(name: str, model: torch.nn.Module, document: torch.Tensor) -> torch.Tensor:
    """Sum of the token losses of one document, by plain attention."""
    if name == "huggingface_ring":
        ids = document.unsqueeze(0)
        return model(input_ids=ids, labels=ids, num_items_in_batch=1, use_cache=False).loss

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)

    logits = model(document, torch.arange(len(document)), attention)
    return F.cross_entropy(logits[:-1], document[1:], reduction="sum")


@pytest.mark.parametrize(
    ("name", "sharded"), [*((name, False) for name in NAMES), ("own_trainer", True)]
)
def test_an_example_equals_one_unpacked_process(workers: Workers, name: str, sharded: bool) -> None:
    example = load(name)
    model = build(name, example, ring=False)
    results: Any = workers.run(ring_steps, 2, name, sharded)
    for step in range(2):
        documents = example.read_documents(step)
        targets = sum(len(document) - 1 for document in documents)
        loss = 0.0
        for document in documents:
            part = plain_loss(name, model, document) / targets
            part.backward()
            loss += part.item()
        (gradients,) = take_gradients(model)
        assert max(float(gradient.abs().max()) for gradient in gradients) > 0.01
        for steps in results:
            ring_loss, ring_gradients, degrees = steps[step]
            assert set(degrees) == {1, 2}
            assert ring_loss == pytest.approx(loss, abs=TOLERANCE)
            torch.testing.assert_close(ring_gradients, gradients, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "call", [*NAMES, pytest.param("own_trainer --fsdp", marks=pytest.mark.slow)]
)
def test_an_example_runs_on_two_ranks(call: str) -> None:
    name, *options = call.split()
    printed, _ = launched.run(EXAMPLES / f"{name}.py", *options, ranks=2)
    lines = re.findall(
        r"^step (\d+) loss ([\d.]+) micro-batches \d+ documents on ranks: 8 on 1, 1 on 2$",
        printed,
        re.M,
    )
    assert [int(step) for step, _ in lines] == list(range(10)), printed
    assert float(lines[-1][1]) < float(lines[0][1]) - 1


def test_the_ring_has_the_result_of_one_process_on_three() -> None:
    """The program asserts it; every rank sends to every other, the head alone to later ones."""
    printed, _ = launched.run(EXAMPLES / "ring.py", ranks=3)
    assert printed.count("has the result of one process") == 3
    sent = re.findall(r"rank (\d) sends head( and tail)?, \d+ rows, to rank (\d)", printed)
    assert {(sender, receiver) for sender, _, receiver in sent} == {
        (sender, receiver) for sender in "012" for receiver in "012" if sender != receiver
    }
    assert all(bool(tail) == (receiver < sender) for sender, tail, receiver in sent)
    lines = (EXAMPLES / "ring.py").read_text("utf-8").partition('"""\n\nimport')[2].splitlines()
    code = [line for line in lines if line.strip() and '"""' not in line]
    assert len(code) <= 60, "as the page says"


SCRIPTS = sorted([*EXAMPLES.glob("*.py"), *(EXAMPLES.parent / "bench").glob("*.py")])
NEEDS = {"optimum": "scipy"}
"""Packages beyond those of the tests, by script."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_script_starts(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With options it shows its help; otherwise it is imported, but for those that load a model
    at once."""
    if script.stem in NEEDS:
        pytest.importorskip(NEEDS[script.stem])
    if script.stem in ("ask", "denoise", "trl_two_gpus"):
        compile(script.read_text("utf-8"), script, "exec")
        return
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    text = script.read_text("utf-8")
    if '__name__ == "__main__"' not in text or not re.search(r"argparse|options\(__doc__", text):
        runpy.run_path(str(script), run_name="imported")
        return
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0 and capsys.readouterr().out.startswith(f"usage: {script.name}")


def test_the_transformers_example_is_short() -> None:
    """Less than sixty lines that are not blank, as promised."""
    lines = (EXAMPLES / "huggingface_ring.py").read_text("utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) < 60


def without_versions_and_errors(printed: str) -> list[str]:
    """The lines of examples/packed_documents_stay_apart.py without what differs between
    machines."""
    return [
        re.sub(r" +\de[+-]\d\d$|\d+\.\d+\.\d+", "", line) for line in printed.strip().splitlines()
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_packed_documents_stay_apart(ranks: int) -> None:
    """The program asserts it for longctx; what it prints is what the page shows."""
    page = (EXAMPLES.parent / "docs" / "evidence" / "check-step.md").read_text("utf-8")
    (shown,) = re.findall(r"^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    printed, _ = launched.run(EXAMPLES / "packed_documents_stay_apart.py", ranks=ranks)
    assert without_versions_and_errors(printed) == without_versions_and_errors(
        shown.replace("degree 2", f"degree {ranks}")
    )
    errors = re.findall(r"longctx.* (\de[+-]\d\d)$", printed, re.M)
    assert len(errors) == 3 and max(map(float, errors)) < TOLERANCE


def test_the_program_for_users_of_ring_flash_attn_runs_as_printed(tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "coming-from-ring-flash-attn.md").read_text("utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "program.py").write_text(program)
    one, two = (
        launched.run(tmp_path / "program.py", ranks=ranks)[0].split(", documents by degree ")
        for ranks in (1, 2)
    )
    assert one[0] == two[0] and one[1] == "{1: 5}\n" and two[1] == "{1: 4, 2: 1}\n"
