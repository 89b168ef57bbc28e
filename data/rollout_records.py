"""Rollout records: reads rollouts from the records of files, and tokenizes those that are not token ids.

A record is one completion, or all completions of one prompt:

    {"prompt": .., "completion": .., "reward": 1.0, "group": 7}
    {"prompt": .., "completions": [.., ..], "rewards": [1.0, 0.0]}

`group` (a number or a text) names rollouts that are compared with each other; otherwise those of a record are, and of records
of one completion those with equal prompts. Optional are `advantage` (a number, or one for each token), `mask`, `old_logps`,
`reference_logps` and `sampler_logps` (see `Rollouts`), for all rollouts or for none; a record of several completions has
lists of them, named `advantages`, `masks` and so on. `ALIASES` are accepted too.

Prompt and completion are both token ids, or both texts, or both lists of messages. Only token ids are exactly what was sampled,
and only they can have numbers for each token. Special tokens in texts count as such, and the end of the document is appended to
a completion without it. Of messages, the checkpoint's chat template makes a text: what the assistant wrote after the prompt is
learned, the rest (`tool` and `user` messages) is masked.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longctx.data.chat import ChatError
from longctx.data.corpus import Corpus
from longctx.data.encode import EncodedDocument, Encoder
from longctx.data.formats import parse_record
from longctx.data.markup import Markup
from longctx.data.messages import FormatError
from longctx.data.pretrained import Pretrained
from longctx.data.readers import CorpusError, Record
from longctx.data.rollouts import RolloutError, Rollouts
from longctx.data.template import Template
from longctx.data.tokenizer import TokenArray, Tokenizer, TokenizerError

OF_TOKENS = ("old_logps", "reference_logps", "sampler_logps")
LISTS = {"rewards": "reward", "advantages": "advantage", "masks": "mask"} | {key: key for key in OF_TOKENS}
"""Keys beside several completions, and what they are called beside one."""
ALIASES = {
    **dict.fromkeys(("prompt_ids", "prompt_token_ids"), "prompt"),
    **dict.fromkeys(("completion_ids", "response", "response_ids"), "completion"),
    **dict.fromkeys(("old_per_token_logps", "old_log_probs"), "old_logps"),
    **dict.fromkeys(("ref_per_token_logps", "ref_log_prob", "ref_logps"), "reference_logps"),
    **dict.fromkeys(("logprobs", "sampling_per_token_logps", "rollout_log_probs"), "sampler_logps"),
    **dict.fromkeys(("completion_mask", "response_mask"), "mask"),
}
"""Names of TRL, verl and vLLM, and ours."""
KEYS = {"prompt", "completion", "completions", "group", "tools", *LISTS, *LISTS.values()}
EXACT = "give token ids, as a text is tokenized again"


class _Rollout(NamedTuple):
    """A rollout before its tokens are known; `numbers` are what `LISTS` names, by the names of one completion."""

    where: str
    group: tuple[str, Any]
    prompt: Any
    completion: Any
    tools: Any
    numbers: dict[str, Any]


@dataclass(frozen=True)
class FileRollouts:
    """All rollouts of a source.

    Attributes:
        rollouts: the rollouts.
        names: place of each in the source.
        unused: number of records with each key that is not used.
    """

    rollouts: Rollouts
    names: list[str]
    unused: dict[str, int]


@dataclass(frozen=True)
class RolloutReader:
    """Reads rollouts. `begin`: tokens put before a prompt that is a text; `template`: None refuses messages."""

    tokenizer: Tokenizer
    begin: TokenArray = field(default_factory=lambda: np.zeros(0, np.int64))
    template: Template | None = None

    @classmethod
    def of_checkpoint(cls, name: str) -> "RolloutReader":
        """Makes a reader with the tokenizer and chat template of a checkpoint. Raises TokenizerError."""
        loaded = Pretrained.load(name)
        markup, template = Markup(loaded.tokenizer.text, loaded.tokenizer.dtype), None
        if loaded.templates is not None:
            template = Template(loaded.templates, loaded.variables, markup, loaded.ends)
        return cls(loaded.tokenizer, loaded.begin, template)

    def read(self, corpus: Corpus) -> FileRollouts:
        """Reads all rollouts of a source. Raises UserError naming the place, the key and the rule."""
        unused = Counter[str]()
        each = [rollout for record in corpus.records(_columns) for rollout in _parse(record, unused)]
        if not each:
            raise CorpusError(f"{corpus.source} has no rollouts: give at least one record with a prompt and completions")
        for key in dict.fromkeys(LISTS.values()):
            having = [key in rollout.numbers for rollout in each]
            if any(having) and not all(having):
                places = each[having.index(False)].where, each[having.index(True)].where
                raise CorpusError(f"{places[0]} has no `{key}`, but {places[1]} has: give it for all rollouts, or for none")
        groups: dict[tuple[str, Any], int] = {}
        tokens = self._tokens(each)
        numbers = {key: [rollout.numbers[key] for rollout in each] for key in each[0].numbers}
        masks = [mask for _, _, mask in tokens]
        if any(mask is not None for mask in masks):  # of messages; masks beside token ids stay
            whole = numbers.get("mask") or [np.ones(len(completion), np.bool_) for _, completion, _ in tokens]
            numbers["mask"] = [given if mask is None else mask for mask, given in zip(masks, whole, strict=True)]
        names = [rollout.where for rollout in each]
        try:
            rollouts = Rollouts(
                [prompt for prompt, _, _ in tokens],
                [completion for _, completion, _ in tokens],
                groups=[groups.setdefault(rollout.group, len(groups)) for rollout in each],
                **{plural: numbers.get(key) for plural, key in LISTS.items()},
            )
        except RolloutError as error:
            raise error.naming(names) from error
        return FileRollouts(rollouts, names, dict(unused))

    def _tokens(self, each: list[_Rollout]) -> list[tuple[Any, Any, Any]]:
        """Returns the tokens of prompts and completions, and the masks of those that are messages."""
        conversations = [rollout for rollout in each if _kind(rollout) == "messages"]
        rendered = iter(self._rendered(conversations) if conversations else ())
        texts: dict[str, Any] = {}  # many completions have the same prompt
        tokens = list[tuple[Any, Any, Any]]()
        for rollout in each:
            kind = _kind(rollout)
            if kind == "messages":
                row = next(rendered)
                assert row.trained is not None
                learned = np.flatnonzero(row.trained)
                first, stop = learned[0], learned[-1] + 1
                tokens.append((row.tokens[:first], row.tokens[first:stop], row.trained[first:stop]))
            elif kind == "texts":
                if rollout.prompt not in texts:
                    texts[rollout.prompt] = self._encoded(rollout.where, rollout.prompt, prompt=True)
                completion = self._encoded(rollout.where, rollout.completion, prompt=False)
                tokens.append((texts[rollout.prompt], completion, None))
            else:
                tokens.append((self._ids(rollout, "prompt"), self._ids(rollout, "completion"), None))
        return tokens

    def _rendered(self, conversations: list[_Rollout]) -> list[EncodedDocument]:
        if self.template is None:
            raise CorpusError(
                f"{conversations[0].where}: prompt and completion are messages, but no checkpoint gives a chat template: "
                "give token ids or texts, or model.from_pretrained with a template and no data.tokenizer"
            )
        encoder = Encoder(self.tokenizer, self.begin, self.template, self.template.markup)
        documents = []
        for rollout in conversations:
            record = {"prompt": rollout.prompt, "completion": rollout.completion, "tools": rollout.tools}
            try:
                documents += parse_record(record, rollout.where, 0, None)
            except (FormatError, ChatError) as error:
                raise CorpusError(f"{rollout.where}: {error}") from error
        return encoder.encode(documents, encoder.render(documents))[0]

    def _encoded(self, where: str, text: str, *, prompt: bool) -> Any:
        try:
            tokens = self.tokenizer.encode_markup(text).astype(np.int64)
        except (TokenizerError, UnicodeEncodeError) as error:
            raise CorpusError(f"{where}: {error}") from error
        if prompt:
            return tokens if list(tokens[: len(self.begin)]) == list(self.begin) else np.concatenate([self.begin, tokens])
        end = self.tokenizer.end_of_document
        return tokens if list(tokens[-1:]) == [end] else np.append(tokens, end)

    def _ids(self, rollout: _Rollout, key: str) -> Any:
        tokens = np.array(getattr(rollout, key), np.int64)
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self.tokenizer.vocab_size):
            wrong = tokens[(tokens < 0) | (tokens >= self.tokenizer.vocab_size)][0]
            raise CorpusError(
                f"{rollout.where}: `{key}` has token {wrong}, but the tokenizer has {self.tokenizer.vocab_size:,} tokens: give "
                "the tokens of the model's own tokenizer"
            )
        return tokens


def _columns(names: list[str]) -> list[str]:
    """Returns the columns of a table to read. Raises FormatError if they contain no rollouts."""
    ours = {ALIASES.get(name, name) for name in names}
    if "prompt" not in ours or not ours & {"completion", "completions"}:
        raise FormatError(
            f"rollouts need `prompt`, and `completion` or `completions`, but there is only {', '.join(names) or 'nothing'}: "
            "rename the keys"
        )
    return [name for name in names if ALIASES.get(name, name) in KEYS]


def _parse(record: Record | Path, unused: Counter[str]) -> Iterator[_Rollout]:
    """Yields the rollouts of a record, and counts the keys that are not used. Raises CorpusError."""
    if isinstance(record, Path):
        raise CorpusError(f"{record} is a text: rollouts are records (JSON Lines, Parquet, a saved dataset); remove it")
    try:
        yield from _rollouts(record, unused)
    except FormatError as error:
        raise CorpusError(f"{record.where}: {error}") from error


def _rollouts(record: Record, unused: Counter[str]) -> Iterator[_Rollout]:
    values: dict[str, Any] = {}
    for key, value in record.values.items():
        ours = ALIASES.get(key, key)
        if ours not in KEYS:
            unused.update([key] if value not in (None, "", [], {}) else [])
        elif value is not None:
            if ours in values:
                raise FormatError(f"`{key}` and `{ours}` mean the same: remove one of the two")
            values[ours] = value
    if isinstance(values.get("completion"), list) and values["completion"] and isinstance(values["completion"][0], list):
        values["completions"] = values.pop("completion")
        values |= {plural: values.pop(one) for plural, one in LISTS.items() if one in values}
    _columns([*values])
    prompt, tools, group = values.pop("prompt"), values.pop("tools", None), values.pop("group", None)
    if group is not None and not isinstance(group, int | str):
        raise FormatError(f"`group` is {group!r}: it must be a number or a text")
    several = "completions" in values
    if several and "completion" in values:
        raise FormatError("has both `completion` and `completions`: give each prompt a record, or each completion")
    for plural, one in LISTS.items():
        if plural != one and (one if several else plural) in values:
            wrong, right = (one, plural) if several else (plural, one)
            raise FormatError(f"`{wrong}` does not go with `{'completions' if several else 'completion'}`: name it `{right}`")
    if not several:
        of_prompt = ("prompt", json.dumps(prompt)) if group is None else ("group", group)
        completion = values.pop("completion")
        yield _checked(_Rollout(record.where, of_prompt, prompt, completion, tools, values))
        return
    completions = values.pop("completions")
    for name, value in {"completions": completions, **values}.items():
        if not isinstance(value, list) or len(value) != len(completions):
            many = f" of {len(completions)}, one for each completion" if isinstance(completions, list) else ""
            has = f"a list of {len(value)}" if isinstance(value, list) else f"of type {type(value).__name__}"
            raise FormatError(f"`{name}` is {has}: it must be a list{many}")
    for number, completion in enumerate(completions):
        of_record = ("record", record.where) if group is None else ("group", group)
        own = {LISTS[name]: value[number] for name, value in values.items()}
        yield _checked(_Rollout(f"{record.where}, completion {number}", of_record, prompt, completion, tools, own))


def _checked(rollout: _Rollout) -> _Rollout:
    """Returns a rollout with its numbers as arrays. Raises CorpusError naming the place and the key."""
    kind = _kind(rollout)
    numbers = {key: _numbers(rollout.where, key, value) for key, value in rollout.numbers.items()}
    if not numbers.keys() & {"reward", "advantage"}:
        raise CorpusError(f"{rollout.where} has neither a reward nor an advantage: give one of the two for every completion")
    for key, value in numbers.items():
        if kind != "token ids" and np.ndim(value):
            raise CorpusError(
                f"{rollout.where}: `{key}` has a number for each token, but the completion is no token ids: {EXACT}"
            )
    return rollout._replace(numbers=numbers)


def _numbers(where: str, key: str, value: Any) -> Any:
    dimensions = {"reward": (0,), "advantage": (0, 1)}.get(key, (1,))
    try:
        numbers = np.array(value, np.float64)
    except (ValueError, TypeError):
        numbers = np.zeros((0, 0))
    if numbers.ndim not in dimensions or isinstance(value, str) or (key == "mask" and not np.isin(numbers, (0, 1)).all()):
        rule = {"reward": "a number", "advantage": "a number, or a list of numbers", "mask": "a list of 0 and 1"}
        raise CorpusError(
            f"{where}: `{key}` must be {rule.get(key, 'a list of numbers, one for each token of the completion')}"
        )
    return numbers.astype(np.bool_) if key == "mask" else numbers if numbers.ndim else float(numbers)


def _kind(rollout: _Rollout) -> str:
    """Returns what prompt and completion are: token ids, texts or messages. Raises CorpusError if they differ."""
    kinds = []
    for value in (rollout.prompt, rollout.completion):
        if isinstance(value, str):
            kinds.append("texts")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            kinds.append("messages")
        elif isinstance(value, list) and (not value or np.array(value, object).shape == (len(value),)):
            kinds.append("token ids" if all(type(token) is int for token in value) else "other")
        else:
            kinds.append("other")
    if kinds[0] != kinds[1] or "other" in kinds:
        raise CorpusError(
            f"{rollout.where}: prompt and completion must both be token ids, or both texts, or both lists of messages"
        )
    return kinds[0]
