"""Request: the store that a preparation is asked for, checked before the source is read, and its digests."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longctx.data.chat import TRAIN_ON, ChatError, ChatML
from longctx.data.corpus import Corpus
from longctx.data.image_processor import PROCESSORS, ImageTokens
from longctx.data.image_sources import frames_of
from longctx.data.manifest import VERSION
from longctx.data.markup import Markup
from longctx.data.pretrained import Pretrained
from longctx.data.sampler import TRUNCATED
from longctx.data.template import Template, marks_generation, reasoning_keys
from longctx.data.tokenizer import Tokenizer, TokenizerError

TREATMENTS = ("error", "drop", *TRUNCATED)
"""What may happen to conversations that are too long."""


@dataclass(frozen=True)
class StoreRequest:
    """A store that is asked for, checked as far as possible before the source is read.

    Attributes:
        corpus: source.
        tokenizer: name as given.
        given: tokenizer; None: one is trained.
        pretrained: pretrained model that the tokenizer comes from, if any.
        templates: Jinja templates without (False) and with tools (True); None: ChatML.
        template: the templates, ready to render; None: ChatML.
        vocab_size, chat_template, train_on, max_length: as in `prepare`.
        source: fingerprint of the source.
        settings: settings in the fingerprints of request and store.
        images: writes the tokens of images; None if the source has no images.
    """

    corpus: Corpus
    tokenizer: str
    given: Tokenizer | None
    pretrained: Pretrained | None
    templates: Mapping[bool, str] | None
    template: Template | None
    vocab_size: int
    chat_template: str
    train_on: str
    max_length: int | None
    source: str
    settings: Mapping[str, Any]
    images: ImageTokens | None = None

    @property
    def start(self) -> int | None:
        """Token that the decoder of the checkpoint reads first, if it is an encoder-decoder."""
        return None if self.pretrained is None else self.pretrained.start

    @classmethod
    def of(
        cls,
        corpus: Corpus,
        tokenizer: str,
        end_of_document: str | None,
        vocab_size: int,
        chat_template: str,
        variables: Mapping[str, Any],
        train_on: str,
        max_length: int | None,
        long_documents: str,
        empty_thoughts: bool,
    ) -> "StoreRequest":
        """Checks the settings and reads the fingerprint of the source. Raises as `prepare` does."""
        if train_on not in TRAIN_ON:
            raise ChatError(f"train_on is {train_on!r}: it must be one of {', '.join(TRAIN_ON)}")
        if max_length is not None and max_length < 2:
            raise ChatError(f"max_length is {max_length}: it must be at least 2, as the first token is never a target")
        if long_documents not in TREATMENTS:
            raise ChatError(f"long_documents is {long_documents!r}: it must be one of {', '.join(TREATMENTS)}")
        ready_made, pretrained = _given_tokenizer(tokenizer, end_of_document)
        start = None if pretrained is None else pretrained.start
        wrong = ["--train-on all"] * (train_on == "all") + ["--chat-template chatml"] * (chat_template == "chatml")
        if start is not None and wrong:
            raise ChatError(
                f"{tokenizer} is an encoder-decoder, whose target is the last answer alone, without ChatML: omit "
                f"{' and '.join(wrong)}"
            )
        train_on = train_on if start is None else "last"
        templates = _with_variables(_templates(pretrained, chat_template), variables)
        settings: dict[str, Any] = {"train_on": train_on} if train_on != "assistant" else {}
        if max_length is not None:
            settings["max_length"] = max_length
            settings |= {} if long_documents == "drop" else {"long_documents": long_documents}
        settings |= {} if start is None else {"start": start}
        template = None
        if pretrained is not None:
            settings["begin"] = pretrained.begin.tolist()
            files = [(pretrained.folder / file).read_bytes() for file in pretrained.files]
            settings["files"] = [hashlib.sha256(file).hexdigest() for file in files]
        if pretrained is not None and templates is not None:
            settings["template"] = [[*item] for item in templates.items()], dict(pretrained.variables), pretrained.ends
            markup = Markup(pretrained.tokenizer.text, pretrained.tokenizer.dtype)
            in_parts = pretrained.processor in PROCESSORS
            template = Template(templates, pretrained.variables, markup, pretrained.ends, train_on, empty_thoughts, in_parts)
            if any("<think>" in text or reasoning_keys(text) for text in templates.values()):
                settings["empty_thoughts"] = empty_thoughts
        images, of_images = _images_of(corpus, tokenizer, pretrained, template)
        settings |= of_images
        late_end = template.ends_no_turn if template is not None else ready_made is None or ChatML(ready_made).ends_as_text
        settings["end"] = late_end and train_on != "all"
        return cls(
            corpus,
            tokenizer,
            ready_made,
            pretrained,
            templates,
            template,
            vocab_size,
            chat_template,
            train_on,
            max_length,
            corpus.fingerprint(),
            settings,
            images,
        )

    @property
    def digest(self) -> str:
        """Digest of the request."""
        choice = ["bpe", self.vocab_size] if self.given is None else [self.given.fingerprint, self.given.end_of_document]
        request = {"version": VERSION, "source": self.source, "tokenizer": choice, **self.settings}
        return digest(request)

    def fingerprint(self, tokenizer: Tokenizer) -> str:
        """Returns the fingerprint of the store that was made."""
        content = {"source": self.source, "tokenizer": tokenizer.fingerprint, "end_of_document": tokenizer.end_of_document}
        return digest({"version": VERSION, **content, **self.settings})

    def template_in_words(self, tokenizer: Tokenizer) -> str:
        """Describes the chat template, and how the tokens to train on were found."""
        if self.templates is None and self.start is not None:
            return "none: sources and targets as they are"
        if self.templates is None:
            reason = "" if self.chat_template == "chatml" else ", as the tokenizer has no chat template"
            if ChatML(tokenizer).matches_rendering:
                return f"ChatML{reason}"
            return f"ChatML{reason}; transformers encodes its markers differently with this tokenizer"
        name = f"from {self.tokenizer}" if self.chat_template == "auto" else self.chat_template
        if self.train_on == "all":
            return name
        marked = all(map(marks_generation, self.templates.values()))
        way = "its generation marks" if marked else "rendering with and without them"
        return f"{name}; turns to train on are found by {way}"


def digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _images_of(
    corpus: Corpus, name: str, pretrained: Pretrained | None, template: Template | None
) -> tuple[ImageTokens | None, dict[str, str]]:
    """Returns what writes the tokens of images, and a setting with a hash of their files, which are not among the source's.

    None and no setting if the source has no images. Raises UserError if it has some, and the tokenizer `name` reads none.
    """
    if pretrained is None or pretrained.processor is None:
        return None, {}  # the encoder refuses images, with the name of the record
    found = None
    for document in corpus.documents():
        if document.images and (pretrained.processor not in PROCESSORS or template is None):
            raise ChatError(
                f"{document.name} has images, but {name} has {pretrained.processor}: images need one of "
                f"{', '.join(PROCESSORS)}, and its chat template"
            )
        for image in frames_of(document.images):
            found = found or hashlib.sha256()
            found.update(b"" if isinstance(image, bytes) else hashlib.sha256(image.read_bytes()).digest())
    if found is None:
        return None, {}
    return ImageTokens(pretrained.folder, pretrained.processor, pretrained.loaded), {"images": found.hexdigest()}


def _given_tokenizer(tokenizer: str, end_of_document: str | None) -> tuple[Tokenizer | None, Pretrained | None]:
    """Returns the tokenizer (None: it must be trained) and the pretrained model that it comes from, if any."""
    if tokenizer == "bpe":
        return None, None
    if tokenizer == "bytes":
        return Tokenizer.bytes(), None
    if tokenizer.endswith(".json") or Path(tokenizer).is_file():
        return Tokenizer.load(Path(tokenizer), end_of_document), None
    pretrained = Pretrained.load(tokenizer, end_of_document)
    return pretrained.tokenizer, pretrained


def _templates(pretrained: Pretrained | None, chat_template: str) -> Mapping[bool, str] | None:
    """Returns the Jinja templates without (False) and with tools (True); None: ChatML."""
    if chat_template == "chatml" or (chat_template == "auto" and pretrained is None):
        return None
    if pretrained is None:
        raise TokenizerError(
            f"--chat-template {chat_template} needs the special tokens of a checkpoint: give its folder as --tokenizer"
        )
    if chat_template == "auto":
        return pretrained.templates
    try:
        text = Path(chat_template).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(
            f"chat template {chat_template!r} cannot be read: {error}; give auto, chatml, or the path of a Jinja template"
        ) from error
    return {False: text, True: text}


def _with_variables(templates: Mapping[bool, str] | None, variables: Mapping[str, Any]) -> Mapping[bool, str] | None:
    """Returns the templates with default values of variables, set in their first lines."""
    if not variables:
        return templates
    if not isinstance(variables, Mapping) or not all(map(str.isidentifier, variables)):
        raise TokenizerError('template_variables must be a dict of variables: {"enable_thinking": False}')
    if templates is None or templates[False] != templates[True]:
        raise TokenizerError("--template-set needs one chat template, for all conversations: give --chat-template FILE")
    first = "".join(f"{{%- set {name} = {name} if {name} is defined else {value!r} %}}\n" for name, value in variables.items())
    return {tools: first + text for tools, text in templates.items()}
