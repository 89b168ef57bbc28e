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
import numpy.typing as npt

from longctx.data.chat import ChatError
from longctx.data.corpus import Corpus
from longctx.data.encode import EncodedDocument, Encoder
from longctx.data.formats import Document, parse_record
from longctx.data.markup import Markup
from longctx.data.messages import FormatError
from longctx.data.pretrained import Pretrained
from longctx.data.readers import CorpusError, Record
from longctx.data.rollouts import RolloutError, Rollouts
from longctx.data.template import Template
from longctx.data.tokenizer import TokenArray, Tokenizer

LISTS = {"rewards": "reward", "advantages": "advantage", "masks": "mask"}
LISTS |= {key: key for key in ("old_logps", "reference_logps", "sampler_logps")}
"""Keys beside several completions, and what they are called beside one."""
ALIASES = {
    **dict.fromkeys(("prompt_ids", "prompt_token_ids"), "prompt"),
    **dict.fromkeys(("completion_ids", "response", "response_ids"), "completion"),
    **dict.fromkeys(("old_per_token_logps", "old_log_probs"), "old_logps"),
    **dict.fromkeys(("ref_per_token_logps", "ref_log_prob"), "reference_logps"),
    **dict.fromkeys(("logprobs", "sampling_per_token_logps", "rollout_log_probs"), "sampler_logps"),
    **dict.fromkeys(("completion_mask", "response_mask"), "mask"),
}
"""Names of TRL, verl and vLLM for a record of one completion, and ours."""
KEYS = {"prompt", "completion", "completions", "group", "tools", *LISTS, *LISTS.values()}
Ids = npt.NDArray[np.int64]


class _Rollout(NamedTuple):
    """A rollout before its tokens are known; `numbers` are what `LISTS` names, by the names of one completion."""

    where: str
    group: tuple[str, Any]
    prompt: Any
    completion: Any
    tools: Any
    kind: str
    numbers: dict[str, Any]


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
        markup, templates = Markup(loaded.tokenizer.text, loaded.tokenizer.dtype), loaded.templates
        template = None if templates is None else Template(templates, loaded.variables, markup, loaded.ends)
        return cls(loaded.tokenizer, loaded.begin, template)

    def read(self, corpus: Corpus) -> tuple[Rollouts, list[str], dict[str, int]]:
        """Returns all rollouts, the place of each, and the number of records with each key that is not used.

        Raises UserError naming the place, the key and the rule.
        """
        unused = Counter[str]()
        each = [rollout for record in corpus.records(_columns) for rollout in _parse(record, unused)]
        if not each:
            raise CorpusError(f"{corpus.source} has no rollouts: give at least one record with a prompt and completions")
        tokens, names, groups = self._tokens(each), [rollout.where for rollout in each], dict[tuple[str, Any], int]()
        columns = {plural: [rollout.numbers.get(key) for rollout in each] for plural, key in LISTS.items()}
        columns["masks"] = [
            written if mask is None else mask for (*_, written), mask in zip(tokens, columns["masks"], strict=True)
        ]
        for key, values in columns.items():
            having = [value is not None for value in values]
            if key != "masks" and any(having) and not all(having):
                lacks, has = names[having.index(False)], names[having.index(True)]
                raise CorpusError(f"{lacks} has no `{LISTS[key]}`, but {has} has: give it for all rollouts, or for none")
        numbers: dict[str, Any] = {key: None if values[0] is None else values for key, values in columns.items()}
        group = [groups.setdefault(rollout.group, len(groups)) for rollout in each]
        try:
            rollouts = Rollouts(
                [prompt for prompt, *_ in tokens], [completion for _, completion, _ in tokens], groups=group, **numbers
            )
        except RolloutError as error:
            raise error.naming(names) from error
        return rollouts, names, dict(unused)

    def _tokens(self, each: list[_Rollout]) -> list[tuple[Ids, Ids, npt.NDArray[np.bool_]]]:
        """Returns the tokens of prompts and completions, and which tokens of a completion the model wrote."""
        rendered = iter(self._rendered([rollout for rollout in each if rollout.kind == "messages"]))
        tokens = list[tuple[Ids, Ids, npt.NDArray[np.bool_]]]()
        for rollout in each:
            if rollout.kind == "messages":
                row = next(rendered)
                assert row.trained is not None
                if row.trained.dtype != np.bool_:
                    raise CorpusError(
                        f"{rollout.where}: a message has a weight: the advantage of a rollout weighs it; remove it"
                    )
                learned = np.flatnonzero(row.trained)
                first, stop = learned[0], learned[-1] + 1
                tokens.append(
                    (row.tokens[:first].astype(np.int64), row.tokens[first:stop].astype(np.int64), row.trained[first:stop] != 0)
                )
                continue
            prompt, completion = (self._ids(rollout.where, value) for value in (rollout.prompt, rollout.completion))
            if rollout.kind == "texts" and list(prompt[: len(self.begin)]) != list(self.begin):
                prompt = np.concatenate([self.begin, prompt])
            if rollout.kind == "texts" and list(completion[-1:]) != [self.tokenizer.end_of_document]:
                completion = np.append(completion, self.tokenizer.end_of_document)
            tokens.append((prompt, completion, np.ones(len(completion), np.bool_)))
        return tokens

    def _ids(self, where: str, value: Any) -> Ids:
        """Returns the token ids of a text, or token ids if the tokenizer has them."""
        if isinstance(value, str):
            return self.tokenizer.encode_markup(value).astype(np.int64)
        tokens = np.array(value, np.int64)
        if wrong := [token for token in value if not 0 <= token < self.tokenizer.vocab_size]:
            has = f"token {wrong[0]}, but the tokenizer has {self.tokenizer.vocab_size:,} tokens"
            raise CorpusError(f"{where} has {has}: give the ids of the model's own tokenizer")
        return tokens

    def _rendered(self, conversations: list[_Rollout]) -> list[EncodedDocument]:
        if not conversations:
            return []
        if self.template is None:
            why = "prompt and completion are messages, but no checkpoint gives a chat template"
            raise CorpusError(
                f"{conversations[0].where}: {why}: give token ids or texts, or model.from_pretrained with a template"
            )
        encoder, documents = Encoder(self.tokenizer, self.begin, self.template, self.template.markup), list[Document]()
        for rollout in conversations:
            record = {"prompt": rollout.prompt, "completion": rollout.completion, "tools": rollout.tools}
            try:
                documents += parse_record(record, rollout.where, 0, None)
            except (FormatError, ChatError) as error:
                raise CorpusError(f"{rollout.where}: {error}") from error
            if documents[-1].images:
                raise CorpusError(f"{rollout.where}: rollouts with images are not supported: remove the record")
        return encoder.encode(documents, encoder.render(documents))[0]


