"""Template: renders conversations by a checkpoint's chat template (Jinja, by `transformers`) and
finds the assistant's text.

The marks of a template (`{% generation %}`) are used if it has some. Otherwise a second rendering,
with a private-use character at both ends of every text, shows where texts are, if it is the same
but for these. A turn begins where the previous messages with the generation prompt end, and ends
with what the template puts after every turn (`<|im_end|>`), or an end-of-text token. Else prefixes
decide: the renderings of the messages before a turn, and up to its end, must be prefixes of the
whole. What the template refuses to render shows nothing; a conversation that no way can split is
refused.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, takewhile
from typing import Any

from longctx.data.records.chat import (
    REASONING,
    TEXTS,
    ChatError,
    Message,
    Parts,
    check_role,
    cut,
    trained_turns,
    weighted_texts,
)
from longctx.data.records.fixed import UNPINNED, check_chance, check_places, unpinned, with_day
from longctx.data.records.left_out import left_out
from longctx.data.records.messages import leaves, parse_arguments
from longctx.data.records.tokenizer import Spans, Tokenizer

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FIRST = 0x100000
_MARKS = 6400  # private-use characters that fonts and texts hardly use
_MARK = re.compile("[\U00100000-\U001018ff]")
_QUESTION: Message = {"role": "user", "content": "user"}
_THOUGHT_BEGINS = re.compile(r"<think>\s*$")
_EMPTY_THOUGHT = re.compile(r"\s*(<think>\s*)?</think>\s*")

WAY_OUT = (
    "use a template that marks generated text with {% generation %} (--chat-template FILE), use "
    "ChatML (--chat-template chatml), or train on every token (--train-on all)"
)


def marks_generation(text: str) -> bool:
    return _GENERATION.search(text) is not None


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text of a conversation, its spans to train on (None: all of it), and names of what the
    template leaves out.

    `end`: weight of the end of the document, which has to be learnt where the template does not end
    the last turn; 0: it does. `thoughts`: number of turns before whose text the template writes an
    empty thought, which is not trained on.
    """

    text: str
    spans: Spans | None
    left_out: Collection[str] = ()
    end: float = 0.0
    thoughts: int = 0


@dataclass(frozen=True)
class _Found:
    """Spans of a text to train on, with weights; `end` and `empty_thoughts` as in `Rendered`."""

    spans: list[tuple[int, int, float]]
    end: float
    empty_thoughts: int


