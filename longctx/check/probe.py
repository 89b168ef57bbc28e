"""Probes: documents whose every token names its document and its place, so that ids alone tell what
a step did with them."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .errors import UsageError
from .shrunk import shrunk

PAD, END, FIRST = 0, 1, 2
"""Ids of padding and of the end of a text, and the first id of documents. No other id occurs
twice."""
LENGTHS = (1, 2, 37, 61, 5, 18, 29, 7, 3, 44, 11, 23)
"""Of documents by default: no two alike, so that means of documents, rows or micro-batches differ
from the mean of tokens."""
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": END,
    "tie_word_embeddings": False,  # an output layer of its own tells forward from backward
}
"""Of models."""
VISIBLE = {"sliding_window": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0}
"""Values that change what a small model says of short documents, in place of larger ones."""
SPREAD = 0.2
"""Standard deviation of a model's matrices: with the usual one scores and logits are all near 0, so
that no cap and no mask matters much."""
SPREAD_OF_EMBEDDINGS = 0.02
"""Also of the output layer: small, so that the epsilon of the first norm matters, and so that all
tokens are about as likely."""

DTYPES = ("float32", "bfloat16", "float16")
"""Of weights of models."""
LATENT = "kv_lora_rank"
"""In configs of models with latent attention."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names in configs of how many experts a router chooses from."""