def _columns(names: list[str]) -> list[str]:
    """Returns the columns of a table to read. Raises FormatError if they contain no rollouts."""
    ours = {ALIASES.get(name, name) for name in names}
    if "prompt" not in ours or not ours & {"completion", "completions"}:
        has = ", ".join(names) or "nothing"
        raise FormatError(
            f"rollouts need `prompt`, and `completion` or `completions`, but there is only {has}: rename the keys"
        )
    return [name for name in names if ALIASES.get(name, name) in KEYS]


def _parse(record: Record | Path, unused: Counter[str]) -> Iterator[_Rollout]:
    """Yields the rollouts of a record, and counts the keys that are not used. Raises CorpusError."""
    if isinstance(record, Path):
        raise CorpusError(f"{record} is a text: rollouts are records (JSON Lines, Parquet, a saved dataset); remove it")
    values: dict[str, Any] = {}
    for key, value in record.values.items():
        ours = ALIASES.get(key, key)
        if ours not in KEYS:
            unused.update([key] if value not in (None, "", [], {}) else [])
        elif value is not None and ours in values:
            raise CorpusError(f"{record.where}: `{key}` and another key mean `{ours}`: remove one of the two")
        elif value is not None:
            values[ours] = value
    try:
        _columns([key for key, value in record.values.items() if value is not None])
        yield from _rollouts(record.where, values)
    except FormatError as error:
        raise CorpusError(f"{record.where}: {error}") from error


def _rollouts(where: str, values: dict[str, Any]) -> Iterator[_Rollout]:
    prompt, tools, group = values.pop("prompt"), values.pop("tools", None), values.pop("group", None)
    completion = "completions" if "completions" in values else "completion"
    completions, several = values.pop(completion), completion == "completions"
    if wrong := values.keys() - (LISTS.keys() if several else LISTS.values()):
        names = ", ".join(LISTS if several else LISTS.values())
        raise FormatError(f"`{min(wrong)}` does not go with `{completion}`: beside that, use {names}")
    if several:
        for key, value in {"completions": completions, **values}.items():
            if not isinstance(value, list) or len(value) != len(completions):
                raise FormatError(f"`{key}` must be a list, of one for each of the `completions`")
    else:
        completions, values = [completions], {key: [value] for key, value in values.items()}
    own = ("record", where) if several else ("prompt", json.dumps(prompt))
    for number, one in enumerate(completions):
        kind = _kind(prompt)
        if kind == "unknown" or _kind(one) != kind:
            raise FormatError("prompt and completion must both be token ids, or both texts, or both lists of messages")
        numbers = {LISTS.get(key, key): _numbers(LISTS.get(key, key), value[number], kind) for key, value in values.items()}
        if not numbers.keys() & {"reward", "advantage"}:
            raise FormatError("there are neither rewards nor advantages: give one of the two")
        place = f"{where}, completion {number}" if several else where
        yield _Rollout(place, own if group is None else ("group", str(group)), prompt, one, tools, kind, numbers)


def _numbers(key: str, value: Any, kind: str) -> Any:
    """Returns a number or an array; `Rollouts` checks its length. Raises FormatError."""
    try:
        numbers = np.array(value, np.float64)
    except (ValueError, TypeError) as error:
        raise FormatError(f"`{key}` must be numbers: {error}") from error
    if numbers.ndim and kind != "token ids":
        raise FormatError(f"`{key}` has a number for each token, but texts are tokenized again: give token ids")
    if (key == "reward" and numbers.ndim) or (key == "mask" and not np.isin(numbers, (0, 1)).all()):
        raise FormatError(f"`{key}` must be {'one number' if key == 'reward' else '0 or 1 for each token'}")
    return numbers.astype(np.bool_) if key == "mask" else numbers


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "texts"
    if isinstance(value, list) and all(type(token) is int for token in value):
        return "token ids"
    return "messages" if isinstance(value, list) and all(isinstance(message, dict) for message in value) else "unknown"
