"""`longctx check-step` names faults that were put in by hand, and finds none in right steps."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from longctx.check import (
    CheckError,
    Finding,
    Probe,
    Report,
    Step,
    UsageError,
    Verdict,
    check_step,
    record,
)
from longctx.check.attention import MERGED
from longctx.check.backward import BACKWARD_WRONG, CHANGED, DECAY, OF_ANOTHER_HEAD, SIGNS
from longctx.check.contexts import ROW_RESTARTED, contexts
from longctx.check.documents import MISSING
from longctx.check.gathered import Row, _with_ends, gather
from longctx.check.github import annotations
from longctx.check.logged import LOGGED_LOSS, LOGGED_NORM
from longctx.check.probe import Tokens
from longctx.check.reference import Reference
from longctx.check.scale import SCALE
from longctx.check.shown import fit_shown
from longctx.check.step import CHOICES
from longctx.check.targets import OF_OTHERS
from longctx.check.tolerances import FLOAT32
from longctx.check.variants import EPSILON
from longctx.check.verdict import NO_GRADIENT, NOT_FINITE, OBJECTIVE_OTHER, OTHER_WEIGHTS, kinds
from longctx.cli import main
from tests.check_cases import CASES, ON_TWO, SHORT, Make, faults, of_type, trainer
from tests.marks import slow_unless
from tests.trainer_cases import as_rank
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
BY_FIT = {name: CASES[name] for name in ("right: windows", "parts of 16 tokens", "no shift")}
ALL_BY_FIT = {name: case for name, case in CASES.items() if name != "GPT-2, padded at the left"}
FEW_BY_FIT = ("right: by hand", "no exchange", "mean of the rank")
LOOKED = {"half the values of others": [MERGED]}
"""Kinds that only what the output layer showed tells."""
SETS = {
    "quick": (1, QUICK, False),
    "quick, inferred": (1, BY_FIT, True),
    "all": (1, CASES, False),
    "all, inferred": (1, ALL_BY_FIT, True),
    "quick on two": (2, {name: ON_TWO[name] for name in FEW}, False),
    "quick on two, inferred": (2, {name: ON_TWO[name] for name in FEW_BY_FIT}, True),
    "two": (2, ON_TWO, False),
    "two, inferred": (2, ON_TWO, True),
}


@pytest.mark.parametrize("which", slow_unless(lambda which: "quick" in which, SETS))
def test_faults_are_named_and_right_steps_are_right(workers: Workers, which: str) -> None:
    ranks, cases, inferred = SETS[which]
    for found in workers.run(faults, ranks, list(cases), inferred, timeout_s=120.0):
        expected = {name: kinds for name, (*_, kinds) in cases.items()}
        if not inferred:
            expected |= {name: kinds for name, kinds in LOOKED.items() if name in expected}
        assert found == expected


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
                ROW_RESTARTED,
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert f"right (allowed: {ROW_RESTARTED})" in out
    assert "not tested: several processes: this was one (--processes 2)" in out
    script.write_text(CHECK.replace('"gpt_oss")', '"gpt_oss").train()'))
    assert main(["check-step", str(script), "--probe", "few documents"]) == 3
    assert (
        "make returned TrainOutput: return a transformers.Trainer, or a Step"
        in capsys.readouterr().err
    )
    script.write_text(CHECK.replace('packed(probe, "gpt_oss")', "1 / 0"))
    assert main(["check-step", str(script), "--probe", "few documents"]) == 4
    error = capsys.readouterr().err
    assert "ZeroDivisionError" in error and "no verdict, as the error above was raised" in error
    script.write_text("from longctx.errors import UserError\nraise UserError('no such setting')")
    assert main(["check-step", str(script)]) == 2
    assert "longctx check-step: error: no such setting\n" in capsys.readouterr().err
    script.write_text(CHECK)
    assert main(["check-step", str(script), "--make", "step"]) == 2
    assert "has no function step(probe): name yours by --make" in capsys.readouterr().err
    script.write_text("raise SystemExit(1)")
    assert main(["check-step", str(script)]) == 4
    assert main(["check-step", str(script), "--probe", "none"]) == 2
    assert "there is no probe 'none': choose from 'documents'" in capsys.readouterr().err


def test_annotations_of_github(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "a, 100%.py"
    script.write_text(CHECK)
    words = ["check-step", str(script), "--probe", "few documents"]
    assert main([*words, "--github"]) == 1
    out = capsys.readouterr().out
    place = f"file={tmp_path}/a%2C 100%25.py,title="
    (line,) = [line for line in out.splitlines() if line.startswith("::")]
    assert line.startswith(f"::error {place}check-step%2C few documents::{ROW_RESTARTED}: ")
    assert out.startswith(f"few documents: {ROW_RESTARTED}"), "for who reads the log"
    script.write_text(CHECK.replace('"gpt_oss")', '"gpt_oss").train()'))
    assert main([*words, "--github"]) == 3
    refused = f"::error {place}longctx check-step::refused: make returned TrainOutput: "
    assert capsys.readouterr().out.splitlines()[-1].startswith(refused)
    with pytest.raises(SystemExit):
        main([*words, "--github", "--json"])


def test_gradients_of_another_shape_are_refused() -> None:
    """As those of a model of one's own whose matrices are turned, or not gathered."""

    def make(probe: Probe) -> Step:
        step = by_hand(probe)
        step.gradients["lm_head.weight"] = step.gradients["lm_head.weight"][1:]
        return step

    said = r"the gradient of lm_head.weight is \[63, 32\], and the parameter of the reference "
    with pytest.raises(CheckError, match=said + r"\[64, 32\]: gather it, or turn it"):
        check_step(make, [SHORT])