ROPE_LOGGER = "transformers.modeling_rope_utils"


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Lets a logger tell errors alone."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@dataclass(frozen=True)
class Probe:
    """Documents to train one optimizer step on.

    Attributes:
        name: what it looks for.
        prompt: share of each document's tokens, the first ones, that have no loss.
        ends: whether a document of several tokens ends with END.
        pad: id of padding; END, as where a tokenizer has no token for padding, or PAD.
        micro_batches: micro-batches of a rank, for the user's `make`.
        dtype: of the weights of models, one of DTYPES.
        paired: whether each two documents are a pair of preference, the chosen one first, which
            begin with the same prompt.
    """

    name: str = "documents"
    lengths: tuple[int, ...] = LENGTHS
    prompt: float = 0.0
    ends: bool = False
    pad: int = PAD
    micro_batches: int = 1
    dtype: str = "float32"
    paired: bool = False

    @cached_property
    def documents(self) -> list[list[int]]:
        found: list[list[int]] = []
        next_id = FIRST
        for length in self.lengths:
            ids = list(range(next_id, next_id + length))
            next_id += length
            if self.paired and len(found) % 2:
                prompt = self.prompt_of(len(found))
                ids[:prompt] = found[-1][:prompt]
            found.append([*ids[:-1], END] if self.ends and length > 1 else ids)
        return found

    def prompt_of(self, document: int) -> int:
        """Returns how many tokens the prompt of a document has."""
        if not self.paired:
            return int(self.prompt * self.lengths[document])
        first = document - document % 2
        return int(self.prompt * min(self.lengths[first : first + 2]))

    def in_pairs(self) -> "Probe":
        """Returns the probe whose documents are `pairs`; one without a partner is left out."""
        even = len(self.lengths) - len(self.lengths) % 2
        return replace(self, lengths=self.lengths[:even], paired=True)

    @property
    def pairs(self) -> list[dict[str, list[int]]]:
        """A data set for trainers of preferences: `prompt_ids`, `chosen_ids` and `rejected_ids` of
        each two documents. Without prompts in the probe they have none."""
        found = []
        documents = self.in_pairs().documents
        for first in range(0, len(documents), 2):
            chosen = documents[first]
            rejected = documents[first + 1]
            prompt = self.in_pairs().prompt_of(first)
            row = {"prompt_ids": chosen[:prompt]}
            row["chosen_ids"] = chosen[prompt:]
            row["rejected_ids"] = rejected[prompt:]
            found.append(row)
        return found

    @property
    def vocab_size(self) -> int:
        """Entries that a model needs: a multiple of 64."""
        return -(-(FIRST + sum(self.lengths)) // 64) * 64

    def trained(self, document: int, place: int) -> bool:
        """Returns whether a token is a target: no first one, and none of a prompt."""
        return place > 0 and place >= self.prompt_of(document)

    @property
    def rows(self) -> list[dict[str, list[int]]]:
        """A data set for trainers: `input_ids` and `labels` of every document."""
        return [
            {
                "input_ids": ids,
                "labels": [
                    token if not self.prompt or self.trained(number, at) else -100
                    for at, token in enumerate(ids)
                ],
            }
            for number, ids in enumerate(self.documents)
        ]

    def model(self, kind: str = "llama", *, config: Any = None, **sizes: Any) -> Any:
        """Returns a small model of transformers with random weights, the same in every process: a
        causal LM of this type, or with `config` (or the name or folder of one) one that has what is
        special in it. Where its dtype rounds, routers take all experts, as a right step would
        choose others."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        own = {"vocab_size": self.vocab_size, "pad_token_id": self.pad}
        if config is None and LATENT in vars(AutoConfig.for_model(kind)):
            config = AutoConfig.for_model(kind)  # whose heads have several widths
        if config is None:
            with _quiet(ROPE_LOGGER):  # YaRN's factor is kept beside fewer positions
                config = AutoConfig.for_model(kind, **(SIZES | own | sizes))
        else:
            given = AutoConfig.from_pretrained(config) if isinstance(config, str) else config
            config = shrunk(given)
            ends = {"bos_token_id": None, "eos_token_id": END}
            for name, value in (own | ends | sizes).items():
                setattr(config, name, value)
        for name, value in VISIBLE.items():
            if name not in sizes and (getattr(config, name, None) or 0) > value:
                setattr(config, name, value)
        if self.dtype != "float32" and experts_of(config) and "num_experts_per_tok" not in sizes:
            config.num_experts_per_tok = experts_of(config)
        for name, value in vars(config).items():
            if (
                ("dropout" in name or "pdrop" in name)
                and isinstance(value, float)
                and name not in sizes
            ):
                setattr(config, name, 0.0)
        if "initializer_range" not in sizes:
            config.initializer_range = SPREAD
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            # Transformers begin with 0 for padding, which would leave no trace of what it does.
            with torch.no_grad():
                for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
                    layer.weight.normal_(std=SPREAD_OF_EMBEDDINGS)
        return model.to(getattr(torch, self.dtype))


def experts_of(config: Any) -> int:
    """Returns how many experts routers choose from; 0 without."""
    for name in EXPERTS:
        if getattr(config, name, None):
            return int(getattr(config, name))
    return 0


PROBES = (
    Probe(),
    Probe("prompts", prompt=0.4),
    Probe("ends of texts, and padding like them", ends=True, pad=END),
    Probe("three micro-batches", micro_batches=3),
    Probe("few documents", lengths=(31, 90)),
)
"""Taken by default."""


def named(names: Sequence[str]) -> list[Probe]:
    """Returns the probes of these names, or all if there are none. Raises UsageError for an unknown
    one."""
    known = [probe.name for probe in PROBES]
    if unknown := set(names) - set(known):
        raise UsageError(
            f"there is no probe {min(unknown)!r}: choose from {', '.join(map(repr, known))}"
        )
    return [probe for probe in PROBES if probe.name in (names or known)]


class Tokens:
    """The tokens of a probe, numbered document after document; padding is -1."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.ids = [token for ids in probe.documents for token in ids]
        self.document = [number for number, ids in enumerate(probe.documents) for _ in ids]
        self.place = [at for ids in probe.documents for at in range(len(ids))]
        self.number = {token: number for number, token in enumerate(self.ids) if token != END}
        counts = Counter(self.ids)
        self._shared = {token for token in self.number if counts[token] > 1}
        """Ids of prompts that two documents begin with."""

    def of(self, document: int) -> range:
        """Returns the numbers of a document's tokens."""
        first = self.document.index(document)
        return range(first, first + self.probe.lengths[document])

    def next(self, number: int, by: int = 1) -> int | None:
        """Returns the token after another one of its document, or so many after it; None beyond the
        last."""
        after = number + by
        if after < len(self.ids) and self.document[after] == self.document[number]:
            return after
        return None

    def numbers(self, row: Sequence[int]) -> list[int]:
        """Returns the numbers of a row of ids. An END belongs to the document whose second-last
        token is before it, a token of a shared prompt to the document of what follows."""
        found: list[int] = []
        for at, token in enumerate(row):
            number = self.number.get(token, -1)
            if token in self._shared:
                number = self._of_prompt(number, row[at + 1 :])
            if token == END and found and found[-1] >= 0:
                after = self.next(found[-1])
                number = after if after is not None and self.ids[after] == END else -1
            found.append(number)
        return found

    def _of_prompt(self, number: int, after: Sequence[int]) -> int:
        """Returns the number of a token of a shared prompt: in the document of the next token that
        is none, or in the chosen one."""
        place = self.place[number]
        for token in after:
            if token in self.number and token not in self._shared:
                return self.of(self.document[self.number[token]])[place]
        return self.of(self.document[number] - 1)[place]

    def runs(self, row: Sequence[int]) -> Iterator[list[int]]:
        """Yields the tokens of one document after the other in a row of numbers without padding, in
        the order of the row; a document that begins anew is another run."""
        run: list[int] = []
        for number in row:
            begins_anew = self.place[number] == 0 and run and run[-1] != number
            if run and (self.document[run[-1]] != self.document[number] or begins_anew):
                yield run
                run = []
            run.append(number)
        if run:
            yield run

    def pieces(self, row: Sequence[int]) -> Iterator[list[int]]:
        """Yields the runs of consecutive tokens of one document in a row of numbers."""
        piece: list[int] = []
        for number in (*row, -1):
            if piece and self.next(piece[-1]) != number:
                yield piece
                piece = []
            if number >= 0:
                piece.append(number)
