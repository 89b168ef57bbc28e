"""Preference: the aim of DPO, which weighs both documents of a pair by how far the model is from a
reference.

The loss of a pair is -log σ(β m), where its margin m is the log-probability of the chosen document
minus that of the rejected one, each minus the reference's. Its gradient is that of cross-entropies
with the weight w = β σ(-β m) / pairs on every target of the chosen document, and -w on every one of
the rejected.
"""

import copy
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch.nn import functional as F

from .aim import Aim, Weights
from .contexts import APART
from .facts import Facts
from .finding import Finding
from .gathered import Record
from .likely import logits_of, of_targets
from .objectives import nearest
from .probe import Probe, Tokens
from .recording import reference_of
from .reference import Reference
from .rounding import TIMES
from .scale import SCALE
from .tolerances import FLOAT32, NAMES

SWAPPED = "chosen and rejected documents are swapped"
SAME_SIGN = "rejected documents are trained as chosen ones are"
BETA = "beta is another one"
PER_TOKEN = "log-probabilities are means of tokens and no sums"
OTHER_PAIRS = "chosen documents are compared with rejected ones of other pairs"
OTHER_MARGINS = "the margins of pairs are wrong"
KINDS = (SWAPPED, SAME_SIGN, BETA, PER_TOKEN, OTHER_PAIRS, OTHER_MARGINS)
NO_MARGINS = 1e-9
"""Largest margin for which the reference counts as the model itself."""


class Scores:
    """Log-probabilities of documents.

    Attributes:
        own, others: by the model, and by its reference, of each document of the probe.
    """

    def __init__(self, tokens: Tokens, model: Any, reference: Any) -> None:
        """`reference`: the other model; None: the same without adapters."""
        self.own = _scores(model, tokens)
        if reference is not None:
            self.others = _scores(reference, tokens)
        elif hasattr(model, "disable_adapter"):
            with model.disable_adapter():
                self.others = _scores(model, tokens)
        else:
            self.others = self.own

    def margins(self, own: float = 1.0, others: float = -1.0) -> list[float]:
        """Returns the margin of each pair: the sum of both models' with these factors."""
        found = list[float]()
        for first in range(0, len(self.own), 2):
            of_own = self.own[first] - self.own[first + 1]
            of_others = self.others[first] - self.others[first + 1]
            found.append(own * of_own + others * of_others)
        return found


