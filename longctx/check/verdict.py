"""Verdicts: what is wrong with a step, in words, from the context and the weight of every prediction."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from longctx.check.contexts import APART, Context, Sequence
from longctx.check.fit import EXACT, NEAR, Fit, Prediction
from longctx.check.probe import END, Probe, Tokens
from longctx.check.record import Record
from longctx.check.reference import Reference

SAME = 2e-3
"""Largest difference of weights, relative to 1/N, that counts as none."""
BACKWARD, LOGGED = 5e-4, 1e-3
"""Largest relative difference of gradients from predicted ones, and of logged numbers."""
NOT_SHIFTED, SHIFTED_TWICE = "labels are not shifted: tokens predict themselves", "labels are shifted twice"
OF_OTHERS = "labels belong to other tokens"
FORWARD = "hidden states are wrong"
ORDER = "hidden states of all tokens are wrong, also of first ones: weights, heads, or the order of ranks"
SCORES = "attention is wrong for all tokens but first ones: scores, heads or positions"
EXCHANGE = "attention is wrong where keys of other ranks are needed: their order, mask, or merging by log-sum-exp"
SPLIT = "attention is wrong in documents that are split over ranks: the order or mask of keys"
EDGE = "attention is wrong from an edge between ranks on: the order of their parts, or the mask of documents"
REACH = "attention is wrong from a place in documents on: a window, or an offset"
SAME_DATA = "all ranks have the same documents"
UNEXPLAINED = "the gradient is that of no known fault"


@dataclass(frozen=True)
class Finding:
    """One fault: its `kind`, always the same words, and what of the step shows it."""

    kind: str
    details: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.details}" if self.details else self.kind


@dataclass
class Verdict:
    """What became of one probe.

    Attributes:
        findings: faults, the most telling first; none: the step is right.
        allowed: faults that the user has allowed.
        residual: of the fit, relative to the gradient.
        picture: one line per document whose weights are not right.
        alike: other contexts that explain the gradient of a wrong step as well.
        documents: number of documents in the step, where it is not that of the probe.
    """

    probe: Probe
    findings: list[Finding]
    residual: float
    allowed: list[Finding] = field(default_factory=list)
    picture: list[str] = field(default_factory=list)
    alike: list[str] = field(default_factory=list)
    documents: int | None = None

    @property
    def status(self) -> int:
        """0: right, 1: wrong in a way that has a name, 2: wrong."""
        if not self.findings:
            return 0
        return 2 if any(finding.kind == UNEXPLAINED for finding in self.findings) else 1


class Judge:
    """Puts a fit into words."""

    def __init__(self, record: Record, tokens: Tokens, reference: Reference, fit: Fit) -> None:
        self.record, self.tokens, self.reference, self.fit = record, tokens, reference, fit
        self.same = SAME if fit.tolerance == EXACT else NEAR
        self.calls = [(call, tokens.numbers(call.ids)) for call in record.calls]
        self.count = Counter(number for _, row in self.calls for number in row if number >= 0)
        self.documents = sorted({tokens.document[number] for number in self.count})
        self.wanted: dict[Prediction, int] = {
            (number, tokens.ids[number + 1]): number + 1
            for document in self.documents
            for number in tokens.of(document)[:-1]
            if tokens.probe.trained(document, tokens.place[number + 1])
        }
        self.relative = {prediction: weight * len(self.wanted) for prediction, weight in fit.weights.items()}
        if not any(target == END for _, target in fit.weights):  # nobody knows which tokens predict the ends of documents
            self.wanted = {each: target for each, target in self.wanted.items() if each[1] != END}
        self.extra = {each: w for each, w in self.relative.items() if each not in self.wanted and abs(w) > SAME}
        self.kept = {each: self.relative[each] for each in self.wanted if abs(self.relative.get(each, 0)) > SAME}
        self.lost = [each for each in self.wanted if each not in self.kept]

    def findings(self) -> list[Finding]:
        if not self.wanted:
            return [Finding(UNEXPLAINED, "no token of the probe was in a call of the model")]
        found = [*self._ranks()]
        if not self.fit.exact:
            names = ", ".join(dict.fromkeys(context.name for context in self.fit.contexts.values()))
            return [*found, Finding(UNEXPLAINED, f"the nearest, “{names}”, leaves {self.fit.residual:.1%} of it")]
        found += [*self._contexts(), *self._unknown(), *(extra := list(self._extra()))]
        if extra and not self.kept and all(finding.kind in (NOT_SHIFTED, SHIFTED_TWICE) for finding in extra):
            return found
        found += self._lost()
        ranks = range(self.record.ranks)
        held = [{number for call, row in self.calls if call.rank == rank for number in row} for rank in ranks]
        if len(held) > 1 and all(numbers == held[0] for numbers in held):
            found.append(Finding(SAME_DATA))
        if not self.record.apart:
            found += [*self._weights(), *self._backward()]
        return [*found, *self._log()]

    # --- forward

    def _contexts(self) -> Iterator[Finding]:
        by_name = defaultdict[str, list[int]](list)
        for document in self.documents:
            by_name[self.fit.contexts[document].name].append(document)
        for name, documents in by_name.items():
            if name != APART:
                yield Finding(name, self._seen(self.fit.contexts[documents[0]]) or _named(documents))

    def _seen(self, context: Context) -> str:
        """Returns an example of documents that see each other."""
        for number, sequence in enumerate(context.sequences):
            held = list(dict.fromkeys(self.tokens.document[n] for n in sequence.numbers if n >= 0))
            if len(held) > 1 and sequence.sight == "causal":
                return f"in row {number}, tokens of document {held[1]} see document {held[0]}"
        return ""

    def _unknown(self) -> Iterator[Finding]:
        """Yields which tokens have hidden states that no context gives: by the first rule that holds for these alone."""
        if not self.fit.unknown:
            return
        unknown, place, document, at = set(self.fit.unknown), self.tokens.place, self.tokens.document, self._places()
        known = {number for number, _ in self.kept | self.extra if number >= 0} - unknown
        rank = [at[number][0] if number in at else -1 for number in range(len(self.tokens))]
        ranks = {each: {rank[n] for n in self.tokens.of(each)} for each in self.documents}
        least = min(place[number] for number in unknown)
        first = {number: next(n for n in row if n >= 0) for _, row in self.calls for number in row if number >= 0}
        edge = max((n for n in range(1, min(unknown) + 1) if rank[n] != rank[n - 1]), default=len(place))
        rules: dict[str, Callable[[int], bool]] = {
            ORDER: lambda n: True,
            SCORES: lambda n: place[n] > 0,
            EXCHANGE: lambda n: any(rank[n] != rank[m] for m in range(n - place[n], n)),
            SPLIT: lambda n: len(ranks[document[n]]) > 1,
            EDGE: lambda n: n >= edge,
            "documents of a row are mixed": lambda n: document[n] != document[first.get(n, n)],
            REACH: lambda n: place[n] >= least,
        }
        of_ranks = {f", on rank {each}": each for each in range(self.record.ranks)} if self.record.ranks > 1 else {}
        for which, only in ({"": None} | of_ranks).items():
            for rule, holds in rules.items():
                if {n for n in unknown | known if holds(n) and only in (None, rank[n])} == unknown:
                    yield Finding(rule, self._first_of(unknown) + which)
                    return
        yield Finding(FORWARD, f"of {len(unknown)} of {len(unknown | known)} tokens, {self._first_of(unknown)}")

    def _first_of(self, numbers: Iterable[int]) -> str:
        number = min(numbers)
        return f"first at token {self.tokens.place[number]} of document {self.tokens.document[number]}"

    # --- weights

    def _extra(self) -> Iterator[Finding]:
        found = defaultdict[str, list[Prediction]](list)
        for prediction in self.extra:
            found[self._kind_of(*prediction)].append(prediction)
        for kind in (NOT_SHIFTED, SHIFTED_TWICE):
            if len(found.get(kind, ())) < len(found.get(OF_OTHERS, ())):  # by chance
                found[OF_OTHERS] += found.pop(kind, [])
        for kind, predictions in found.items():
            ids = self.tokens.ids
            from_padding = [(ids.index(t) if n < 0 and t in ids else n) for n, t in predictions]
            documents = {self.tokens.document[number] for number in from_padding if number >= 0}
            yield Finding(kind, f"{len(predictions)} predictions, {_named(documents)}" if documents else "")

    def _kind_of(self, number: int, target: int) -> str:
        tokens = self.tokens
        after = None if number < 0 else tokens.next(number)
        if number < 0:
            if target == tokens.probe.pad:
                return "padding is trained"
            firsts = {ids[0] for ids in tokens.probe.documents}
            return f"{'first ' * (target in firsts)}tokens are predicted from padding"
        if target == tokens.ids[number]:
            return NOT_SHIFTED
        if after is not None and target == tokens.ids[after]:
            return "prompts are trained"
        if after is not None and (second := tokens.next(after)) is not None and target == tokens.ids[second]:
            return SHIFTED_TWICE
        if target == END and END not in tokens.ids:
            return "documents end with a token that the probe has not"
        if target == tokens.probe.pad:
            return "padding is trained"
        if after is None and target in {ids[0] for ids in tokens.probe.documents}:
            return "last tokens predict the first one of the next document"
        if any((number, target) in zip(row, call.ids[1:], strict=False) for call, row in self.calls):
            return "labels are shifted after the split: tokens at an edge predict the next one on their rank"
        return OF_OTHERS

    def _lost(self) -> Iterator[Finding]:
        found = defaultdict[str, list[Prediction]](list)
        starts = self._later_starts()
        wanted = Counter(self.tokens.document[number] for number, _ in self.wanted)
        whole = wanted.keys() - {self.tokens.document[number] for number, _ in self.kept}
        predicted = {target for _, target in self.extra}
        for number, _ in self.lost:
            target = number + 1
            if self.tokens.ids[target] in predicted:  # by another token
                continue
            kind = "predictions have no loss"
            if not self.count[target]:
                kind = "documents are cut short: tokens are in no call"
            elif self.tokens.document[number] in whole and wanted[self.tokens.document[number]] > 1:
                kind = "documents have no loss"
            elif target in starts:
                kind = "first tokens of the later parts of documents have no loss"
            elif self.tokens.next(target) is None:
                kind = "last tokens have no loss"
            found[kind].append((number, target))
        for kind, predictions in found.items():
            documents = {self.tokens.document[number] for number, _ in predictions}
            yield Finding(kind, f"{len(predictions)} of {len(self.wanted)} targets, {_named(documents)}")

    def _later_starts(self) -> set[int]:
        """Returns tokens that begin a row, or a run of one, but no document."""
        found = set()
        for _, row in self.calls:
            for before, number in zip([-1, *row], row, strict=False):
                if number >= 0 and self.tokens.place[number] and (before < 0 or self.tokens.next(before) != number):
                    found.add(number)
        return found

    def _weights(self) -> Iterator[Finding]:
        """Yields how the weights of the predictions that count differ from 1/N."""
        if not self.kept:
            return
        several = {each: w / max(1, self.count[self.wanted[each]]) for each, w in self.kept.items()}
        if not self._even(self.kept.values()) and self._even(several.values()):
            repeated = {self.tokens.document[number] for number, n in self.count.items() if n > 1}
            yield Finding("documents are repeated in the step", _named(repeated))
            return
        if self._even(self.kept.values()):
            yield from self._scale(sum(self.kept.values()) / len(self.kept))
            return
        for name, group_of in self._groups().items():
            groups = defaultdict[object, list[float]](list)
            for prediction, weight in (self.kept | self.extra).items():
                if prediction[0] >= 0:
                    groups[group_of(prediction)].append(weight)
            if len(groups) > 1 and all(self._even(weights) for weights in groups.values()):
                sums = [sum(weights) for weights in groups.values()]
                if self._even(sums):
                    yield Finding(f"the loss is a mean of means of {name}", f"each of {len(groups)} counts alike")
                else:
                    firsts = ", ".join(f"{weights[0]:.3g}" for weights in list(groups.values())[:4])
                    yield Finding(f"weights differ by {name}", f"{firsts} times 1/N")
                return
        least, most = min(self.kept.values()), max(self.kept.values())
        yield Finding("weights of predictions differ", f"from {least:.3g} to {most:.3g} times 1/N")

    def _scale(self, factor: float) -> Iterator[Finding]:
        """Yields a common factor that is neither 1 nor that of a mean over what is trained."""
        wanted, trained = len(self.wanted), sum(self.kept.values()) + sum(self.extra.values())
        if min(abs(factor - 1), abs(trained / wanted - 1)) < self.same:  # 1/N for all targets, or for all that is trained
            return
        ranks, micro_batches = self.record.ranks, 1 + max(call.number for call in self.record.calls)
        counts = {"ranks": ranks, "micro-batches": micro_batches, "ranks × micro-batches": ranks * micro_batches}
        tokens = sum(len(row) for _, row in self.calls)
        known = {f"× {count}, the number of {name}": float(count) for name, count in counts.items() if count > 1}
        known |= {f"÷ {count}, the number of {name}": 1 / count for name, count in counts.items() if count > 1}
        known |= {"a sum and no mean": wanted, "divided by all tokens, not by the targets": wanted / tokens}
        known["divided by the tokens of documents, not by the targets"] = wanted / sum(self.count.values())
        known["divided by the tokens but the first of each, not by the targets"] = wanted / (
            sum(self.count.values()) - len(self.documents)
        )
        for words, value in known.items():
            for base in (1.0, wanted * factor / trained):
                if abs(factor / (base * value) - 1) < self.same:
                    yield Finding("the loss has a wrong scale", words)
                    return
        yield Finding("the loss has a wrong scale", f"× {factor:.4g}")

    def _even(self, values: Iterable[float]) -> bool:
        values = list(values)
        return max(values) - min(values) < self.same * max(abs(max(values)), abs(min(values)))

    def _groups(self) -> dict[str, Callable[[Prediction], object]]:
        """Returns what predictions may be averaged over: names, and the group of a prediction."""
        at, document = self._places(), self.tokens.document
        return {
            "ranks": lambda each: at[each[0]][0],
            "micro-batches": lambda each: at[each[0]][:2],
            "micro-batches of all ranks": lambda each: at[each[0]][1],
            "rows": lambda each: at[each[0]][2],
            "documents": lambda each: document[each[0]],
        }

    def _places(self) -> dict[int, tuple[int, int, int]]:
        """Returns where each token is first: rank, call, row of all calls."""
        at: dict[int, tuple[int, int, int]] = {}
        for place, (call, row) in enumerate(self.calls):
            for number in row:
                at.setdefault(number, (call.rank, call.number, place))
        return at

    # --- backward, ranks and log

    def _ranks(self) -> Iterator[Finding]:
        if self.record.apart:
            worst = max(self.record.apart, key=lambda name: self.record.apart[name])
            all_of_them = len(self.record.apart) == len(self.record.gradients)
            which = "of all parameters" if all_of_them else f"of {_suffixes(self.record.apart)}"
            yield Finding("gradients differ between ranks", f"those {which}, by up to {self.record.apart[worst]:.0%}")

    def _backward(self) -> Iterator[Finding]:
        if self.reference.output is None or not self.fit.whole:
            return
        sizes = {name: float(value.norm()) for name, value in self.fit.gradients.items()}
        least = 1e-3 * max(sizes.values())
        off = defaultdict[str, dict[str, str]](dict)
        for name, expected in self.fit.gradients.items():
            found = self.record.gradients[name]
            if float((found - expected).norm()) > BACKWARD * max(sizes[name], least):
                ratio = float((found * expected).sum()) / max(sizes[name] ** 2, 1e-300)
                scaled = float((found - ratio * expected).norm()) < BACKWARD * float(found.norm())
                words = "none" if not found.any() else f"{ratio:.3g} times what it should be" if scaled else "another"
                layer = next((part for part in name.split(".") if part.isdigit()), "")
                off[layer][name] = words
        if off:  # what is wrong in a layer shows in all before it
            last = max(off, key=lambda layer: int(layer or -1))
            how = ", ".join(sorted(set(off[last].values())))
            others = f"; {sum(map(len, off.values())) - len(off[last])} before it follow" if len(off) > 1 else ""
            yield Finding(
                "the backward pass is wrong", f"{_suffixes(off[last])}{f' in layer {last}' * bool(last)}: {how}{others}"
            )

    def _log(self) -> Iterator[Finding]:
        if (logged := self.record.loss) is not None and self.fit.whole:
            right = self._loss()
            if min(abs(logged - right), abs(logged - self.fit.loss)) > LOGGED * right:
                yield Finding("the logged loss is wrong", f"{logged:.5g} and not {right:.5g} ({logged / right:.4g} times)")
        if (norm := self.record.norm) is not None and not self.record.apart:
            actual = sum(float(value.norm()) ** 2 for value in self.record.gradients.values()) ** 0.5
            if abs(norm - actual) > LOGGED * actual:
                yield Finding(
                    "the logged gradient norm is wrong", f"{norm:.5g} and not {actual:.5g} ({norm / actual:.4g} times)"
                )

    def _loss(self) -> float:
        """Returns the mean loss of the wanted predictions, documents apart."""
        total = 0.0
        for document in self.documents:
            numbers = self.tokens.of(document)
            ids = [self.tokens.ids[n] for n in numbers]
            pairs = zip(numbers, [*ids[1:], None], strict=True)
            targets = [target if target is not None and (n, target) in self.wanted else None for n, target in pairs]
            if any(target is not None for target in targets):
                total += float(self.reference.losses(Sequence(tuple(numbers), tuple(range(len(ids)))), ids, targets).sum())
        return total / len(self.wanted)

    def picture(self) -> list[str]:
        """Returns a line for each document with a wrong weight; of its targets `.` are right, `0` lost, `+` and `-` off."""
        lines = list[str]()
        if not self.lost and not self.extra and self.kept and self._even(self.kept.values()):
            return lines
        for document in self.documents:
            signs = ""
            for number in self.tokens.of(document)[:-1]:
                prediction = (number, self.tokens.ids[number + 1])
                weight, wanted = self.relative.get(prediction, 0.0), float(prediction in self.wanted)
                signs += "." if abs(weight - wanted) < SAME else "0" if abs(weight) < SAME else "+" if weight > wanted else "-"
            if signs.strip("."):
                lines.append(f"document {document:2} {signs[:96]}{'…' if len(signs) > 96 else ''}")
        return lines


def _named(documents: Iterable[int]) -> str:
    numbers = [str(document) for document in sorted(documents)]
    shown = ", ".join(numbers[:4]) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")
    return f"document{'s' * (len(numbers) > 1)} {shown}"


def _suffixes(names: Iterable[str]) -> str:
    """Returns the names of parameters without the number of their layer."""
    found = Counter(".".join(part for part in name.split(".")[-3:] if not part.isdigit()) for name in names)
    shown = [f"{name} ({count})" if count > 1 else name for name, count in found.items()]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
