"""Request: the store that a preparation is asked for, checked before the source is read, and its
digest."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from longctx.arguments import (
    Rule,
    a_path,
    anything,
    check_arguments,
    flag,
    kind,
    mapping_of,
    or_none,
    whole,
)
from longctx.data import TRUNCATED
from longctx.data.records.chat import TRAIN_ON, ChatError, ChatML
from longctx.data.records.corpus import Corpus
from longctx.data.records.fixed import ASKS_THE_DAY, TemplateError, check_tokenizer, parsed_date
from longctx.data.records.pretrained import Pretrained
from longctx.data.records.template import Template, marks_generation
from longctx.data.records.tokenizer import END_OF_DOCUMENT, Tokenizer, TokenizerError
from longctx.paths import expanded

TREATMENTS = ("error", "drop", *TRUNCATED)
"""What may happen to conversations that are too long."""


_TEXT = kind("a text", str)
RULES: dict[str, Rule] = {
    "source": kind("a Corpus of open_corpus", Corpus),
    "tokenizer": a_path,
    "vocab_size": whole(least=1),
    "end_of_document": or_none(_TEXT),
    "chat_template": a_path,
    "template_variables": or_none(
        mapping_of("variables of the chat template", anything, keys=_TEXT)
    ),
    "max_length": or_none(whole(least=1)),
    "empty_thoughts": flag,
    "special_as_text": flag,
}


@dataclass(frozen=True)
class StoreRequest:
    """A store that is asked for, checked as far as possible before the source is read. Raises as
    `prepare` does.

    Attributes:
        tokenizer: `bpe` (trained on the corpus), `bytes`, a tokenizer.json, or a checkpoint's
            folder or name on the hub.
        vocab_size: maximum vocabulary size of a trained tokenizer.
        end_of_document: token that ends a document; None: the checkpoint's, or a well-known one of
            a given tokenizer.json.
        chat_template: `auto` (the checkpoint's, or ChatML if it has none), `chatml`, or the path of
            a Jinja template.
        template_variables: defaults of variables of the template, such as {"enable_thinking":
            False}, also in exports.
        train_on: parts of conversations to train on: the turns of the `assistant`, the `last` of
            them, or `all` tokens.
        max_length: maximum tokens of a conversation, or of token ids with a mask; texts, which
            training splits, are kept.
        long_documents: what happens to longer ones: `error`, `drop`, `truncate_left` (keeps the
            end) or `truncate_right`.
        empty_thoughts: train on an empty <think> block that the template writes before an answer.
        date: day of the conversations, YEAR-MONTH-DAY, for templates that ask for the day; None:
            these are refused.
        special_as_text: special tokens in texts and messages are characters; a template's
            conversations with some are refused.
    """

    source: Corpus
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    end_of_document: str | None = None
    chat_template: str = "auto"
    template_variables: Mapping[str, Any] | None = None
    train_on: str = "assistant"
    max_length: int | None = None
    long_documents: str = "error"
    empty_thoughts: bool = False
    special_as_text: bool = False
    date: str | None = None

    def __post_init__(self) -> None:
        check_arguments(ChatError, RULES, vars(self))
        for name in ("tokenizer", "chat_template"):
            object.__setattr__(self, name, expanded(getattr(self, name)))
        if self.train_on not in TRAIN_ON:
            raise ChatError(
                f"train_on is {self.train_on!r}: it must be one of {', '.join(TRAIN_ON)}"
            )
        if self.max_length is not None and self.max_length < 2:
            raise ChatError(
                f"max_length is {self.max_length}: it must be at least 2, as the first token is "
                "never a target"
            )
        if self.long_documents not in TREATMENTS:
            raise ChatError(
                f"long_documents is {self.long_documents!r}: it must be one of "
                f"{', '.join(TREATMENTS)}"
            )
        if self.date is not None:
            parsed_date(self.date)
            if not any(ASKS_THE_DAY in text for text in (self.templates or {}).values()):
                raise TemplateError(
                    f"the date is {self.date}, but the chat template asks for no day: omit it "
                    "(--date)"
                )

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a pickle has: nothing that was loaded."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def pretrained(self) -> Pretrained | None:
        """Pretrained model that the tokenizer comes from, if any."""
        made = (
            self.tokenizer in ("bpe", "bytes")
            or self.tokenizer.endswith(".json")
            or Path(self.tokenizer).is_file()
        )
        if made:
            return None
        return Pretrained.load(self.tokenizer, self.end_of_document)

    @cached_property
    def given(self) -> Tokenizer | None:
        """Tokenizer; None: one is trained."""
        if self.tokenizer in ("bpe", "bytes"):
            if self.tokenizer == "bytes":
                return Tokenizer.bytes()
            return None
        known = self.pretrained
        if known is None:
            given = Tokenizer.load(Path(self.tokenizer), self.end_of_document)
        else:
            given = known.tokenizer
        check_tokenizer(given)
        return given

    @cached_property
    def corpus(self) -> Corpus:
        """The source, whose plain text files are split where a document ends, unless that token is
        text, or may end turns."""
        ends_turns = self.pretrained is not None and self.pretrained.templates is not None
        own = () if self.given is None or ends_turns else (self.given.end_of_document_token,)
        if self.special_as_text:
            return self.source
        return replace(self.source, ends=(*own, END_OF_DOCUMENT))

    @cached_property
    def templates(self) -> Mapping[bool, str] | None:
        """Jinja templates without (False) and with tools (True); None: ChatML."""
        return _with_variables(
            _templates(self.pretrained, self.chat_template), self.template_variables
        )

    @cached_property
    def template(self) -> Template | None:
        """The templates, ready to render; None: ChatML."""
        known = self.pretrained
        if known is None or self.templates is None:
            return None
        return Template(
            self.templates,
            known.variables,
            tokenizer=known.tokenizer,
            ends=known.ends,
            train_on=self.train_on,
            empty_thoughts=self.empty_thoughts,
            date=self.date,
        )

    @cached_property
    def _content(self) -> dict[str, Any]:
        """What the tokens depend on, besides source and tokenizer."""
        names = ("train_on", "max_length", "long_documents", "empty_thoughts", "special_as_text")
        content: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.date is not None:
            content["date"] = self.date
        if self.pretrained is not None:
            files = [(self.pretrained.folder / file).read_bytes() for file in self.pretrained.files]
            content["begin"] = self.pretrained.begin.tolist()
            content["files"] = [hashlib.sha256(file).hexdigest() for file in files]
            if self.templates is not None:
                content["template"] = (
                    [*self.templates.items()],
                    dict(self.pretrained.variables),
                    self.pretrained.ends,
                )
        return content

    def digest(self, source: str) -> str:
        """Returns the hash of everything that decides the content of the store, with what is said
        of the source: its fingerprint, or its `listing`."""
        if self.given is None:
            choice = ["bpe", self.vocab_size]
        else:
            choice = [self.given.fingerprint, self.given.end_of_document]
        return _digest({"tokenizer": choice, "source": source, **self._content})

    def fingerprint(self, tokenizer: Tokenizer, source: str) -> str:
        """Returns the hash of the tokens, with the fingerprint of the source."""
        own = {"tokenizer": tokenizer.fingerprint, "end_of_document": tokenizer.end_of_document}
        return _digest({**own, "source": source, **self._content})

    def template_in_words(self, tokenizer: Tokenizer) -> str:
        """Describes the chat template, and how the tokens to train on were found."""
        if self.templates is None:
            if self.chat_template == "chatml":
                reason = ""
            else:
                reason = ", as the tokenizer has no chat template"
            if ChatML(tokenizer).matches_rendering:
                return f"ChatML{reason}"
            return (
                f"ChatML{reason}; transformers encodes its markers differently with this tokenizer"
            )
        name = f"from {self.tokenizer}" if self.chat_template == "auto" else self.chat_template
        if self.date is not None:
            name += f", on {self.date}"
        if self.train_on == "all":
            return name
        marked = all(map(marks_generation, self.templates.values()))
        way = "its generation marks" if marked else "rendering with and without them"
        return f"{name}; turns to train on are found by {way}"


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _templates(pretrained: Pretrained | None, chat_template: str) -> Mapping[bool, str] | None:
    """Returns the Jinja templates without (False) and with tools (True); None: ChatML."""
    if chat_template == "chatml" or (chat_template == "auto" and pretrained is None):
        return None
    if pretrained is None:
        raise TokenizerError(
            f"--chat-template {chat_template} needs the special tokens of a checkpoint: give its "
            "folder as --tokenizer"
        )
    if chat_template == "auto":
        return pretrained.templates
    try:
        text = Path(chat_template).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(
            f"chat template {chat_template!r} cannot be read: {error}; give auto, chatml, or the "
            "path of a Jinja template"
        ) from error
    return {False: text, True: text}


def _with_variables(
    templates: Mapping[bool, str] | None, variables: Mapping[str, Any] | None
) -> Mapping[bool, str] | None:
    """Returns the templates with default values of variables, set in their first lines."""
    if not variables:
        return templates
    if not isinstance(variables, Mapping) or not all(map(str.isidentifier, variables)):
        raise TokenizerError(
            'template_variables must be a dict of variables: {"enable_thinking": False}'
        )
    if templates is None or templates[False] != templates[True]:
        raise TokenizerError(
            "--template-set needs one chat template, for all conversations: give --chat-template "
            "FILE"
        )
    first = "".join(
        f"{{%- set {name} = {name} if {name} is defined else {value!r} %}}\n"
        for name, value in variables.items()
    )
    return {tools: first + text for tools, text in templates.items()}