class Preference(Aim):
    """The mean of DPO's loss of pairs, each two documents of `probe.in_pairs()`."""

    unit = "what they should be"

    def __init__(self, beta: float, reference_model: Any = None) -> None:
        """`reference_model`: a causal LM of transformers; without, the trained model itself as it
        begins, without its adapters."""
        self.beta = beta
        self._reference = None if reference_model is None else reference_of(reference_model)
        self._scores: Scores | None = None

    def probe_of(self, probe: Probe) -> Probe:
        return probe.in_pairs()

    def scores(self, tokens: Tokens, reference: Reference) -> Scores:
        """Returns the log-probabilities of the documents of a probe."""
        if self._scores is None:
            self._scores = Scores(tokens, reference.model, self._reference)
        return self._scores

    def weights(
        self, targets: list[tuple[int, int]], tokens: Tokens, reference: Reference
    ) -> Weights:
        margins = self.scores(tokens, reference).margins()
        pairs = {tokens.document[number] // 2 for number, _ in targets}
        found = Weights()
        for number, target in targets:
            document = tokens.document[number]
            size = _size(self.beta, margins[document // 2]) / len(pairs)
            found[number, target] = size if document % 2 == 0 else -size
        return found

    def rounding(self, record: Record, reference: Reference) -> float:
        """Returns β times what rounding changes of a margin: the most that σ(-β m) changes by; more
        where least squares have to tell ends of texts apart."""
        if record.tolerances.states == FLOAT32.states:
            return 0.0
        rounded = copy.deepcopy(reference.model).to(record.dtype)
        other = None if self._reference is None else copy.deepcopy(self._reference).to(record.dtype)
        coarse = Scores(record.tokens, rounded, other).margins()
        fine = self.scores(record.tokens, reference).margins()
        apart = [abs(one - another) for one, another in zip(coarse, fine, strict=True)]
        found = TIMES * self.beta * max(apart)
        if record.looked is None:
            found += record.tolerances.residual_of_unknown
        return found

    def loss(self, facts: Facts) -> float:
        margins = self.scores(facts.tokens, facts.reference).margins()
        pairs = {document // 2 for document in facts.documents}
        of_pairs = torch.tensor([margins[pair] for pair in sorted(pairs)], dtype=torch.float64)
        return float(-F.logsigmoid(self.beta * of_pairs).mean())

    def loss_of_step(self, facts: Facts) -> float | None:
        """Returns the loss of a right step if this one is right, as no other follows from weights
        alone."""
        right = all(abs(weight - 1) <= facts.same for weight in facts.kept.values())
        if right and not facts.lost and not facts.extra:
            return self.loss(facts)
        return None

    def not_tested(self, facts: Facts) -> dict[str, str]:
        found = dict[str, str]()
        if facts.limits.states > FLOAT32.states:
            what = f"weights of pairs that are off by less than {facts.same:.1%}"
            found[what] = f"{NAMES[facts.record.dtype]} rounds margins"
        margins = self.scores(facts.tokens, facts.reference).margins()
        if max(map(abs, margins)) <= NO_MARGINS:
            another = "another one: probe.model(.., initializer_range=.25)"
            found["the margins of pairs"] = f"the reference is the model itself ({another})"
        return found

    def faults(self, facts: Facts) -> list[Finding]:
        """Returns what is wrong with the weights of documents; nothing where all are right, or
        where those of a document's targets differ."""
        documents = _Documents(facts, self)
        if not documents.relative:
            return []
        return documents.faults()

    def is_judged(self, facts: Facts) -> bool:
        return _is_forward_right(facts) and not facts.lost


def _is_forward_right(facts: Facts) -> bool:
    """Returns whether log-probabilities are the right ones: else margins follow from that."""
    contexts = {context.name for context in facts.fit.contexts.values()}
    return contexts == {APART} and not facts.unknown and not facts.extra


class _Documents:
    """The documents of a step with pairs.

    Attributes:
        relative: weight of the targets of each, relative to the right one; of none if those of a
            document's targets differ.
    """

    def __init__(self, facts: Facts, aim: Preference) -> None:
        self._facts = facts
        self._beta = aim.beta
        self._scores = aim.scores(facts.tokens, facts.reference)
        several = defaultdict[int, list[float]](list)
        right = dict[int, float]()
        for pair in facts.wanted:
            document = facts.tokens.document[pair[0]]
            several[document].append(facts.relative.get(pair, 0.0))
            right[document] = abs(facts.right[pair])
        self._lengths = {document: len(each) for document, each in several.items()}
        self._pairs = len({document // 2 for document in facts.documents})
        self.relative = dict[int, float]()
        self._sizes = dict[int, float]()
        """Weights of the targets of each document times the number of pairs, without the sign that
        they should have."""
        if all(self._alike(each) for each in several.values()):
            for document, each in several.items():
                mean = sum(each) / len(each)
                self.relative[document] = mean
                self._sizes[document] = mean * right[document] * self._pairs

    def _alike(self, weights: Collection[float]) -> bool:
        return max(weights) - min(weights) <= self._facts.same * max(map(abs, weights))

    def faults(self) -> list[Finding]:
        """Returns what explains the weights of documents."""
        wrong_sign = self._wrong_sign()
        if wrong_sign:
            return wrong_sign
        if not _is_forward_right(self._facts):
            return []
        if self._alike(self.relative.values()):
            return self._wrong_scale()
        return self._wrong_beta() or self._per_token() or self._wrong_margins()

    def _wrong_sign(self) -> list[Finding]:
        negative = {document for document, relative in self.relative.items() if relative < 0}
        if not negative:
            return []
        rejected = {document for document in self.relative if document % 2}
        if negative == rejected:
            return [Finding(SAME_SIGN)]
        of_pairs = {document // 2 for document in negative}
        whole = {document for document in self.relative if document // 2 in of_pairs}
        if whole != negative:
            return []
        if len(negative) == len(self.relative):
            return [Finding(SWAPPED, "in all pairs")]
        return [Finding(SWAPPED, f"in {_pairs_in_words(sorted(of_pairs))}")]

    def _wrong_scale(self) -> list[Finding]:
        """Returns that all weights are off by one factor."""
        factor = sum(self.relative.values()) / len(self.relative)
        shown = self._facts.fit.shown
        is_known = shown is None or shown.scaled
        if abs(factor - 1) <= self._facts.same or not is_known:
            return []
        words = f"× {factor:.5g}"
        for what, value in self._scales().items():
            if abs(factor / value - 1) <= self._facts.same:
                words = what
                break
        if self._has_margins() and self._pairs == 1:
            words += ", or another beta or margin"
        elif not self._has_margins():
            words += f", or beta is {factor * self._beta:.4g} and not {self._beta:.4g}"
        return [Finding(SCALE, words)]

    def _has_margins(self) -> bool:
        return max(map(abs, self._scores.margins())) > NO_MARGINS

    def _scales(self) -> dict[str, float]:
        """Returns factors of the loss by words for them."""
        record = self._facts.record
        micro_batches = 1 + max(row.call for row in record.calls)
        found = dict[str, float]()
        for name, count in (("ranks", record.ranks), ("micro-batches", micro_batches)):
            if count > 1:
                found[f"× {count}, the number of {name}"] = float(count)
                found[f"÷ {count}, the number of {name}"] = 1 / count
        found["a sum of pairs and no mean"] = float(self._pairs)
        found["divided by documents, not by pairs"] = 0.5
        found["divided by targets, not by pairs"] = self._pairs / sum(self._lengths.values())
        return found

    def _wrong_beta(self) -> list[Finding]:
        """Returns that another beta explains all weights."""
        if not self._has_margins():
            return []
        margins = self._scores.margins()

        def apart(beta: float) -> float:
            return self._apart(beta, margins)

        beta = nearest(apart, between=(self._beta / 100, self._beta * 100), steps=96)
        if apart(beta) <= self._facts.same:
            return [Finding(BETA, f"{beta:.4g} and not {self._beta:.4g}")]
        return []

    def _apart(self, beta: float, margins: list[float]) -> float:
        """Returns the largest difference of a weight from that of a beta and margins, relative to
        the largest one."""
        expected = {each: _size(beta, margins[each // 2]) for each in self._sizes}
        most = max(expected.values())
        return max(abs(self._sizes[each] - value) for each, value in expected.items()) / most

    def _per_token(self) -> list[Finding]:
        """Returns that the weights of a document's targets follow its length."""
        lengths_differ = False
        for chosen, size in self._sizes.items():
            rejected = chosen + 1
            if chosen % 2 or rejected not in self._sizes:
                continue
            of_chosen = self._lengths[chosen]
            of_rejected = self._lengths[rejected]
            if not self._alike((size * of_chosen, self._sizes[rejected] * of_rejected)):
                return []
            lengths_differ |= of_chosen != of_rejected
        if lengths_differ:
            return [Finding(PER_TOKEN)]
        return []

    def _wrong_margins(self) -> list[Finding]:
        """Returns which margins weights follow, where each document has a partner."""
        scores = self._scores
        causes = {
            "the reference's log-probabilities are not subtracted": scores.margins(others=0.0),
            "the reference's log-probabilities are added": scores.margins(others=1.0),
            "the reference is the model itself": scores.margins(own=0.0, others=0.0),
            "they are those of the reference alone": scores.margins(own=0.0),
        }
        for words, margins in causes.items():
            if self._apart(self._beta, margins) <= self._facts.same:
                return [Finding(OTHER_MARGINS, words)]
        partners = self._partners()
        if partners is None:
            return []
        other = {chosen: partner for chosen, partner in partners.items() if partner != chosen + 1}
        if other:
            first = min(other)
            count = f"{len(other)} of {len(partners)}"
            if len(other) < len(partners):
                count = f"at least {count}"  # as others may weigh alike by chance
            words = f"document {first} with document {other[first]}"
            return [Finding(OTHER_PAIRS, f"{count}, {words}")]
        right = scores.margins()
        found = dict[int, str]()
        for document, size in sorted(self._sizes.items()):
            pair = document // 2
            share = torch.tensor(size / self._beta, dtype=torch.float64)
            off = not abs(self.relative[document] - 1) <= self._facts.same
            if off and 0 < float(share) < 1:
                margin = float(torch.logit(1 - share)) / self._beta
                found[pair] = f"{margin:.4g} and not {right[pair]:.4g} of pair {pair}"
        return [Finding(OTHER_MARGINS, ", ".join([*found.values()][:3]))]

    def _partners(self) -> dict[int, int] | None:
        """Returns the rejected document that has the weight of each chosen one, its own one first;
        None if one has none."""
        found = dict[int, int]()
        for chosen, size in self._sizes.items():
            if chosen % 2 or chosen + 1 not in self._sizes:
                continue
            if self._alike((size, self._sizes[chosen + 1])):
                found[chosen] = chosen + 1
                continue
            others = [each for each in self._sizes if each % 2]
            alike = [each for each in others if self._alike((size, self._sizes[each]))]
            if not alike:
                return None
            found[chosen] = alike[0]
        return found


def _size(beta: float, margin: float) -> float:
    """Returns the weight of a document's targets in a pair of this margin."""
    return beta * float(torch.sigmoid(torch.tensor(-beta * margin, dtype=torch.float64)))


def _pairs_in_words(pairs: list[int]) -> str:
    shown = ", ".join(map(str, pairs[:4]))
    if len(pairs) > 4:
        shown += f" and {len(pairs) - 4} more"
    return f"pair{'s' * (len(pairs) > 1)} {shown}"


def _scores(model: Any, tokens: Tokens) -> list[float]:
    """Returns the log-probability of each document's targets by a model."""
    found = list[float]()
    for document in range(len(tokens.probe.lengths)):
        logits = logits_of(model, tokens, document)
        found.append(float(of_targets(tokens, document, logits=logits).sum()))
    return found
