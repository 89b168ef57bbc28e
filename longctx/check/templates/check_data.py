"""Batches of a collator, without a model: longctx check-step FILE --data."""

from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import DataCollatorWithFlattening, PreTrainedTokenizerFast

from longctx.check import Data

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }} <end>{% endgeneration %}"
    "{% else %}{{ message.content }} <end>{% endif %} {% endfor %}"
)


def data() -> Data:
    # PUT YOURS HERE: your tokenizer, such as AutoTokenizer.from_pretrained("name or folder").
    tokenizer = tokenizer_of_words("<padding>", "<end>", "<user>", "<assistant>")

    # PUT YOURS HERE: texts, as lists of messages or strings, such as the lines of a file.
    texts = [conversation("a b c", "d e"), conversation("f", "g h i a"), conversation("b c", "f")]

    # PUT YOURS HERE: what your data set has of each text. A Trainer makes rows by itself: return
    # DataOfTrainer(trainer, texts=texts).
    rows = [row_of(text, tokenizer) for text in texts]

    # PUT YOURS HERE: your collator.
    collate = DataCollatorWithFlattening()
    return Data(rows, collate, tokenizer, texts=texts, rows_per_batch=2)


def row_of(messages: list[dict[str, str]], tokenizer: Any) -> dict[str, list[int]]:
    """Returns token ids of a conversation, and labels of what the assistant says."""
    made = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    ids = made["input_ids"]
    labels = [-100] * len(ids)
    for place, is_trained in enumerate(made["assistant_masks"]):
        if is_trained:
            labels[place] = ids[place]
    return {"input_ids": ids, "labels": labels}


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def tokenizer_of_words(*special: str) -> PreTrainedTokenizerFast:
    words = [*special, "<unknown>", *"abcdefghi"]
    numbers = {word: number for number, word in enumerate(words)}
    inner = Tokenizer(WordLevel(numbers, unk_token="<unknown>"))
    inner.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=special[0], eos_token=special[1]
    )
    made.add_special_tokens({"additional_special_tokens": list(special[2:])})
    made.chat_template = TEMPLATE
    return made
