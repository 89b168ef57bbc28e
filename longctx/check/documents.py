"""Faults of documents: which are in no call, which are on all ranks, and which see each other."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from .contexts import APART, ORDER, TWICE
from .facts import Facts
from .finding import Finding
from .gathered import Record

MISSING = "documents are missing in the step"
SAME_DATA = "all ranks have the same documents"


def missing_documents(facts: Facts) -> Iterator[Finding]:
    """Yields which documents with targets are in no call."""
    if not facts.missing:
        return
    of = len(facts.tokens.probe.lengths)
    which = f"{len(facts.missing)} of {of}: {facts.named_documents(facts.missing)}"
    yield Finding(MISSING, f"{which}; one step has to hold the whole probe")


def same_data(record: Record) -> Iterator[Finding]:
    """Yields that ranks hold the same tokens, which tensor parallelism has to, where documents are
    missing."""
    held: list[set[int]] = [set() for _ in range(record.ranks)]
    for row in record.calls:
        held[row.rank].update(row.numbers)
    if len(held) > 1 and all(numbers == held[0] for numbers in held):
        yield Finding(SAME_DATA)


def wrong_contexts(facts: Facts) -> Iterator[Finding]:
    """Yields wrong contexts, with an example of documents that see each other."""
    by_name = defaultdict[str, list[int]](list)
    for document in facts.documents:
        by_name[facts.fit.contexts[document].name].append(document)
    by_name.pop(APART, None)
    for name, several in by_name.items():
        shown = facts.fit.shown
        off = shown.documents if shown is not None else several
        documents = [document for document in several if document in off] or several
        details = facts.named_documents(documents)
        if name in (TWICE, ORDER):
            yield Finding(name, _example_of_order(facts, name, documents))
            continue
        for number, sequence in enumerate(facts.fit.contexts[documents[0]].sequences):
            if sequence.sight != "causal":
                continue
            held = list(dict.fromkeys(facts.tokens.document[n] for n in sequence.numbers if n >= 0))
            seeing = [at for at, document in enumerate(held) if at and document in documents]
            if seeing:
                sees, seen = held[seeing[0]], held[seeing[0] - 1]
                details = f"in row {number}, tokens of document {sees} see document {seen}"
                break
        yield Finding(name, details)


def _example_of_order(facts: Facts, name: str, documents: list[int]) -> str:
    """Returns the first token of these documents that is there twice, or comes too late."""
    tokens = facts.tokens
    context = facts.fit.contexts[documents[0]]
    for sequence in context.sequences:
        for number, after in pairwise(sequence.numbers):
            is_example = after == number if name == TWICE else after < number
            if tokens.document[number] in documents and is_example:
                words = f"token {tokens.place[after]} of document {tokens.document[after]}"
                if name == ORDER:
                    words += f" comes after token {tokens.place[number]}"
                return f"{words}; in {facts.named_documents(documents)}"
    return facts.named_documents(documents)
