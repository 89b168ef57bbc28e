"""Verdicts: what is wrong with a step, in words, from the context and the weight of every
prediction."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from math import isfinite

from .backward import (
    BACKWARD_WRONG,
    BEFORE,
    CHANGED,
    CLIPPED,
    DECAY,
    ROUNDED_STATES,
    ROUTERS,
    SIGNS,
    THINNED,
    after_backward,
    beside_tokens,
    wrong_backward,
)
from .backward_ways import KINDS as WAYS
from .causes import KINDS as CAUSES
from .contexts import FAULTS as CONTEXTS
from .documents import MISSING, SAME_DATA, missing_documents, same_data, wrong_contexts
from .errors import UsageError
from .facts import Facts
from .finding import UNEXPLAINED, Finding, suffixes
from .fit import Shown
from .gathered import Record
from .logged import LOGGED_LOSS, LOGGED_NORM, wrong_log
from .places import HIDDEN, PLACES, wrong_places
from .policy import KINDS as OF_POLICIES
from .preference import KINDS as OF_PAIRS
from .reference import Gradients
from .scale import SCALE
from .targets import EXTRA, LOST, NOT_SHIFTED, SHIFTED_TWICE, extra_targets, lost_targets
from .updates import KINDS as UPDATES
from .variants import KINDS as VARIANTS
from .weights import (
    CHUNKS,
    FILLED,
    MEAN_OF_MEANS,
    MEANS,
    REPEATED,
    WEIGHTS,
    WEIGHTS_BY,
    wrong_weights,
)

NOT_FINITE = "gradients are not finite"
OTHER_WEIGHTS = "ranks begin with different weights"
WEIGHTS_CHANGED = "weights change within the step"
NO_GRADIENT = "trained parameters have no gradient"
APART_RANKS = "gradients differ between ranks"
OBJECTIVE_OTHER = "the objective is not the cross-entropy of one id for each token"


def kinds() -> list[str]:
    """Returns the kinds of all faults, also of the one without a name."""
    of_documents = (MISSING, SAME_DATA, REPEATED, FILLED)
    several = (
        NOT_FINITE,
        OTHER_WEIGHTS,
        WEIGHTS_CHANGED,
        NO_GRADIENT,
        APART_RANKS,
        HIDDEN,
        WEIGHTS,
    )
    of_numbers = (
        SCALE,
        OBJECTIVE_OTHER,
        DECAY,
        ROUTERS,
        CHANGED,
        BACKWARD_WRONG,
        BEFORE,
        CLIPPED,
        THINNED,
        SIGNS,
        ROUNDED_STATES,
        LOGGED_LOSS,
        LOGGED_NORM,
    )
    by_groups = [words.format(name) for words in (MEAN_OF_MEANS, WEIGHTS_BY) for name in MEANS]
    by_groups.append(MEAN_OF_MEANS.format(CHUNKS))
    return [
        UNEXPLAINED,
        *several,
        *of_documents,
        *of_numbers,
        *by_groups,
        *CONTEXTS,
        *PLACES,
        *CAUSES,
        *VARIANTS,
        *UPDATES,
        *OF_PAIRS,
        *OF_POLICIES,
        *WAYS,
        *EXTRA,
        *LOST,
    ]


def words_before_colon(kind: str) -> str:
    return kind.partition(":")[0]


def require_kinds(allow: Iterable[str]) -> None:
    """Raises UsageError for what no fault is called: neither a kind, nor the words of a kind before
    its first colon."""
    known = {name for kind in kinds() for name in (kind, words_before_colon(kind))}
    for name in allow:
        if name not in known:
            near = get_close_matches(name, known, n=3, cutoff=0.3)
            hint = f": did you mean {', or '.join(map(repr, near))}?" if near else ""
            raise UsageError(f"no fault is called {name!r}{hint}")


def is_allowed(finding: Finding, allow: Iterable[str]) -> bool:
    """Returns whether a fault is among these: by its kind, or the words before its first colon."""
    return not {finding.kind, words_before_colon(finding.kind)}.isdisjoint(allow)


def not_finite(record: Record) -> list[Finding]:
    """Returns what is said of a step with a gradient that is NaN or infinite, from which nothing
    else follows; nothing if all are finite."""
    names = [name for name, value in record.gradients.items() if not value.isfinite().all()]
    if not names:
        return []
    count = f"{len(names)} of {len(record.gradients)} parameters"
    details = f"NaN or infinity in {count}: {suffixes(names)}"
    if record.not_finite_in:
        details += f"; first in the {record.not_finite_in}"
    found = [Finding(NOT_FINITE, details)]
    if record.loss is not None and not isfinite(record.loss):
        found.append(Finding(LOGGED_LOSS, f"it is {record.loss}"))
    if record.norm is not None and isfinite(record.norm):
        found.append(Finding(LOGGED_NORM, f"{record.norm:.5g}, of gradients that are not finite"))
    return found


def findings(facts: Facts) -> Iterator[Finding]:
    """Yields the faults of a step, the most telling first."""
    record = facts.record
    fit = facts.fit
    if not facts.wanted:
        yield Finding(
            UNEXPLAINED, "no token of the probe that should be predicted was in a call of the model"
        )
        return
    if record.weights_apart:
        yield Finding(OTHER_WEIGHTS, suffixes(record.weights_apart))
        return
    yield from _apart(record)
    if record.changed_at:
        calls = 1 + max(row.call for row in record.calls)
        yield Finding(WEIGHTS_CHANGED, f"before call {record.changed_at} of 0 to {calls - 1}")
        return
    if not fit.exact:
        names = ", ".join(dict.fromkeys(context.name for context in fit.contexts.values()))
        yield Finding(UNEXPLAINED, f"the nearest, “{names}”, leaves {fit.residual:.1%} of it")
        return
    if fit.errors:
        yield Finding(OBJECTIVE_OTHER, fit.errors)
        return
    yield from wrong_contexts(facts)
    yield from wrong_places(facts)
    yield from missing_documents(facts)
    yield from facts.aim.of_given(facts)
    other_objective = fit.shown is not None and bool(fit.shown.objective)
    of_aim = list[Finding]()
    if fit.shown is not None and fit.shown.objective:
        yield _objective(fit.shown)
    else:
        extra = extra_targets(facts)
        yield from extra
        if (
            extra
            and not facts.kept
            and {finding.kind for finding in extra} <= {NOT_SHIFTED, SHIFTED_TWICE}
        ):
            return
        # These first: with them, weights of whole documents may be as good as 0.
        of_aim = facts.aim.faults(facts) if not record.apart else []
        yield from of_aim or lost_targets(facts)
    if facts.missing:
        yield from same_data(record)
    gradients = _expected(facts)
    if gradients.missing:
        names = suffixes(gradients.missing)
        yield Finding(NO_GRADIENT, f"{len(gradients.missing)} of them: {names}")
    if not record.apart:
        if not other_objective and not of_aim and facts.aim.is_judged(facts):
            yield from wrong_weights(facts)
        after = list(after_backward(facts))
        beside = list(beside_tokens(facts, gradients.of)) if fit.whole else []
        yield from beside or after
        if fit.whole and not after and not beside:
            yield from wrong_backward(facts, gradients.of)
    loss = facts.aim.loss_of_step(facts) if fit.whole and not other_objective else None
    yield from wrong_log(facts, loss)


def _expected(facts: Facts) -> Gradients:
    """Returns the gradients that follow from forward and objective; of a right step where those are
    not known whole, to tell which parameters have one."""
    fit = facts.fit
    if not fit.whole:
        return facts.reference.gradients(facts.right_predictions())
    if fit.shown is not None and fit.shown.slopes is not None:
        return facts.reference.gradients_of(fit.shown.slopes)
    return facts.reference.gradients(fit.weights)


def _apart(record: Record) -> Iterator[Finding]:
    if not record.apart:
        return
    if len(record.apart) == len(record.gradients):
        which = "all parameters"
    else:
        which = suffixes(record.apart)
    most = max(record.apart.values())
    yield Finding(APART_RANKS, f"those of {which}, by up to {100 * most:.3g} %")


def _objective(shown: Shown) -> Finding:
    """Returns what is said of tokens whose objective is another one."""
    most = max(shown.objective.values())
    details = f"for {len(shown.objective)} tokens it leaves {most:.1e} of ∂loss/∂logits"
    if shown.beside:
        details += f"; {' or '.join(shown.beside)} would explain it"
    return Finding(OBJECTIVE_OTHER, details)
