"""`check_step`: one step on each probe, recorded on all ranks, explained, and put into words.

from longctx.check import check_step

def test_my_trainer():
    check_step(make).raise_if_wrong()       # make(probe) returns a Trainer, or a Step
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from .contexts import Context, contexts
from .errors import CheckError
from .facts import Facts
from .finding import UNEXPLAINED, Finding
from .fit import Fit, Fitter
from .gathered import Record, gather, of_first_rank
from .not_tested import lines as lines_of_untested
from .not_tested import not_tested
from .picture import picture
from .probe import PROBES, Probe, Tokens
from .recording import Step
from .reference import Reference
from .rounding import widened
from .shown import fit_shown
from .split_softmax import other_errors, right_errors
from .updates import CHOICES as OF_UPDATES
from .updates import judge
from .verdict import findings, is_allowed, not_finite, require_kinds
from .weights import CHOICES as OF_WEIGHTS

CHOICES = OF_WEIGHTS | OF_UPDATES
"""Kinds that are no faults, with whose choice they are."""


@dataclass
class Verdict:
    """What became of one probe.

    Attributes:
        findings: faults, the most telling first; none: the step is right.
        residual: of the fit, relative to the gradient.
        allowed: faults that the user has allowed.
        picture: one line per document whose weights are not right.
        alike: other contexts that explain the gradient of a wrong step as well.
        choices: what is no fault, but somebody's choice.
        not_tested: what the probe could not show, with the reason.
    """

    probe: Probe
    findings: list[Finding]
    residual: float
    allowed: list[Finding] = field(default_factory=list)
    picture: list[str] = field(default_factory=list)
    alike: list[str] = field(default_factory=list)
    choices: list[Finding] = field(default_factory=list)
    not_tested: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """0: right, 1: wrong in a way that has a name, 2: wrong."""
        if not self.findings:
            return 0
        if any(finding.kind == UNEXPLAINED for finding in self.findings):
            return 2
        return 1

    def lines(self) -> list[str]:
        """Returns a line for each fault."""
        if self.allowed:
            allowed = f" (allowed: {', '.join(each.kind for each in self.allowed)})"
        else:
            allowed = ""
        faults = [str(finding) for finding in self.findings] or [f"right{allowed}"]
        faults += [f"{choice} ({CHOICES[choice.kind]})" for choice in self.choices]
        faults += [f"or {other}, which this probe does not tell from that" for other in self.alike]
        return [f"{self.probe.name}: {fault}" for fault in faults]


@dataclass
class Report:
    """Verdicts on all probes."""

    verdicts: list[Verdict]

    @property
    def status(self) -> int:
        """Exit status: 0 right, 1 wrong in ways that have a name, 2 wrong."""
        return max(verdict.status for verdict in self.verdicts)

    def raise_if_wrong(self) -> None:
        """Raises AssertionError with all that is wrong."""
        if self.status:
            raise AssertionError("\n".join(self.lines()))

    def lines(self) -> list[str]:
        """Returns what to print: a line for each fault of each probe, and once in which predictions
        it shows, and what no probe could show."""
        pictured = next(
            (verdict for verdict in self.verdicts if verdict.findings and verdict.picture), None
        )
        found = list[str]()
        for verdict in self.verdicts:
            found += verdict.lines()
            if verdict is pictured:
                found += [f"    {line}" for line in verdict.picture[:6]]
        return found + lines_of_untested([verdict.not_tested for verdict in self.verdicts])

    def to_json(self) -> str:
        rows = [
            {
                "probe": verdict.probe.name,
                "faults": [asdict(finding) for finding in verdict.findings],
                "allowed": [finding.kind for finding in verdict.allowed],
                "choices": [str(choice) for choice in verdict.choices],
                "residual": verdict.residual,
                "alike": verdict.alike,
                "not_tested": verdict.not_tested,
            }
            for verdict in self.verdicts
        ]
        return json.dumps(rows, indent=1)


def check_step(
    make: Callable[[Probe], Any], probes: Sequence[Probe] = PROBES, allow: Sequence[str] = ()
) -> Report:
    """Judges one optimizer step of a trainer on every probe; the same on all ranks of a process
    group.

    `make(probe)` returns a transformers.Trainer (or of a class that inherits from it) that trains
    on `probe.rows`, or, for any other loop, the `Step` that it made: see `record`. `allow` has
    faults that are meant: a fault's kind as it is printed, or its words before the first colon,
    such as "documents are cut". Collective. Raises CheckError for steps that no reference can
    repeat, UsageError for an allowed fault that does not exist.
    """
    require_kinds(allow)
    verdicts = list[Verdict]()
    for probe in probes:
        step = _step(make(probe), probe)
        verdicts.append(_judged(step, step.aim.probe_of(probe), allow))
    return Report(verdicts)


def _step(made: Any, probe: Probe) -> Step:
    if isinstance(made, Step):
        return made
    if type(made).__name__ == Step.__name__:
        theirs, _, _ = type(made).__module__.rpartition(".")
        raise CheckError(f"make returned a Step of {theirs}: import it from {__package__}")
    if not hasattr(made, "callback_handler"):
        raise CheckError(
            f"make returned {type(made).__name__}: return a transformers.Trainer, or a Step"
        )
    from .trainer import step_of

    return step_of(made, probe)


def _judged(step: Step, probe: Probe, allow: Sequence[str]) -> Verdict:
    """Returns the verdict of the first rank, which alone has all gradients, on every rank."""
    outcome: Verdict | Exception | None = None
    try:
        record = gather(step, Tokens(probe))
        if record is not None:
            outcome = _verdict_on(record, probe, allow)
    except Exception as error:
        outcome = error
    told = of_first_rank(_to_tell(outcome))
    if isinstance(outcome, Exception):
        raise outcome
    if isinstance(told, Exception):
        raise told
    verdict: Verdict = told
    return verdict


def _to_tell(outcome: Verdict | Exception | None) -> Verdict | Exception | None:
    """Returns what other ranks can read of an outcome."""
    if isinstance(outcome, Exception) and not isinstance(outcome, CheckError):
        return RuntimeError(f"the first rank failed: {type(outcome).__name__}: {outcome}")
    return outcome


def _verdict_on(record: Record, probe: Probe, allow: Sequence[str]) -> Verdict:
    if not record.gradients:
        raise CheckError("no parameter has a gradient: was the step read after zero_grad?")
    if wrong := not_finite(record):
        return Verdict(probe, wrong, residual=1.0)
    if not record.documents:
        return Verdict(
            probe,
            [Finding(UNEXPLAINED, "no token of the probe was in a call of the model")],
            residual=1.0,
        )
    with torch.random.fork_rng(devices=[]):
        reference = Reference(record)
        candidates = contexts(record, reference.window is not None)
        record = replace(record, tolerances=widened(record, reference, right=candidates[0]))
        if record.looked is not None and not reference.changes_logits_otherwise():
            fit = fit_shown(record, record.looked, reference=reference, candidates=candidates)
            alike = fit.shown.alike if fit.shown is not None else []
        else:
            fit, alike = _fitted(record, reference, candidates)
        facts = Facts(record, reference, fit)
        found = list(findings(facts))
        untested = not_tested(record, reference) | facts.aim.not_tested(facts)
    if record.updates:
        of_updates, untested_of_updates = judge(record)
        found += of_updates
        untested |= untested_of_updates
    choices = [each for each in found if each.kind in CHOICES]
    faults = [each for each in found if each not in choices]
    allowed = [each for each in faults if is_allowed(each, allow)]
    left = [each for each in faults if each not in allowed]
    if not fit.whole and not left:
        untested["the backward pass"] = "what is allowed leaves open what forward gave it"
    return Verdict(
        probe,
        left,
        residual=fit.residual,
        allowed=allowed,
        picture=picture(facts),
        alike=alike,
        choices=choices,
        not_tested=untested,
    )


def _fitted(
    record: Record, reference: Reference, candidates: list[Context]
) -> tuple[Fit, list[str]]:
    """Returns what explains a gradient whose output layer was not seen, and other contexts that do;
    also with what ranks send back otherwise that have shares of logits."""
    fitter = Fitter(record, reference, candidates)
    fit = fitter.fit()
    if not fit.exact and record.ranks > 1 and reference.output is not None:
        for otherwise in other_errors(record.ranks):
            reference.errors = otherwise.errors
            other = Fitter(record, reference, candidates[:1]).fit()
            if other.exact:
                other.errors = otherwise.words
                return other, []
        reference.errors = right_errors
    return fit, fitter.alike(fit)