def test_a_step_of_the_other_package_says_what_to_import() -> None:
    """The wheel's, where longctx is installed as well."""
    other = type("Step", (), {"__module__": "longctx_check.recording"})
    said = "make returned a Step of longctx_check: import it from longctx.check"
    with pytest.raises(CheckError, match=said):
        check_step(lambda probe: other(), [SHORT])


def test_an_annotation_is_one_line_and_hides_no_choice() -> None:
    finding = Finding(SCALE, "0.5 times\n1/N")
    choice = Finding(next(iter(CHOICES)), "document 3")
    verdict = Verdict(SHORT, [finding], residual=1.0, alike=["another"], choices=[choice])
    error, notice = annotations(Report([verdict]), file="check.py")
    title = f"check-step%2C {SHORT.name}"
    text = f"{SCALE}: 0.5 times%0A1/N%0Aor another"
    assert error == f"::error file=check.py,title={title}::{text}"
    assert notice == f"::notice file=check.py,title={title}::{choice}"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda probe: of_type(probe, "qwen3", attention_dropout=0.1),
            "dropout above 0: set it to 0",
        ),
        (
            lambda probe: trainer(probe, probe.model().to(torch.float8_e4m3fn)),
            "weights are torch.float8_e4m3fn, for which check-step has no tolerances",
        ),
        (
            lambda probe: of_type(probe, "mixtral", output_router_logits=True),
            "loss of routers is another objective",
        ),
        (
            lambda probe: of_type(probe, "xglm"),
            "cannot run XGLMForCausalLM with a mask and positions",
        ),
        (
            lambda probe: trainer(probe, label_smoothing_factor=0.1),
            "label_smoothing_factor is above 0",
        ),
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
    assert check_step(lambda probe: trainer(probe, **more), [SHORT]).verdicts[0].findings == []


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


