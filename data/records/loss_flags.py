"""Loss flags: what messages, and the parts of their texts, say on their loss; each is obeyed or
refused."""

from collections.abc import Mapping
from typing import Any

from longctx.data.records.chat import TEXTS, ChatError, Message, Parts
from longctx.data.records.tokenizer import is_weight

SWITCHES = ("train", "training", "loss")
"""Keys of a message or a part that switch its loss on or off."""
LOSS_KEYS = ("weight", *SWITCHES)
"""Keys of a message or a part that say whether it has a loss."""
UNCLEAR_LOSS_KEYS = (
    "mask",
    "masked",
    "loss_mask",
    "loss_scale",
    "loss_weight",
    "train_detail",
    "training_detail",
)
EXPLICIT = (
    "tools differ in what it means: write `train: true` or `train: false` into each message instead"
)


def has_flags(given: Mapping[str, Any]) -> bool:
    """Returns whether a message or a part says something on its loss."""
    return any(key in given for key in (*LOSS_KEYS, *UNCLEAR_LOSS_KEYS))


def message_weights(
    messages: list[Message], first_trained: int
) -> tuple[list[Message], dict[int, float]]:
    """Returns the messages without flags, and the weights of those that have another one than 1.

    Parts with weights of their own keep them in their text. Raises ChatError for flags that are
    unclear, say opposite things, or ask for a loss where there is none.
    """
    kept: list[Message] = []
    weights: dict[int, float] = {}
    for index, message in enumerate(messages):
        where = f"message {index}, of role {message['role']}, has"
        never = ""
        if message["role"] != "assistant":
            never = "only the assistant's messages have a loss"
        elif index < first_trained:
            never = "only the completion has a loss"
        weight = _weight(where, message, never)
        if not weight:
            never = "the message has no loss"
        plain = {key: value for key, value in message.items() if key not in LOSS_KEYS}
        for key in TEXTS:
            if isinstance(plain.get(key), Parts):
                plain[key] = _weighted(
                    f"message {index}, of role {message['role']}", key, plain[key], never
                )
                if not all(is_weight(weight * own) for own in plain[key].weights):
                    raise ChatError(
                        f"{where} parts and weights whose product float32 does not hold: use "
                        "weights near 1"
                    )
        if _says_nothing(plain):
            weight = 0.0
        if weight != 1:
            weights[index] = weight
        kept.append(plain)
    return kept, weights


def _weighted(where: str, key: str, text: Parts, never: str) -> Parts:
    """Returns a text whose parts have their weights, and no flags."""
    weights = [
        _weight(f"{where}, part {number} of its {key}, has", part, never)
        for number, part in enumerate(text.parts)
    ]
    plain = [
        {name: value for name, value in part.items() if name not in LOSS_KEYS}
        for part in text.parts
    ]
    return Parts.of(plain, weights)


def _weight(where: str, given: Mapping[str, Any], never: str) -> float:
    """Returns the weight that a message or a part asks for; `never`: why it must not ask for a
    loss, if so."""
    weight = 1.0
    for key, value in given.items():
        if key in UNCLEAR_LOSS_KEYS:
            raise ChatError(f"{where} `{key}` {value!r}: {EXPLICIT}")
        if key not in LOSS_KEYS:
            continue
        if value not in (0, 1) and not (key == "weight" and is_weight(value)):
            rule = "; only a `weight` may be any number from 0 that float32 holds"
            raise ChatError(
                f"{where} `{key}` {value!r}: it must be 0 or false for no loss, or 1 or true{rule}"
            )
        if value and never:
            raise ChatError(f"{where} `{key}` {value!r}, but {never}: remove the key")
        weight *= value
    switches = {key: given[key] for key in SWITCHES if key in given}
    if len({bool(value) for value in switches.values()}) > 1:
        both = " and ".join(f"`{key}` {value!r}" for key, value in switches.items())
        raise ChatError(f"{where} {both}, which say opposite things: remove one of them")
    return weight


def _says_nothing(message: Message) -> bool:
    """Returns whether no part of any text of a message has a loss, and there is no tool call."""
    texts = [message[key] for key in TEXTS if message.get(key)]
    silent = [isinstance(text, Parts) and not any(text.weights) for text in texts]
    return bool(texts) and all(silent) and "tool_calls" not in message
