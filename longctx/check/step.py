"""`check_step`: one step on each probe, recorded on all ranks, explained, and put into words.

from longctx.check import check_step

def test_my_trainer():
    check_step(make).raise_if_wrong()       # make(probe) returns a Trainer, or a Step
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from longctx.check.contexts import contexts
from longctx.check.fit import Fitter
from longctx.check.probe import PROBES, Probe, Tokens
from longctx.check.record import CheckError, Record, Step, gather
from longctx.check.reference import Reference
from longctx.check.verdict import Finding, Judge, Verdict

Make = Callable[[Probe], Any]


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
        """Returns what to print: a line for each fault of each probe, and once in which predictions it shows."""
        found, pictured = list[str](), False
        for verdict in self.verdicts:
            allowed = f" (allowed: {', '.join(each.kind for each in verdict.allowed)})" if verdict.allowed else ""
            some = f", with {verdict.documents} of {len(verdict.probe.lengths)} documents" * (verdict.documents is not None)
            faults = [str(finding) for finding in verdict.findings] or [f"right{allowed}{some}"]
            faults += [f"or {other}, which this probe does not tell from that" for other in verdict.alike]
            found += [f"{verdict.probe.name}: {fault}" for fault in faults]
            if verdict.findings and not pictured:
                found += [f"    {line}" for line in verdict.picture[:6]]
                pictured = bool(verdict.picture)
        return found

    def to_json(self) -> str:
        rows = [
            {
                "probe": verdict.probe.name,
                "faults": [asdict(finding) for finding in verdict.findings],
                "allowed": [finding.kind for finding in verdict.allowed],
                "residual": verdict.residual,
                "alike": verdict.alike,
            }
            for verdict in self.verdicts
        ]
        return json.dumps(rows, indent=1)


def check_step(make: Make, probes: Sequence[Probe] = PROBES, allow: Sequence[str] = ()) -> Report:
    """Judges one optimizer step of a trainer on every probe; the same on all ranks of a process group.

    `make(probe)` returns a transformers.Trainer (or of a class that inherits from it) that trains on `probe.rows`, or, for any
    other loop, the `Step` that it made: see `record`. `allow` has kinds of faults that are meant, such as "documents are cut".
    Collective. Raises CheckError for steps that no reference can repeat.
    """
    return Report([judge(gather(_step(make, probe)), probe, allow) for probe in probes])


def _step(make: Make, probe: Probe) -> Step:
    made = make(probe)
    if isinstance(made, Step):
        return made
    if not hasattr(made, "callback_handler"):
        raise CheckError(f"make returned {type(made).__name__}: return a transformers.Trainer, or a Step")
    from longctx.check.trainer import step_of

    return step_of(made, probe)


def judge(record: Record, probe: Probe, allow: Sequence[str] = ()) -> Verdict:
    if not record.gradients:
        raise CheckError("no parameter has a gradient: was the step read after zero_grad?")
    tokens = Tokens(probe)
    with torch.random.fork_rng(devices=[]):
        reference = Reference(record.reference, list(record.gradients))
        fitter = Fitter(record, tokens, reference)
        candidates = contexts(record, tokens, reference.window is not None)
        fit = fitter.fit(candidates)
        judged = Judge(record, tokens, reference, fit)
        found = judged.findings()
    ignored: list[Finding] = [each for each in found if any(each.kind.startswith(name) for name in allow)]
    left = [each for each in found if each not in ignored]
    picture = judged.picture() if fit.exact else []
    seen = len(judged.documents) if len(judged.documents) < len(probe.lengths) else None
    return Verdict(probe, left, fit.residual, ignored, picture, fitter.alike(fit, candidates), seen)