def by_hand(
    probe: Probe,
    spoil: Callable[[Any], None] = lambda model: None,
    *,
    kind: str = "qwen3",
    freeze: Callable[[Any], None] = lambda model: None,
    rows: slice = slice(None),
    length: int | None = None,
    adapters: bool = False,
    loss: float | None = None,
    norm: float | None = None,
    objective: Callable[..., torch.Tensor] = torch.nn.functional.cross_entropy,
    tied: bool = False,
) -> Step:
    """A step that is right, but for what `freeze` does to its model before, and `spoil` to its
    gradients, for the rows, and the tokens of each, that it leaves out, and another objective."""
    model = probe.model(kind, tie_word_embeddings=tied)
    if adapters:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    with record(model) as seen:
        freeze(model)
        targets = sum(label != -100 for row in probe.rows for label in row["labels"][1:])
        for whole in probe.rows[rows]:
            row = {name: values[:length] for name, values in whole.items()}
            logits = model(torch.tensor([row["input_ids"]]), use_cache=False).logits[0, :-1]
            labels = torch.tensor(row["labels"][1:], dtype=torch.int64)
            (objective(logits, labels, reduction="sum") / targets).backward()
        spoil(model)
        return seen.step(loss=loss, grad_norm=norm)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj", "model.norm", "model.embed_tokens", "lm_head"]
)
def test_a_gradient_that_is_not_finite_is_never_right(name: str, value: float) -> None:
    """Of all parameters but the head's it was right, with status 0."""

    def spoil(model: Any) -> None:
        weight = model.get_submodule(name).weight
        weight.grad[..., 0].fill_(value)

    assert check_step(by_hand, [SHORT]).status == 0
    report = check_step(partial(by_hand, spoil=spoil, loss=value, norm=1.0), [SHORT])
    assert report.status != 0
    assert [finding.kind for finding in report.verdicts[0].findings] == [
        NOT_FINITE,
        LOGGED_LOSS,
        LOGGED_NORM,
    ]
    as_it_is = check_step(partial(by_hand, spoil=spoil, norm=value), [SHORT])
    assert [finding.kind for finding in as_it_is.verdicts[0].findings] == [NOT_FINITE]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_log_that_is_not_finite_is_never_right(value: float) -> None:
    (verdict,) = check_step(partial(by_hand, loss=value, norm=value), [SHORT]).verdicts
    assert [finding.kind for finding in verdict.findings] == [LOGGED_LOSS, LOGGED_NORM]


def frozen(part: str, model: Any) -> None:
    for name, weight in model.named_parameters():
        if part in name:
            weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("part", "adapters", "said"),
    [
        ("norm", False, "9 of them: self_attn.q_norm.weight (2), "),
        ("layers.1.self_attn.q_proj", False, "1 of them: self_attn.q_proj.weight"),
        ("lm_head", False, "1 of them: lm_head.weight"),
        ("layers.0.self_attn.q_proj.lora_A", True, "1 of them: lora_A.default.weight"),
    ],
)
def test_a_parameter_that_lost_its_gradient_is_named(part: str, adapters: bool, said: str) -> None:
    """`lora_A` begins with a gradient of 0, as `lora_B` is 0."""
    make = partial(by_hand, freeze=partial(frozen, part), adapters=adapters)
    (finding,) = check_step(make, [SHORT]).verdicts[0].findings
    assert finding.kind == NO_GRADIENT and finding.details.startswith(said)


def test_parameters_that_nothing_uses_need_no_gradient() -> None:
    def make(probe: Probe) -> Step:
        return by_hand(probe, adapters=True)

    assert check_step(make, [SHORT]).verdicts[0].findings == []


def test_missing_documents_are_named_with_the_scale_that_follows() -> None:
    """Not one of a single token, which has nothing to predict."""
    (verdict,) = check_step(partial(by_hand, rows=slice(1, None, 2)), [SHORT]).verdicts
    missing, scale = verdict.findings
    assert str(missing).startswith(f"{MISSING}: 2 of 5: documents 0, 4; ")
    assert str(scale) == f"{SCALE}: divided by the targets of missing documents, too"
    allowed = check_step(partial(by_hand, rows=slice(1, None, 2)), [SHORT], allow=[MISSING, SCALE])
    assert allowed.status == 0