class Template:
    """Renders conversations as texts.

    Args:
        texts: Jinja templates of conversations without tools (False) and with tools (True).
        variables: variables of the templates besides messages and tools: the special tokens by
            role.
        tokenizer: distinguishes special tokens from text.
        ends: special tokens that may end a turn, besides the templates' own.
        empty_thoughts: whether an empty <think> block that the template writes before an answer is
            trained on.
        date: day that a template gets that asks for it; None: such conversations are refused.

    Raises TemplateError for a template that draws by chance.
    """

    def __init__(
        self,
        texts: Mapping[bool, str],
        variables: Mapping[str, Any],
        tokenizer: Tokenizer,
        ends: Sequence[str] = (),
        train_on: str = "assistant",
        empty_thoughts: bool = False,
        date: str | None = None,
    ) -> None:
        self._texts = {tools: with_day(text, date) for tools, text in texts.items()}
        self._variables = dict(variables)
        for text in texts.values():
            check_chance(text, _environment())
        self._tokenizer = tokenizer
        self._ends = ends
        self._train_on = train_on
        self._empty_thoughts = empty_thoughts
        self._takes_text: dict[bool, bool] = {}
        self._prompts: dict[tuple[str, bool, bool], str] = {}
        self._reads_texts = True
        self._reads_lists = False  # so that the probes stay as they are
        self._reads_texts, self._reads_lists = (
            self._shows("probe"),
            self._shows([{"type": "text", "text": "probe"}]),
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None,
        first_trained: int = 0,
        message_weights: Mapping[int, float] | None = None,
    ) -> Rendered:
        """Renders a conversation and finds its spans to train on: none before message
        `first_trained`, nor of weight 0.

        Raises ChatError if the template refuses the conversation, leaves an answer empty, or does
        not show where turns begin and end.
        """
        for index, message in enumerate(messages):
            check_role(index, message["role"], self._texts[bool(tools)])
        given = message_weights or {}
        turns = trained_turns(messages, first_trained, self._train_on, given)
        weights = [given.get(turn, 1.0) for turn in turns]
        messages = self._with_arguments(messages, bool(tools))
        marks = self._train_on != "all" and marks_generation(self._texts[bool(tools)])
        text, generated = self._render(messages, tools, marks=marks)
        check_places(text, leaves([list(messages), tools]))
        missing = left_out(text, messages, tools=tools, trained=turns, by="the chat template")
        if self._train_on == "all":
            return Rendered(text, None, missing)
        if not marks:
            found = self._found(text, messages, tools, turns=turns, weights=weights)
            spans = self._by_parts(found.spans, text, messages=messages, tools=tools, turns=turns)
            return Rendered(
                text, spans, left_out=missing, end=found.end, thoughts=found.empty_thoughts
            )
        spans = [(start, stop, 1.0) for start, stop in sorted(generated) if start < stop]
        answers = sum(message["role"] == "assistant" for message in messages)
        if given or len(turns) < answers:
            whole = self._turns(text, messages, tools, turns)
            spans = _of_turns(spans, whole, weights)
        if not spans:
            raise ChatError(
                "the template marks nothing of this conversation as generated, so there is "
                "nothing to train on: remove the conversation, or correct the template"
            )
        spans = self._by_parts(spans, text, messages=messages, tools=tools, turns=turns)
        return Rendered(text, spans, missing)

    def _found(
        self,
        text: str,
        messages: Sequence[Message],
        tools: list[Any] | None,
        *,
        turns: Sequence[int],
        weights: Sequence[float],
    ) -> "_Found":
        """Returns what is trained on where the template does not mark it: the turns, without empty
        thoughts, and the end of the text where the template does not end the last turn."""
        whole = self._turns(text, messages, tools, turns)
        learned = whole
        if not self._empty_thoughts:
            learned = [
                (_after_thought(text, start, stop, message=messages[turn]), stop)
                for turn, (start, stop) in zip(turns, whole, strict=True)
            ]
        thoughts = sum(before != after for before, after in zip(whole, learned, strict=True))
        start, stop = learned[-1]
        last_piece = self._tokenizer.pieces(text.rstrip())[-1]
        ends = bool(text[stop:].strip() or self._tokenizer.special_tokens(last_piece))
        end = 0.0
        if not ends and self.ends_no_turn:
            learned = [*learned[:-1], (start, len(text))]
            end = weights[-1]
        spans = [
            (start, stop, weight) for (start, stop), weight in zip(learned, weights, strict=True)
        ]
        return _Found(spans, end, empty_thoughts=thoughts)

    # --- rendering

    def _with_arguments(self, messages: Sequence[Message], tools: bool) -> Sequence[Message]:
        """Returns the messages with arguments of tool calls that are texts as objects, if the
        template does not write texts."""
        if not any(
            isinstance(call["function"]["arguments"], str)
            for m in messages
            for call in m.get("tool_calls", ())
        ):
            return messages
        if tools not in self._takes_text:
            text = '{"probe": 1}'
            function = {"name": "probe", "description": "", "parameters": {}}
            tool = {"type": "function", "function": function}
            call = {**tool, "id": "abcdefghi", "function": {**function, "arguments": text}}
            probe = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
            self._takes_text[tools] = False
            with suppress(ChatError):
                self._takes_text[tools] = text in self._text(probe, [tool] * tools or None)
        if self._takes_text[tools]:
            return messages

        def parsed(call: dict[str, Any]) -> dict[str, Any]:
            arguments = parse_arguments("a tool call", call["function"]["arguments"])
            return {**call, "function": {**call["function"], "arguments": arguments}}

        return [
            {**m, "tool_calls": [*map(parsed, m["tool_calls"])]} if "tool_calls" in m else m
            for m in messages
        ]

    def _render(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None,
        prompt: bool = False,
        marks: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils import chat_template_utils

        messages = [*map(self._as_read, messages)]
        compiled = getattr(chat_template_utils, "_compile_jinja_template", None)
        try:
            if (
                compiled
                and not marks
                and not any(key in message for message in messages for key in REASONING)
            ):
                # As render_jinja_template, for messages without reasoning, but without copying
                # everything: half the time.
                template = compiled(self._texts[bool(tools)])
                variables = {
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": prompt,
                }
                text = template.render(**{**variables, **self._variables})
                spans = []
            else:
                (text,), spans = chat_template_utils.render_jinja_template(
                    conversations=[list(messages)],
                    tools=tools,
                    chat_template=self._texts[bool(tools)],
                    return_assistant_tokens_mask=marks,
                    add_generation_prompt=prompt,
                    **self._variables,
                )
        except Exception as error:  # a template's expressions may raise anything
            if UNPINNED in str(error):
                raise unpinned() from error
            raise ChatError(
                f"the chat template refuses this conversation: {type(error).__name__}: {error}; "
                "correct or remove the conversation, or use another template (--chat-template "
                "FILE)"
            ) from error
        return text, spans[0] if marks else []

    def _as_read(self, message: Message) -> Message:
        """Returns the message with its content in the form in which it is given, or in the other if
        the template reads that."""
        if reasoning := next(filter(None, map(message.get, REASONING)), None):
            message = {"reasoning": reasoning, **message}  # transformers fills in the other keys
        content = message.get("content")
        if (
            content is None
            or not self._reads_lists
            or (self._reads_texts and not isinstance(content, Parts))
        ):
            return message
        return {
            **message,
            "content": content.parts
            if isinstance(content, Parts)
            else [{"type": "text", "text": content}],
        }

    def _shows(self, content: Any) -> bool:
        """Returns whether the template shows the words of a content of this form, and does not
        print a list as it is."""
        with suppress(ChatError):
            text = self._text([{**_QUESTION, "content": content}], None)
            return "probe" in text and not re.search(r"""['"]type['"]""", text)
        return False

    def _text(
        self, messages: Sequence[Message], tools: list[Any] | None, prompt: bool = False
    ) -> str:
        return self._render(messages, tools, prompt)[0]

    # --- turns

    def _turns(
        self, whole: str, messages: Sequence[Message], tools: list[Any] | None, turns: Sequence[int]
    ) -> list[tuple[int, int]]:
        spans = self._between_marks(whole, messages, tools, turns)
        spans = spans or self._between_marks(whole, messages, tools, turns, empty=False)
        return spans or [self._between_prefixes(whole, messages, tools, turn) for turn in turns]

    def _between_marks(
        self,
        whole: str,
        messages: Sequence[Message],
        tools: list[Any] | None,
        turns: Sequence[int],
        *,
        empty: bool = True,
    ) -> list[tuple[int, int]] | None:
        """Returns the spans of the turns by a rendering with private-use characters; None if it
        does not show them."""
        if not whole.isascii() and _MARK.search(whole):
            return None
        try:
            rendered = self._text(
                [_marked(message, number, empty) for number, message in enumerate(messages)], tools
            )
        except ChatError:
            return None
        texts = _MARK.split(rendered)
        if "".join(texts) != whole:
            return None
        owners = [ord(mark) - _FIRST for mark in _MARK.findall(rendered)]
        # Mark k is before character places[k], after texts[k].
        places = list(accumulate(map(len, texts)))
        first = {owner: mark for mark, owner in reversed([*enumerate(owners)])}
        last = {owner: mark for mark, owner in enumerate(owners)}
        spans = []
        for turn in turns:
            owner = turn % _MARKS
            if owner not in first or set(owners[first[owner] : last[owner]]) > {owner}:
                return None
            before = texts[first[owner]]
            after = texts[last[owner] + 1]
            head = self._head(before, messages, tools, turn)
            tail = self._tail(after)
            if not tail and not self._stop and "tool_calls" in messages[turn]:
                return None  # the template closes a tool call by text that no end of turn follows
            if head is None or tail is None:
                return None
            content = messages[turn].get("content", "")
            ends = self._tokenizer.special_tokens(after)
            if not tail and ends and last[owner] + 2 == len(texts):  # only the last turn ends
                tail = after.index(ends[0]) + len(ends[0])
            elif not tail and after.startswith(own := content[len(content.rstrip()) :]):
                tail = len(own)
            spans.append((places[first[owner]] - len(before) + head, places[last[owner]] + tail))
        return spans

    def _head(
        self, before: str, messages: Sequence[Message], tools: list[Any] | None, turn: int
    ) -> int | None:
        """Returns the length of the template's text before a turn that is not generated."""
        previous = messages[turn - 1] if turn else {"role": ""}
        key = previous["role"], "tool_calls" in previous, bool(tools)
        if key in self._prompts and before.startswith(self._prompts[key]):
            return len(self._prompts[key])
        if turn:
            # The template may refuse these messages alone, or a prompt after them.
            with suppress(ChatError):
                marked = [
                    _marked(message, number) for number, message in enumerate(messages[:turn])
                ]
                prompt = _MARK.split(self._text(marked, tools, prompt=True))[-1]
                if before.startswith(prompt):
                    if prompt.strip():  # not what the previous message may end with
                        self._prompts[key] = prompt
                    return len(prompt)
                if prompt.startswith(before):
                    return len(before)  # the prompt may add text that a finished turn lacks
                for part in (prompt.rstrip(), _THOUGHT_BEGINS.sub("", prompt)):
                    if before.startswith(part):
                        return len(part)
        prompt = self._generation_prompt
        if prompt and prompt in before:
            return before.rfind(prompt) + len(prompt)
        if any(before.endswith(prompt[:length]) for length in range(1, len(prompt))):
            return len(before)
        if previous["role"] == "assistant":
            return self._tail(before)
        return None

    def _tail(self, after: str) -> int | None:
        """Returns the length of the template's text after a turn that is generated."""
        if self._stop and self._stop in after:
            return after.index(self._stop) + len(self._stop)
        none = 0 if self._stop == "" else None
        return min(
            (after.index(end) + len(end) for end in self._ends if end in after), default=none
        )

    # --- parts

    def _by_parts(
        self,
        spans: list[tuple[int, int, float]],
        whole: str,
        messages: Sequence[Message],
        tools: list[Any] | None,
        turns: Sequence[int],
    ) -> list[tuple[int, int, float]]:
        """Returns the spans, cut where parts of the turns' texts have weights of their own; spans
        of weight 0 are left out."""
        for turn in turns:
            if weighted_texts(messages[turn]):
                spans = cut(spans, self._parts(whole, messages, tools, turn))
        return spans

    def _parts(
        self, whole: str, messages: Sequence[Message], tools: list[Any] | None, turn: int
    ) -> Spans:
        """Returns the spans of the parts of a turn's texts that have a weight of their own, in
        order.

        A rendering with a private-use character of its own at both ends of each part shows them, if
        it is the same but for these. White space that the template keeps belongs to its part.
        Raises ChatError if it does not show them.
        """
        unclear = ChatError(
            f"message {turn} has parts with a loss of their own, but the chat template does not "
            "show where each begins and ends: write the parts as messages of their own, or use "
            "another template (--chat-template FILE or chatml)"
        )
        if _MARK.search(whole):
            raise unclear
        texts = weighted_texts(messages[turn])
        parts = [
            (part["text"], weight)
            for text in texts.values()
            for part, weight in zip(text.parts, text.weights, strict=True)
        ]
        if len(parts) > _MARKS:
            raise unclear
        numbers = iter(range(len(parts)))
        marked = {key: _marked_parts(text, numbers) for key, text in texts.items()}
        copies = [*messages[:turn], {**messages[turn], **marked}, *messages[turn + 1 :]]
        rendered = self._text(copies, tools)
        pieces = _MARK.split(rendered)
        if "".join(pieces) != whole:
            raise unclear
        owners = [ord(mark) - _FIRST for mark in _MARK.findall(rendered)]
        places = list(accumulate(map(len, pieces)))
        found = []
        for number, (text, weight) in enumerate(parts):
            own = [place for place, owner in zip(places, owners, strict=False) if owner == number]
            if not own:
                continue  # the template leaves it out
            if len(own) != (2 if text.strip() else 1):
                raise unclear
            if weight != 1:
                found.append((*_with_space(whole, text, own[0], own[-1]), weight))
        return sorted(found)

    @property
    def ends_no_turn(self) -> bool:
        """Whether no text of the template ends every turn: only the last one ends, or none."""
        return self._stop == "" and not any(map(marks_generation, self._texts.values()))

    @cached_property
    def _generation_prompt(self) -> str:
        with suppress(ChatError):
            without, prompt = (
                self._text([_QUESTION], None, prompt=asked) for asked in (False, True)
            )
            if prompt.startswith(without):
                return prompt.removeprefix(without)
            return ""
        return ""

    @cached_property
    def _stop(self) -> str | None:
        """Text that ends a turn: the common start of the texts after the last turn and after one in
        the middle, stripped.

        None if the template refuses the conversations that would show it.
        """
        with suppress(ChatError):
            answered = [_QUESTION, {"role": "assistant", "content": "assistant"}]
            after = [
                self._after_answer(messages) for messages in (answered, [*answered, _QUESTION])
            ]
            shared = sum(
                1 for _ in takewhile(lambda parts: parts[0] == parts[1], zip(*after, strict=False))
            )
            return "".join(after[0][:shared]).rstrip()
        return None

    def _after_answer(self, messages: Sequence[Message]) -> list[str]:
        """Returns the template's text after the second message, in parts: special tokens and
        characters."""
        rendered = self._text(
            [_marked(message, number) for number, message in enumerate(messages)], None
        )
        owners = _MARK.findall(rendered)
        mark = chr(_FIRST + 1)
        if mark not in owners:
            raise ChatError("the chat template omits messages")
        text = _MARK.split(rendered)[len(owners) - owners[::-1].index(mark)]
        special = self._tokenizer.special_tokens
        return [
            part
            for piece in self._tokenizer.pieces(text)
            for part in ([piece] if special(piece) else piece)
        ]

    def _between_prefixes(
        self, whole: str, messages: Sequence[Message], tools: list[Any] | None, turn: int
    ) -> tuple[int, int]:
        """Returns the span of a turn by the renderings of the messages before it and up to its end.

        Raises ChatError if these are not prefixes of the whole.
        """
        if turn == 0:
            raise ChatError(
                "the chat template does not show where the first message, the assistant's, "
                f"begins: remove it, {WAY_OUT}"
            )
        try:
            prompt = self._text(messages[:turn], tools, prompt=True)
            full = whole if turn == len(messages) - 1 else self._text(messages[: turn + 1], tools)
        except ChatError as error:
            raise ChatError(
                f"the chat template does not show where the assistant's turn (message {turn}) "
                "begins and ends, as it refuses the messages up to there alone "
                f"({error.__cause__}): {WAY_OUT}"
            ) from error
        if not (whole.startswith(full) and full.startswith(prompt)):
            if not whole.startswith(prompt):
                where = "the messages before it"
            else:
                where = "the messages up to its end"
            raise ChatError(
                f"the chat template does not show where the assistant's turn (message {turn}) "
                f"begins and ends, as it renders {where} differently when more messages follow: "
                f"{WAY_OUT}"
            )
        text = full.rstrip()  # white space after the end-of-turn token is not generated
        ends = len(text) > len(prompt) and self._tokenizer.special_tokens(
            self._tokenizer.pieces(text)[-1]
        )
        return len(prompt), len(text) if ends else len(full)


def _environment() -> Any:
    """Returns the environment of Jinja in which transformers renders."""
    import jinja2
    from transformers.utils import chat_template_utils

    compiled = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compiled:
        return compiled("").environment
    return jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])


