"""`longctx check-step` names faults that were put in by hand, and finds none in right steps."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from longctx.check import CheckError, Probe, Step, check_step, record
from longctx.check.contexts import ROW_RESTARTED
from longctx.check.probe import Tokens
from longctx.check.record import gather
from longctx.cli import main
from tests.check_cases import CASES, ON_TWO, SHORT, Make, faults, of_type, trainer
from tests.marks import slow_unless
from tests.workers import Workers

QUICK = {
    name: CASES[name]
    for name in (
        "right: adapters",
        "right: adapters of transformers",
        "right: windows",
        "padded at the left",
        "parts of 16 tokens",
    )
}
QUICK |= {
    name: CASES[name]
    for name in (
        "ends that the probe has not",
        "means of micro-batches",
        "prompts with labels",
        "no shift",
        "half a gradient",
    )
}
FEW = (
    "right: longctx, degree 2",
    "right: by hand",
    "no exchange",
    "no gradient of others",
    "mean of the rank",
    "not reduced",
)
FEW += ("means of micro-batches of all ranks",)
SETS = {
    "quick": (1, QUICK),
    "all": (1, CASES),
    "quick on two": (2, {name: ON_TWO[name] for name in FEW}),
    "two": (2, ON_TWO),
}


@pytest.mark.parametrize("which", slow_unless(lambda which: "quick" in which, SETS))
def test_faults_are_named_and_right_steps_are_right(workers: Workers, which: str) -> None:
    ranks, cases = SETS[which]
    for found in workers.run(faults, ranks, list(cases), timeout_s=120.0):
        assert found == {name: kinds for name, (*_, kinds) in cases.items()}


CHECK = """
from tests.check_cases import packed
def make(probe):
    return packed(probe, "gpt_oss")
"""


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "check.py"
    script.write_text(CHECK)
    assert main(["check-step", str(script), "--probe", "few documents", "--json"]) == 1
    (verdict,) = json.loads(capsys.readouterr().out)
    assert [fault["kind"] for fault in verdict["faults"]] == [ROW_RESTARTED]
    assert (
        main(
            [
                "check-step",
                str(script),
                "--probe",
                "few documents",
                "--allow",
                "documents see each other",
            ]
        )
        == 0
    )
    assert "right (allowed: documents see each other" in capsys.readouterr().out
    script.write_text(CHECK.replace('"gpt_oss")', '"gpt_oss").train()'))
    assert main(["check-step", str(script), "--probe", "few documents"]) == 3
    assert (
        "make returned TrainOutput: return a transformers.Trainer, or a Step"
        in capsys.readouterr().err
    )
    assert main(["check-step", str(script), "--probe", "none"]) == 2
    assert "there is no probe 'none': choose from 'documents'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda probe: of_type(probe, "qwen3", attention_dropout=0.1),
            "dropout above 0: set it to 0",
        ),
        (lambda probe: trainer(probe, probe.model().bfloat16()), "weights are bfloat16"),
        (
            lambda probe: of_type(probe, "mixtral", output_router_logits=True),
            "loss of routers is another objective",
        ),
        (
            lambda probe: of_type(probe, "bloom", n_head=4),
            "cannot run BloomForCausalLM with a mask and positions",
        ),
        (
            lambda probe: trainer(probe, label_smoothing_factor=0.1),
            "label_smoothing_factor is above 0",
        ),
        (lambda probe: trainer(probe, bf16=True), "bf16 or fp16 is on"),
    ],
)
def test_what_cannot_be_judged_is_refused(make: Make, said: str) -> None:
    with pytest.raises(CheckError, match=said):
        check_step(make, [SHORT])


def test_workers_of_a_loader_are_left_out() -> None:
    """Axolotl sets how much each prefetches, which torch refuses without workers."""
    more = {
        "dataloader_num_workers": 1,
        "dataloader_prefetch_factor": 2,
        "dataloader_persistent_workers": True,
    }
    assert check_step(lambda probe: trainer(probe, **more), [SHORT]).lines() == ["documents: right"]


def test_positions_of_whole_rows_are_no_place_in_a_part() -> None:
    """A model of ms-swift gets whole rows of positions, and splits both over ranks."""
    step = Step(
        torch.nn.Module(), {}, [torch.tensor([[2, 3, 4]])], positions=[torch.arange(6)[None]]
    )
    assert [row.positions for row in gather(step, Tokens(SHORT)).calls] == [[]]


def test_a_step_on_other_data_has_no_known_fault() -> None:
    def make(probe: Probe) -> Step:
        model = probe.model()
        with record(model) as seen:
            model(torch.full((1, 4), probe.pad)).logits.sum().backward()
            return seen.step()

    report = check_step(make, [SHORT])
    assert (
        report.status == 2
        and "no token of the probe was in a call of the model" in report.lines()[0]
    )


def by_hand(probe: Probe, spoil: Callable[[Any], None], loss: float | None = None) -> Step:
    """A step that is right, but for what `spoil` does to its model's gradients."""
    model = probe.model("qwen3")
    with record(model) as seen:
        targets = sum(label != -100 for row in probe.rows for label in row["labels"][1:])
        for row in probe.rows:
            logits = model(torch.tensor([row["input_ids"]]), use_cache=False).logits[0, :-1]
            labels = torch.tensor(row["labels"][1:], dtype=torch.int64)
            (
                torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / targets
            ).backward()
        spoil(model)
        return seen.step(loss=loss)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj", "model.norm", "model.embed_tokens", "lm_head"]
)
def test_a_gradient_that_is_not_finite_is_never_right(name: str, value: float) -> None:
    """Of all parameters but the head's it was right, with status 0."""

    def spoil(model: Any) -> None:
        weight = model.get_submodule(name).weight
        weight.grad[..., 0].fill_(value)

    assert check_step(partial(by_hand, spoil=lambda model: None), [SHORT]).status == 0
    report = check_step(partial(by_hand, spoil=spoil), [SHORT])
    assert report.status != 0
    if name != "lm_head":
        assert "NaN or infinity" in "\n".join(report.lines())


def test_a_loss_that_is_nan_is_never_right() -> None:
    report = check_step(partial(by_hand, spoil=lambda model: None, loss=float("nan")), [SHORT])
    assert report.status != 0 and "the logged loss is wrong" in "\n".join(report.lines())


def test_a_step_without_gradients_is_refused() -> None:
    def make(probe: Probe) -> Step:
        model = probe.model()
        with record(model) as seen:
            model(torch.tensor([probe.documents[0]])).logits.sum().backward()
            model.zero_grad()
            return seen.step()

    with pytest.raises(
        CheckError, match="no parameter has a gradient: was the step read after zero_grad"
    ):
        check_step(make, [SHORT])


def test_autocast_is_refused() -> None:
    """Accelerate keeps its mixed precision for every later Accelerator of a process."""

    def make(probe: Probe) -> Step:
        model = probe.model()
        with record(model) as seen, torch.autocast("cpu", torch.bfloat16):
            model(torch.tensor([probe.documents[1]])).logits.sum().backward()
            return seen.step()

    with pytest.raises(CheckError, match="runs under autocast"):
        check_step(make, [SHORT])
