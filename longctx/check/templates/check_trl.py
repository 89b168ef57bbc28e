"""An SFTTrainer of TRL: longctx check-step FILE --processes 2."""

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from longctx.check import Probe
from longctx.check.loop import place
from longctx.check.trainer import arguments


def make(probe: Probe) -> SFTTrainer:
    # PUT YOURS HERE: a small model of your type, as transformers call it, such as "gemma3_text".
    model = probe.model("qwen3")

    # PUT YOURS HERE: what you pass to SFTConfig, such as packing=True and its max_length.
    _, ranks = place()
    rows = max(1, len(probe.rows) // (ranks * probe.micro_batches))
    given = arguments(
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=probe.micro_batches,
        max_length=None,
        padding_free=True,
    )

    # PUT YOURS HERE: the class of your trainer, and what else it gets.
    return SFTTrainer(
        model=model,
        args=SFTConfig(**given),
        train_dataset=Dataset.from_list(probe.rows),
        processing_class=tokenizer(probe),
    )


def tokenizer(probe: Probe) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of the probe's ids, of which TRL takes that of padding."""
    words = {f"<{number}>": number for number in range(probe.vocab_size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<0>")),
        pad_token=f"<{probe.pad}>",
        eos_token="<1>",
    )
