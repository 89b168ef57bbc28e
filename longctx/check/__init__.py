"""Check of one optimizer step of any trainer: what each token saw, and how much each prediction
counts (docs/check-step.md)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data import DataReport, check_data
    from .data_batches import Data, DataOfTrainer
    from .errors import CheckError, UsageError
    from .finding import Finding
    from .policy import Policy
    from .preference import Preference
    from .probe import PROBES, Probe
    from .recording import Step, record
    from .step import Report, Verdict, check_step

# Imported when first used, so that the command's help needs no torch. No module has the name of
# what it exports: its import would take that name's place here.
_PLACES = {
    "PROBES": "probe",
    "CheckError": "errors",
    "Data": "data_batches",
    "DataOfTrainer": "data_batches",
    "DataReport": "data",
    "Finding": "finding",
    "Policy": "policy",
    "Preference": "preference",
    "Probe": "probe",
    "Report": "step",
    "Step": "recording",
    "UsageError": "errors",
    "Verdict": "step",
    "check_data": "data",
    "check_step": "step",
    "record": "recording",
}

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


if not TYPE_CHECKING:  # else a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f".{_PLACES[name]}", __name__)
        value = getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
