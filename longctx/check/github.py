"""Verdicts as annotations of GitHub Actions: lines of a log that GitHub shows at a file."""

from .data import NAME, DataReport
from .finding import Finding
from .step import Report


def annotation(level: str, text: str, *, file: str, title: str) -> str:
    """Returns the line that makes an annotation of this level: error, warning or notice."""
    properties = f"file={_escaped_property(file)},title={_escaped_property(title)}"
    return f"::{level} {properties}::{_escaped(text)}"


def annotations(report: Report, *, file: str) -> list[str]:
    """Returns an error for each fault, and a notice for each choice."""
    lines = []
    for verdict in report.verdicts:
        title = f"check-step, {verdict.probe.name}"
        for finding in verdict.findings:
            text = _with_alike(finding, verdict.alike)
            lines.append(annotation("error", text, file=file, title=title))
        for choice in verdict.choices:
            lines.append(annotation("notice", str(choice), file=file, title=title))
    return lines


def annotations_of_data(report: DataReport, *, file: str) -> list[str]:
    """Returns an error for each fault of batches."""
    title = f"check-step, {NAME}"
    return [
        annotation("error", str(finding), file=file, title=title) for finding in report.findings
    ]


def _with_alike(finding: Finding, alike: list[str]) -> str:
    """Returns a fault, and on lines of their own what a probe does not tell from it."""
    return "\n".join([str(finding), *(f"or {other}" for other in alike)])


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escaped_property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
