"""Check of one optimizer step of any trainer: what each token saw, and how much each prediction
counts (docs/check-step.md)."""

from .data import DataReport, check_data
from .data_batches import Data, DataOfTrainer
from .errors import CheckError, UsageError
from .finding import Finding
from .policy import Policy
from .preference import Preference
from .probe import PROBES, Probe
from .record import Step, record
from .step import Report, Verdict, check_step

__all__ = [
    "PROBES",
    "CheckError",
    "Data",
    "DataOfTrainer",
    "DataReport",
    "Finding",
    "Policy",
    "Preference",
    "Probe",
    "Report",
    "Step",
    "UsageError",
    "Verdict",
    "check_data",
    "check_step",
    "record",
]
