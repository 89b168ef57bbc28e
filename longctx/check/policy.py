"""Policy: the aim of policy gradients, such as GRPO's at its first update, which weighs every
document by its advantage.

There the ratio of the policy to what sampled the documents is 1, so that ∂loss is that of
cross-entropies with the weight A / N on every target of a document with the advantage A. `per` says
what N is.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from .aim import Aim, Weights
from .errors import CheckError
from .facts import Facts
from .finding import Finding
from .largest import largest
from .likely import logits_of, of_targets
from .objectives import TEMPERATURES, nearest
from .probe import Tokens
from .reference import Reference

WRONG_SIGN = "advantages have the wrong sign"
NO_SIGN = "advantages lose their sign"
OF_OTHER_DOCUMENTS = "advantages belong to other documents"
OTHER_SAMPLES = "log-probabilities of the sampler are not those of the model"
OTHER_COMPUTED = "log-probabilities of the trainer are not those of the model"
RATIOS = "weights are multiplied by ratios of log-probabilities"
KINDS = (WRONG_SIGN, NO_SIGN, OF_OTHER_DOCUMENTS, OTHER_SAMPLES, OTHER_COMPUTED, RATIOS)
LogProbabilities = Mapping[int, Sequence[float]]
"""Of each document of a probe, those of its targets in order."""


class Policy(Aim):
    """The mean of -A log p of all targets, or of another number of them."""

    unit = "what they should be"

    def __init__(
        self,
        advantages: Sequence[float],
        *,
        per: Literal["target", "document", "length"] = "target",
        length: int = 0,
        sampled: LogProbabilities | None = None,
        computed: LogProbabilities | None = None,
    ) -> None:
        """`advantages` of each document of the probe. `per`: a sum is divided by the number of
        targets; each document's by its own, and by documents; or by documents and the `length`.
        `sampled`, `computed`: log-probabilities at temperature 1 that the sampler gave, and that
        the trainer had before the update.

        Raises CheckError for an advantage of 0, whose document shows nothing.
        """
        if not all(advantages):
            raise CheckError("an advantage is 0, so that its document shows nothing: give another")
        if per == "length" and length <= 0:
            raise CheckError("per='length' needs the length by which sums are divided")
        self.advantages = list(advantages)
        self._per = per
        self._length = length
        self._given = dict[str, LogProbabilities]()
        if sampled is not None:
            self._given[OTHER_SAMPLES] = sampled
        if computed is not None:
            self._given[OTHER_COMPUTED] = computed

    def weights(
        self, targets: list[tuple[int, int]], tokens: Tokens, reference: Reference
    ) -> Weights:
        documents = len(tokens.probe.lengths)
        if len(self.advantages) != documents:
            raise CheckError(f"{len(self.advantages)} advantages of {documents} documents")
        lengths = defaultdict[int, int](int)
        for number, _ in targets:
            lengths[tokens.document[number]] += 1
        found = Weights()
        for number, target in targets:
            document = tokens.document[number]
            if self._per == "target":
                divisor = len(targets)
            elif self._per == "document":
                divisor = documents * lengths[document]
            else:
                divisor = documents * self._length
            found[number, target] = self.advantages[document] / divisor
        return found

    def loss_of_step(self, facts: Facts) -> float | None:
        """Returns None: at a ratio of 1 the loss is a mean of advantages, which may be 0."""
        return None

    def not_tested(self, facts: Facts) -> dict[str, str]:
        found = {"the logged loss": "of a policy gradient it is a mean of advantages"}
        given = self._given.get(OTHER_SAMPLES, {})
        missing = [document for document in facts.documents if document not in given]
        if missing:
            what = f"log-probabilities of the sampler for {len(missing)} documents"
            found[what] = "none are given on the first rank (sampled=)"
        return found

    def of_given(self, facts: Facts) -> list[Finding]:
        found = list[Finding]()
        for kind, judged in self._judged(facts).items():
            details = judged.in_words()
            if details:
                found.append(Finding(kind, details))
        return found

    def faults(self, facts: Facts) -> list[Finding]:
        """Returns what is wrong with ratios and with advantages; nothing where weights are right,
        or where those of a document's targets differ for another reason."""
        for judged in self._judged(facts).values():
            ratios = judged.ratios()
            if ratios:
                return ratios
        return self._of_advantages(facts)

    def _judged(self, facts: Facts) -> dict[str, "_Given"]:
        """Returns what was given, by the kind of fault that it may have."""
        model = facts.reference.model
        logits = dict[int, torch.Tensor]()
        for document in facts.documents:
            logits[document] = logits_of(model, facts.tokens, document)
        return {kind: _Given(given, facts, logits=logits) for kind, given in self._given.items()}

    def _of_advantages(self, facts: Facts) -> list[Finding]:
        several = defaultdict[int, list[float]](list)
        for pair, weight in facts.kept.items():
            several[facts.tokens.document[pair[0]]].append(weight)
        if not several or not all(facts.even(each) for each in several.values()):
            return []
        relative = {document: sum(each) / len(each) for document, each in several.items()}
        negative = {document for document, each in relative.items() if each < 0}
        is_even = facts.even(relative.values())
        if is_even and negative:
            return [Finding(WRONG_SIGN, "of all documents")]
        if is_even:
            return []
        below = {document for document in relative if self.advantages[document] < 0}
        if negative and negative == below and facts.even(map(abs, relative.values())):
            return [Finding(NO_SIGN, f"of {facts.named_documents(sorted(negative))}")]
        used = {document: each * self.advantages[document] for document, each in relative.items()}
        owners = dict[int, int]()
        for document, advantage in used.items():
            alike = [n for n, each in enumerate(self.advantages) if facts.even((advantage, each))]
            if not alike:
                return []
            owners[document] = document if document in alike else alike[0]
        other = {document: owner for document, owner in owners.items() if owner != document}
        first = min(other)
        words = f"{len(other)} of {len(owners)}, document {first} has that of {other[first]}"
        return [Finding(OF_OTHER_DOCUMENTS, words)]