def test_what_is_allowed_is_matched_exactly() -> None:
    """`documents are cut` is no `documents are cut short`, whose tokens are lost."""
    make = partial(by_hand, length=9)
    report = check_step(make, [SHORT], allow=["documents are cut", SCALE])
    (finding,) = report.verdicts[0].findings
    assert finding.kind.startswith("documents are cut short:")
    assert check_step(make, [SHORT], allow=["documents are cut short", SCALE]).status == 0
    said = "no fault is called 'documents are cut shrt': did you mean 'documents are cut short'"
    with pytest.raises(UsageError, match=said):
        check_step(make, [SHORT], allow=["documents are cut shrt"])
    with pytest.raises(UsageError, match="no fault is called ''"):
        check_step(make, [SHORT], allow=[""])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[2, 3, 4, 60]], r"id 60 was in a call of the model \(1 such ids\), which the probe"),
        ([[20, 3, 31, 9, 17, 2, 40, 8, 33, 12, 5, 28, 7, 45, 11, 38, 6, 21]], "only 0 are of one"),
    ],
)
def test_steps_on_other_data_are_refused(rows: list[list[int]], said: str) -> None:
    def make(probe: Probe) -> Step:
        model = probe.model()
        with record(model) as seen:
            model(torch.tensor(rows), labels=torch.tensor(rows)).loss.backward()
            return seen.step()

    with pytest.raises(CheckError, match=said):
        check_step(make, [SHORT])


def test_windows_and_caps_that_change_nothing_are_not_tested() -> None:
    """By default a probe's model has some that do."""
    names = ["several processes"]
    (verdict,) = check_step(partial(by_hand, kind="gemma2"), [SHORT]).verdicts
    assert list(verdict.not_tested) == names

    def usual(probe: Probe) -> Any:
        more = {"sliding_window": 20, "final_logit_softcapping": 1e5}
        return of_type(probe, "gemma2", attn_logit_softcapping=1e5, **more)

    report = check_step(usual, [SHORT])
    names += ["windows of 20 tokens", "the cap of attention scores at 100000"]
    assert list(report.verdicts[0].not_tested) == [*names, "the cap of logits at 100000"]
    assert report.status == 0 and report.lines()[1:] == [
        f"not tested: {what}: {why}" for what, why in report.verdicts[0].not_tested.items()
    ]
    longer = Probe("longer", lengths=(3, 21))
    lines = check_step(usual, [SHORT, longer]).lines()
    assert not any("windows" in line for line in lines), "the second probe shows them"


def test_a_model_without_its_window_or_cap_is_not_right() -> None:
    """With values of a probe's model."""

    def make(probe: Probe, **changed: Any) -> Step:
        model = probe.model("gemma2")
        with record(model) as seen:
            for module in (model.config, *model.modules()):
                for name, value in changed.items():
                    if getattr(module, name, None) is not None:
                        setattr(module, name, value)
            targets = sum(len(ids) - 1 for ids in probe.documents)
            for ids in probe.documents:
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
                wanted = torch.tensor(ids[1:], dtype=torch.int64)
                entropy = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
                (entropy / targets).backward()
            return seen.step()

    assert check_step(make, [SHORT]).status == 0
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"):
        value = 4096 if name == "sliding_window" else 1e5
        assert check_step(partial(make, **{name: value}), [SHORT]).status != 0, name


