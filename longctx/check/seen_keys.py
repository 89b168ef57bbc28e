"""The keys that tokens saw, in words: a rule that all of them follow, or an example."""

from collections.abc import Iterator, Mapping

from .attended import ALONE, TWICE, WAYS, Run
from .probe import Tokens


def place_of(number: int, tokens: Tokens) -> str:
    return f"token {tokens.place[number]} of document {tokens.document[number]}"


class SeenKeys:
    """Runs of keys of tokens, by the tokens' index in a row.

    `numbers`: of the tokens of the row. `own_parts`: runs of keys of its own rank that a token
    should see, of those that should see others, too. `wider`: tokens whose run has all that they
    should see, and more.
    """

    def __init__(
        self,
        runs: Mapping[int, Run],
        numbers: list[int],
        *,
        tokens: Tokens,
        own_parts: Mapping[int, tuple[int, int]],
        wider: set[int],
    ) -> None:
        self._runs = runs
        self._numbers = numbers
        self._tokens = tokens
        self._own_parts = own_parts
        self._wider = wider
        first_of = dict[int, int]()
        last_of = dict[int, int]()
        for index, number in enumerate(numbers):
            first_of.setdefault(tokens.document[number], index)
            last_of[tokens.document[number]] = index
        documents = {index: tokens.document[numbers[index]] for index in runs}
        self._first = {index: first_of[document] for index, document in documents.items()}
        self._last = {index: last_of[document] for index, document in documents.items()}

    def words(self) -> str:
        """Returns the first rule that holds, or an example."""
        if any(run.way != ALONE for run in self._runs.values()):
            return self._example()
        rules = (*self._of_ranks(), *self._from_the_first(), *self._to_the_own())
        return next(iter(rules), self._example())

    def _example(self) -> str:
        ways = {run.way for run in self._runs.values()}
        way = next(way for way in WAYS if way in ways)
        index, run = next(each for each in self._runs.items() if each[1].way == way)
        place = place_of(self._numbers[index], self._tokens)
        if way == ALONE and index in self._wider:
            return f"{place} sees {self._span(run)}"
        if way == TWICE:
            return f"{place} counts {self._span(run)} twice"
        return f"{place} {way} {self._span(run)}"

    def _span(self, run: Run) -> str:
        begin = place_of(self._numbers[run.begin], self._tokens)
        if run.end - run.begin == 1:
            return begin
        last = place_of(self._numbers[run.end - 1], self._tokens)
        return f"the keys from {begin} to {last}"

    def _of_ranks(self) -> Iterator[str]:
        found = {index: (run.begin, run.end) for index, run in self._runs.items()}
        if found == self._own_parts:
            yield "they see keys of their own rank alone"

    def _from_the_first(self) -> Iterator[str]:
        """Yields rules of runs that begin with the document."""
        if any(run.begin != self._first[index] for index, run in self._runs.items()):
            return
        later = {index: run.end - 1 - index for index, run in self._runs.items()}
        if set(later.values()) == {-1}:
            yield "they do not see their own key"
        if min(later.values()) > 0:
            inside = [by for index, by in later.items() if index + by < self._last[index]]
            if not inside:
                yield "they see all later ones of their document"
            elif set(inside) == {max(later.values())}:
                yield f"they see {inside[0]} later ones"
        ends = {run.end - self._first[index] for index, run in self._runs.items()}
        if len(ends) == 1 and len(self._runs) > 1:
            yield f"keys from token {min(ends)} of a document on are hidden"

    def _to_the_own(self) -> Iterator[str]:
        """Yields rules of runs that end with the token itself."""
        if any(run.end - 1 != index for index, run in self._runs.items()):
            return
        begins = {run.begin - self._first[index] for index, run in self._runs.items()}
        if len(begins) == 1 and min(begins) > 0:
            yield f"they do not see the first {min(begins)} of their document"
        widths = {run.end - run.begin for run in self._runs.values()}
        if len(widths) == 1 and min(begins) > 0 and len(self._runs) > 1:
            yield f"as with a window of {min(widths)} tokens"