class _Given:
    """Log-probabilities that were given, beside those of the model."""

    def __init__(
        self, given: LogProbabilities, facts: Facts, *, logits: dict[int, torch.Tensor]
    ) -> None:
        """`logits` of documents [tokens, V]. Raises CheckError for another number than a
        document's targets."""
        self._facts = facts
        self._logits = {each: logits[each] for each in logits if each in given}
        self._right = self._at()
        self._given = dict[int, torch.Tensor]()
        for document, right in self._right.items():
            own = torch.tensor(given[document], dtype=torch.float64)
            if own.shape != right.shape:
                raise CheckError(
                    f"{len(own)} log-probabilities of document {document}, which has {len(right)} "
                    "targets"
                )
            self._given[document] = own
        self._most = self._apart(self._right)

    def _at(self, temperature: float = 1.0) -> dict[int, torch.Tensor]:
        """Returns the model's log-probabilities of documents' targets [targets]."""
        found = dict[int, torch.Tensor]()
        for document, logits in self._logits.items():
            divided = logits / temperature
            found[document] = of_targets(self._facts.tokens, document, logits=divided)
        return found

    def _apart(self, others: dict[int, torch.Tensor]) -> float:
        """Returns the largest difference from other log-probabilities; NaN and infinity count."""
        apart = 0.0
        for document, own in self._given.items():
            if len(own):
                apart = largest((apart, float((own - others[document]).abs().max())))
        return apart

    def in_words(self) -> str:
        """Returns how what was given differs from the model's; nothing if it does not."""
        if self._most <= self._facts.limits.logged:
            return ""
        words = f"off by up to {self._most:.3g}"
        for cause, others in self._causes().items():
            if self._apart(others) <= self._facts.limits.logged:
                return f"{words}: {cause}"
        temperature = nearest(lambda each: self._apart(self._at(each)), between=TEMPERATURES)
        if self._apart(self._at(temperature)) <= self._facts.limits.logged:
            return f"{words}: those at a temperature of {temperature:.4g}"
        return words

    def _causes(self) -> dict[str, dict[int, torch.Tensor]]:
        """Returns what may have been given in place of the model's, by words for it."""
        negative = dict[int, torch.Tensor]()
        plain = dict[int, torch.Tensor]()
        later = dict[int, torch.Tensor]()
        earlier = dict[int, torch.Tensor]()
        for document, right in self._right.items():
            own = self._given[document]
            negative[document] = -right
            plain[document] = right.exp()
            # Of what has no other token to be of, nothing is said.
            later[document] = torch.cat([right[1:], own[-1:]])
            earlier[document] = torch.cat([own[:1], right[:-1]])
        return {
            "cross-entropies": negative,
            "probabilities without a logarithm": plain,
            "those of the next token": later,
            "those of the token before": earlier,
        }

    def ratios(self) -> list[Finding]:
        """Returns that weights have the ratios that follow from what was given, if that differs
        from the model's."""
        facts = self._facts
        if self._most <= facts.limits.logged:
            return []
        ratios = list[float]()
        apart = 0.0
        for document, right in self._right.items():
            numbers = [pair for pair in facts.wanted if facts.tokens.document[pair[0]] == document]
            of_document = (right - self._given[document]).exp().tolist()
            for pair, ratio in zip(numbers, of_document, strict=True):
                apart = largest((apart, abs(facts.relative.get(pair, 0.0) - ratio)))
            ratios += of_document
        if apart <= facts.limits.logged * max(ratios):
            return [Finding(RATIOS, f"{min(ratios):.3g} to {max(ratios):.3g}")]
        return []