def with_term(
    term: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """Cross-entropy with another term of logits [tokens, V] and labels, summed over tokens."""

    def objective(logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        entropy = torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)
        return entropy + term(logits, labels).sum()

    return objective


def a_second_id(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As a head that predicts the token after the next one, too."""
    return torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")


OBJECTIVES = {
    "label smoothing": partial(torch.nn.functional.cross_entropy, label_smoothing=0.1),
    "a z-loss": with_term(lambda logits, labels: 1e-4 * logits.logsumexp(-1).square()),
    "entropy": with_term(
        lambda logits, labels: 1e-3 * (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    ),
    "the cross-entropy of a second id": with_term(a_second_id),
}


@pytest.mark.parametrize("term", OBJECTIVES)
def test_another_objective_is_named_and_nothing_else(term: str) -> None:
    make = partial(by_hand, objective=OBJECTIVES[term])
    (finding,) = check_step(make, [SHORT]).verdicts[0].findings
    assert finding.kind == OBJECTIVE_OTHER and term in finding.details.partition("; ")[2]


def rounded(dtype: torch.dtype, model: Any) -> None:
    for weight in model.parameters():
        weight.grad = weight.grad.to(dtype).float()


def decayed(model: Any) -> None:
    for weight in model.parameters():
        weight.grad = weight.grad + 1e-3 * weight.detach()


@pytest.mark.parametrize(
    ("spoil", "kind", "said"),
    [
        (partial(rounded, torch.bfloat16), CHANGED, "; it is rounded to bfloat16"),
        (partial(rounded, torch.float16), CHANGED, "; it is rounded to float16"),
        (decayed, DECAY, "0.001 times"),
    ],
)
def test_gradients_that_change_after_backward_are_named(
    spoil: Callable[[Any], None], kind: str, said: str
) -> None:
    (finding,) = check_step(partial(by_hand, spoil=spoil), [SHORT]).verdicts[0].findings
    assert finding.kind == kind and finding.details.endswith(said)


def test_one_label_of_another_token_is_one_label() -> None:
    """Hidden states of nearly all tokens were called wrong."""

    def objective(logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        if len(labels) == SHORT.lengths[3] - 1:
            labels = torch.cat([labels[:4], labels[8:9], labels[5:]])
        return torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)

    (finding,) = check_step(partial(by_hand, objective=objective), [SHORT]).verdicts[0].findings
    assert str(finding) == f"{OF_OTHERS}: 1 predictions, document 3"


def halved(name: str, model: Any) -> None:
    model.get_submodule(name).weight.grad.div_(2)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"])
def test_backward_is_judged_with_tied_embeddings(name: str) -> None:
    """No weight of a single parameter hides there that of another."""
    assert check_step(partial(by_hand, tied=True), [SHORT]).status == 0
    report = check_step(partial(by_hand, spoil=partial(halved, name), tied=True), [SHORT])
    (finding,) = report.verdicts[0].findings
    layer, part = name.split(".")[2], name.partition("layers.")[2][2:]
    words = f"{part}.weight in layer {layer}: 0.5 times what it should be"
    assert str(finding) == f"{BACKWARD_WRONG}: {words}"


def test_the_first_part_that_is_wrong_is_named() -> None:
    """Norms with another epsilon are no fault of attention."""

    def wider(model: Any) -> None:
        for layer in model.model.layers[1:]:
            layer.post_attention_layernorm.variance_epsilon = 10.0

    (finding,) = check_step(partial(by_hand, freeze=wider), [SHORT]).verdicts[0].findings
    part = "model.layers.1.post_attention_layernorm"
    assert finding.kind == EPSILON and finding.details.startswith("10: ")
    assert finding.details.endswith(f"in the output of {part}")


def test_weights_with_other_signs_are_told() -> None:
    """As advantages weigh answers: half of the documents against the others."""

    def objective(logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        sign = -1 if len(labels) % 8 == 0 else 1
        return sign * torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)

    (finding,) = check_step(partial(by_hand, objective=objective), [SHORT]).verdicts[0].findings
    assert (
        str(finding) == "weights differ by micro-batches: 1 (3 of them), -1 (1 of them) times 1/N"
    )


def test_logits_that_are_made_in_another_way_are_no_other_objective() -> None:
    """As by a multiplier of a family of its own: its loss is then inferred from gradients."""

    def doubled(model: Any, inputs: Any, output: Any) -> Any:
        output.logits = 2 * output.logits
        return output

    def make(probe: Probe) -> Step:
        step = by_hand(probe, freeze=lambda model: model.register_forward_hook(doubled))
        step.reference.register_forward_hook(doubled)
        return step

    reference = Reference(gather(make(SHORT), Tokens(SHORT)))
    assert reference.changes_logits_otherwise()
    (verdict,) = check_step(make, [SHORT]).verdicts
    assert OBJECTIVE_OTHER not in {finding.kind for finding in verdict.findings}
    as_usual = Reference(gather(by_hand(SHORT), Tokens(SHORT)))
    assert not as_usual.changes_logits_otherwise()


def test_what_float32_leaves_of_a_right_step() -> None:
    """Far less than limits allow."""
    record = gather(by_hand(SHORT), Tokens(SHORT))
    assert record.looked is not None
    reference = Reference(record)
    candidates = contexts(record, windows=False)
    fit = fit_shown(record, record.looked, reference=reference, candidates=candidates)
    assert fit.shown is not None and fit.shown.after is not None
    (looked,) = record.looked
    assert max(looked.left) < 1e-7 < FLOAT32.objective / 50
    assert fit.shown.after < 5e-7 < FLOAT32.after / 10
    (sequences,) = {context.sequences for context in fit.contexts.values()}
    states = torch.cat([reference.states(sequence) for sequence in sequences])
    apart = (looked.states - states).norm(dim=1) / states.norm(dim=1)
    assert float(apart.max()) < 3e-6 <= FLOAT32.states / 10
    expected = reference.gradients(fit.weights).of
    for name, gradient in expected.items():
        assert float((record.gradients[name] - gradient).norm()) < 5e-6 * float(gradient.norm())


def repeated_to_fill() -> list[str]:
    """On each rank: lines on five documents on two ranks."""
    as_rank()
    return check_step(trainer, [SHORT]).lines()


def test_documents_that_fill_the_batches_of_ranks_are_no_fault(workers: Workers) -> None:
    words = "documents are repeated to fill the last batches of all ranks: document"
    for lines in workers.run(repeated_to_fill, 2):
        right, choice = lines
        assert right == "documents: right" and choice.startswith(f"documents: {words}")
        assert choice.endswith("(accelerate's even_batches, which keeps ranks in step)")


def test_kinds_are_those_that_cases_have() -> None:
    named = {kind for *_, found in (*CASES.values(), *ON_TWO.values()) for kind in found}
    assert named <= set(kinds()) and len(kinds()) == len(set(kinds()))


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


def of_columns(probe: Probe, *, columns: int) -> Step:
    """A right step on two documents a call, whose output layer runs on some columns at a time."""
    model = probe.model()
    rows = [row["input_ids"] for row in probe.rows]
    targets = sum(len(row) - 1 for row in rows)
    with record(model) as seen:
        for first in range(0, len(rows), 2):
            some = rows[first : first + 2]
            width = max(map(len, some))
            ids = torch.tensor([[*row, *[probe.pad] * (width - len(row))] for row in some])
            mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in some])
            labels = torch.full_like(ids, -100)
            for at, row in enumerate(some):
                labels[at, : len(row) - 1] = torch.tensor(row[1:])
            hidden = model.model(ids, attention_mask=mask, use_cache=False).last_hidden_state
            loss = torch.zeros(())
            for part, own in zip(hidden.split(columns, 1), labels.split(columns, 1), strict=True):
                logits = model.lm_head(part)
                loss = loss + torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), own.flatten(), reduction="sum"
                )
            (loss / targets).backward()
        return seen.step()


@pytest.mark.parametrize("columns", [3, 100])
def test_an_output_layer_on_columns_of_rows_is_right(columns: int) -> None:
    """Its tokens are not in the order of the calls' ids."""
    (verdict,) = check_step(partial(of_columns, columns=columns), [SHORT]).verdicts
    assert [str(finding) for finding in verdict.findings] == []


@pytest.mark.parametrize(("factor", "said"), [(1.001, "× 1.001"), (0.9998, "× 0.9998")])
def test_a_small_factor_is_told(factor: float, said: str) -> None:
    def objective(logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        return factor * torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)

    (finding,) = check_step(partial(by_hand, objective=objective), [SHORT]).verdicts[0].findings
    assert str(finding) == f"{SCALE}: {said}"


def test_signs_of_gradients_are_no_scale() -> None:
    def spoil(model: Any) -> None:
        for weight in model.parameters():
            weight.grad.sign_()

    findings = check_step(partial(by_hand, spoil=spoil), [SHORT]).verdicts[0].findings
    assert [finding.kind for finding in findings] == [SIGNS]


def on_own_weights() -> list[str]:
    """On each rank: what is said of ranks that drew their own weights."""
    as_rank()

    def make(probe: Probe) -> Step:
        def draw(model: Any) -> None:
            with torch.no_grad():
                model.lm_head.weight.add_(float(torch.distributed.get_rank()))

        model = probe.model()
        draw(model)
        with record(model) as seen:
            for row in probe.rows:
                ids = torch.tensor([row["input_ids"]])
                model(ids, use_cache=False).logits.sum().backward()
            return seen.step()

    return check_step(make, [SHORT]).lines()


def test_ranks_that_begin_with_other_weights_are_told(workers: Workers) -> None:
    for lines in workers.run(on_own_weights, 2):
        assert lines[0] == f"{SHORT.name}: {OTHER_WEIGHTS}: lm_head.weight"


def test_ends_that_do_not_follow_their_document_are_known_by_position() -> None:
    """As where each document is split in zigzag: not where two have one position."""
    tokens = Tokens(Probe("ends", lengths=(4, 6, 6), ends=True))
    first, second, third = (tokens.of(document) for document in range(3))

    def row(numbers: list[int]) -> Row:
        ids = [tokens.ids[number] for number in numbers]
        positions = [tokens.place[number] for number in numbers]
        return Row(ids, tokens.numbers(ids), rank=0, call=0, positions=positions)

    split = row([first[0], first[3], second[0], second[1], second[5], third[0], third[5]])
    others = row([first[1], first[2], *second[2:5], *third[1:5]])
    rows = _with_ends([split, others], tokens)
    assert rows[0].numbers[1] == first[3]
    assert rows[0].numbers[4] == rows[0].numbers[6] == -1, "either could be the second's"
    assert rows[1].numbers == others.numbers


def test_a_factor_is_told_where_only_the_output_layer_is_trained() -> None:
    """No other gradient says whether it is the loss's."""

    def objective(logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        return 2 * torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)

    def make(probe: Probe, **more: Any) -> Step:
        model = probe.model()
        for name, weight in model.named_parameters():
            weight.requires_grad_(name == "lm_head.weight")
        with record(model) as seen:
            targets = sum(len(ids) - 1 for ids in probe.documents)
            for ids in probe.documents:
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
                loss = more["objective"](logits, torch.tensor(ids[1:], dtype=torch.int64), "sum")
                (loss / targets).backward()
            return seen.step()

    (finding,) = check_step(partial(make, objective=objective), [SHORT]).verdicts[0].findings
    assert str(finding) == f"{SCALE}: × 2"


def test_a_head_of_ones_own_is_said_to_be_possible() -> None:
    """One beside the output layer, as for the token after the next: its gradient is no part of the
    reference, so that it is not known whether backward is wrong."""

    def make(probe: Probe) -> Any:
        model = probe.model("llama")
        head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
        with record(model) as seen:
            for row in probe.rows:
                ids = torch.tensor(row["input_ids"])
                found = model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
                targets = sum(probe.lengths) - len(probe.lengths)
                next_one = torch.nn.functional.cross_entropy(
                    found.logits[0, :-1], ids[1:], reduction="sum"
                )
                hidden = found.hidden_states[-1][0, :-2]
                one_after = torch.nn.functional.cross_entropy(
                    head(hidden), ids[2:], reduction="sum"
                )
                ((next_one + 0.3 * one_after) / targets).backward()
            return seen.step()

    (verdict,) = check_step(make, [SHORT]).verdicts
    (finding,) = verdict.findings
    assert finding.kind == BACKWARD_WRONG
    assert finding.details.endswith(OF_ANOTHER_HEAD)