def _of_turns(
    spans: Spans, turns: Sequence[tuple[int, int]], weights: Sequence[float]
) -> list[tuple[int, int, float]]:
    """Returns the spans that overlap a turn, with the weight of the first one; the others are of
    turns that are not trained on."""
    kept = []
    for start, stop, _ in spans:
        for (turn_start, turn_stop), weight in zip(turns, weights, strict=True):
            if start < turn_stop and turn_start < stop:
                kept.append((start, stop, weight))
                break
    return kept


def _after_thought(text: str, start: int, stop: int, message: Message) -> int:
    """Returns where a turn begins after an empty thought that is not the message's own."""
    block = _EMPTY_THOUGHT.match(text, start, stop)
    own = _EMPTY_THOUGHT.match(message.get("content", ""))
    if block and not own:
        return block.end()
    return start


def _with_space(whole: str, text: str, start: int, stop: int) -> tuple[int, int]:
    """Returns the span of a part, from its first to its last visible character, with the part's
    white space around it."""
    head = text[: len(text) - len(text.lstrip())] if text.strip() else ""
    tail = text[len(text.rstrip()) :] if text.strip() else text
    while head and not whole.endswith(head, 0, start):
        head = head[1:]
    while tail and not whole.startswith(tail, stop):
        tail = tail[:-1]
    return start - len(head), stop + len(tail)


