"""Roles of a document's tokens: what of a conversation each belongs to, found in its text.

Where messages begin is read from the text that the tokens make, so that it is also known of
templates that are not the tokenizer's.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

END_OF = "end of {}"
"""Role of the tokens after a message, to the first special one."""
TEMPLATE = "template"
"""Role of all other tokens that are in no message."""


class Tokenizer:
    """What is asked of a tokenizer of transformers.

    Attributes:
        given: the tokenizer.
        special: ids of special tokens.
        bos, eos, pad: ids of the begin and end of a text, and of padding, or None.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.given = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = {int(each) for each in tokenizer.all_special_ids}
        self.special |= {int(number) for number, token in added.items() if token.special}
        self.bos: int | None = tokenizer.bos_token_id
        self.eos: int | None = tokenizer.eos_token_id
        self.pad: int | None = tokenizer.pad_token_id

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens, special ones included."""
        plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.given.decode(list(ids), **plain))

    def offsets(self, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of tokens, and the begin and end of each in it. Where the text has other
        tokens, it is that of one token after another."""
        text = self.text(ids)
        if getattr(self.given, "is_fast", False):
            again = self.given(text, add_special_tokens=False, return_offsets_mapping=True)
            if list(again["input_ids"]) == list(ids):
                return text, [(begin, end) for begin, end in again["offset_mapping"]]
        text = ""
        found = []
        for token in ids:
            begin = len(text)
            text += self.text([token])
            found.append((begin, len(text)))
        return text, found


class Roles:
    """Finds roles in documents; learns from those it is shown what a template writes before
    messages."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = Counter[tuple[str, str, str]]()

    def learn(self, ids: Sequence[int], messages: Sequence[dict[str, Any]]) -> None:
        """Counts what the text of a document has before each message."""
        text, _ = self._tokenizer.offsets(ids)
        at = 0
        before = ""
        for role, content in contents_of(messages):
            begin = text.find(content, at)
            if begin < 0:
                return
            self._before[before, role, text[at:begin]] += 1
            before = role
            at = begin + len(content)

    def of(self, ids: Sequence[int], messages: Sequence[dict[str, Any]]) -> list[str]:
        """Returns the role of each token; none at all if a message is not found."""
        text, offsets = self._tokenizer.offsets(ids)
        spans = self._spans(text, messages)
        if spans is None:
            return []
        roles = [TEMPLATE] * len(ids)
        at = 0
        for number, (first, last) in enumerate(offsets):
            while at < len(spans) and spans[at][2] <= first:
                at += 1
            if at < len(spans) and spans[at][1] < last:
                roles[number] = spans[at][0]
        self._name_ends(ids, roles)
        return roles

    def _spans(
        self, text: str, messages: Sequence[dict[str, Any]]
    ) -> list[tuple[str, int, int]] | None:
        """Returns role, begin and end of every message in a text, which may end before the last
        one does."""
        found = list[tuple[str, int, int]]()
        at = 0
        before = ""
        for role, content in contents_of(messages):
            begin = self._begin(text, content, at=at, after=(before, role))
            if begin is None and self._has_all(text, at):
                return None
            if begin is None:
                break
            end = min(begin + len(content), len(text))
            found.append((role, begin, end))
            before = role
            at = end
        return found or None

    def _has_all(self, text: str, at: int) -> bool:
        """Returns whether a text goes on so long after a message that the next one is missing."""
        longest = max((len(words) for _, _, words in self._before), default=0)
        return len(text) - at > longest

    def _begin(self, text: str, content: str, *, at: int, after: tuple[str, str]) -> int | None:
        """Returns where a message begins: where templates begin it mostly, else where it is."""
        usual = [
            (count, words) for (*both, words), count in self._before.items() if tuple(both) == after
        ]
        for _, words in sorted(usual, reverse=True):
            begin = at + len(words)
            there = len(text) - begin
            rest = text[begin : begin + len(content)]
            if rest and rest == content[:there] and text[at:begin] == words:
                return begin
        begin = text.find(content, at)
        if begin < 0:
            return None
        return begin

    def _name_ends(self, ids: Sequence[int], roles: list[str]) -> None:
        """Names the tokens after each message, to the first special one."""
        for number in range(1, len(roles)):
            if roles[number] != TEMPLATE:
                continue
            before = roles[number - 1]
            is_after = before != TEMPLATE and not before.startswith(END_OF.format(""))
            goes_on = before.startswith(END_OF.format("")) and (
                ids[number - 1] not in self._tokenizer.special
            )
            if is_after:
                roles[number] = END_OF.format(before)
            elif goes_on:
                roles[number] = before


def contents_of(messages: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Returns role and text of messages that have some."""
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            texts = [part.get("text", "") for part in content if isinstance(part, dict)]
            content = "".join(texts)
        if content and content.strip():
            found.append((str(message["role"]), content.strip()))
    return found
