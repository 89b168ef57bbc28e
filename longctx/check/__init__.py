"""Check of one optimizer step of any trainer: what each token saw, and how much each prediction
counts (docs/check-step.md)."""

from longctx.check.probe import PROBES, Probe
from longctx.check.record import CheckError, Step, record
from longctx.check.step import Report, Verdict, check_step
from longctx.check.verdict import Finding

__all__ = [
    "PROBES",
    "CheckError",
    "Finding",
    "Probe",
    "Report",
    "Step",
    "Verdict",
    "check_step",
    "record",
]