def _marked_parts(text: Parts, numbers: Iterator[int]) -> Parts:
    """Returns a text with a private-use character of its own, the next of the numbers, at both ends
    of each part."""
    return Parts.of(
        [
            {**part, "text": _wrapped(part["text"], chr(_FIRST + next(numbers)))}
            for part in text.parts
        ]
    )


def _wrapped(value: str, mark: str) -> str:
    """Returns a text with a mark before its first and after its last visible character; one mark if
    it has none."""
    text = value.strip()
    if not text:
        return mark + value
    head = len(value) - len(value.lstrip())
    return f"{value[:head]}{mark}{text}{mark}{value[head + len(text) :]}"


def _marked(message: Message, number: int, empty: bool = True) -> Message:
    """Returns the message with private-use character `number` at both ends of every text that a
    template may write.

    If not `empty`, there is none for an empty content before tool calls, as templates look whether
    there is a content.
    """
    mark = chr(_FIRST + number % _MARKS)

    def wrap(value: Any) -> Any:
        if isinstance(value, Parts):
            return Parts.of([{**part, "text": wrap(part["text"])} for part in value.parts])
        if isinstance(value, str):
            return _wrapped(value, mark)
        if isinstance(value, dict):
            return {key: wrap(part) for key, part in value.items()}
        if isinstance(value, list):
            return [wrap(part) for part in value]
        return value

    always = "content" if empty or "tool_calls" not in message else None
    copy = {
        **message,
        **{
            key: wrap(message[key])
            for key in TEXTS
            if key in message and (message[key] or key == always)
        },
    }
    if "tool_calls" in message:
        copy["tool_calls"] = [
            {**call, "function": {key: wrap(part) for key, part in call["function"].items()}}
            for call in message["tool_calls"]
        ]
    return copy
