"""Trainers of transformers on records of sources and targets, with an encoder-decoder, on one process and on several."""

from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longctx.data.records.tokenizer import byte_vocabulary
from tests.seq2seq_cases import VOCABULARY, build_seq2seq
from tests.trainer_cases import DOCUMENTS, PROFILE, TOKENS_PER_RANK, arguments, as_rank, report, select_fsdp_on_cpus, tokenizer

LENGTHS = [(67, 53), (1, 1), (2, 43), (41, 1)]
"""Tokens of the source and of the target of the first records; the first does not fit one of several ranks."""
ONE_STEP = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "max_steps": 1}
"""A step that changes weights by their gradient."""


def records(count: int = DOCUMENTS, seed: int = 0, untrained: bool = True) -> list[dict[str, list[int]]]:
    """Records, of which every third has masked labels: the first ones, some in the middle and the last one."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        source, target = LENGTHS[number] if number < len(LENGTHS) else random.integers(1, 23, 2)
        labels = random.integers(1, VOCABULARY, target)
        if number % 3 == 0 and target > 6:
            labels[[0, 1, 4, -1]] = -100
        made.append({"input_ids": random.integers(1, VOCABULARY, source).tolist(), "labels": labels.tolist()})
    if untrained:
        made[5]["labels"] = [-100] * 3
    return made


def collator(side: str = "right", model: Any = None) -> Any:
    """The collator of transformers, which pads sources and labels on a side; with a model, it makes decoder_input_ids."""
    from transformers import DataCollatorForSeq2Seq

    made = tokenizer()
    made.padding_side = side
    return DataCollatorForSeq2Seq(made, model=model)


def make(folder: Path, ranks: int, options: dict[str, Any]) -> Any:
    """Returns a trainer. Options: arguments, `plainest` for transformers.Trainer, `lora`, `side` and `makes_inputs` of the
    collator, `metrics`, what they see of logits (`seen`), `accumulation`, `untrained` for a record without a label, the numbers
    of `only` some records, and `of` the model."""
    from peft import LoraConfig, get_peft_model
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

    options = dict(options)
    kinds = (Trainer, TrainingArguments) if options.pop("plainest", False) else (Seq2SeqTrainer, Seq2SeqTrainingArguments)
    side, makes, metrics = options.pop("side", "right"), options.pop("makes_inputs", False), options.pop("metrics", None)
    accumulation, untrained = options.pop("accumulation", 1), options.pop("untrained", False)
    model = options.pop("of", None) or build_seq2seq()
    if options.get("predict_with_generate"):
        model.generation_config.no_repeat_ngram_size = 1  # or this model repeats one token
    only, seen = options.pop("only", None), options.pop("seen", None)
    collate = collator(side, model if makes else None)
    if options.pop("lora", False):
        torch.manual_seed(0)
        adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_2_SEQ_LM", init_lora_weights=False)
        model = get_peft_model(model, adapters)
    if "fsdp" in options:
        select_fsdp_on_cpus()
    return kinds[0](
        model,
        kinds[1](**arguments(folder, ranks, accumulation, **options)),
        data_collator=collate,
        train_dataset=[row for number, row in enumerate(records(untrained=untrained)) if only is None or number in only],
        eval_dataset=records(19, seed=1),
        processing_class=tokenizer(),
        compute_metrics=metrics,
        preprocess_logits_for_metrics=seen,
    )


def train(folder: Path, dynamic: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Trains, and predicts if `options` has `predicting`, with `context` for the planner; `evaluating` first.

    Steps have the same records on any number of ranks.
    """
    from longctx.trainers import dynamic_context_parallel

    ranks, options = as_rank(), dict(options)
    predicting, resume = options.pop("predicting", None), options.pop("resume", None)
    context, evaluating = options.pop("context", {}), options.pop("evaluating", False)
    trainer = make(folder, ranks, options | ({"metrics": predicting} if predicting else {}))
    before = report(trainer)["weights"]
    if dynamic:
        dynamic_context_parallel(trainer, tokens_per_rank=TOKENS_PER_RANK if ranks > 1 else 128, profile=PROFILE, **context)
    if evaluating:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=resume)
    found = report(trainer)
    found["changes"] = {name: before[name] - weight for name, weight in found["weights"].items()}
    found["predictions"] = trainer.predict(records(7, seed=2)) if predicting else None
    return found


def likelihood(prediction: Any) -> dict[str, float]:
    """A metric of logits and labels, which are not shifted."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    labels = torch.tensor(prediction.label_ids)
    likelihoods = torch.log_softmax(torch.tensor(logits), -1)
    chosen = likelihoods.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return {"likelihood": chosen[labels != -100].mean().item()}


def mean_token(prediction: Any) -> dict[str, float]:
    """A metric of generated tokens and labels."""
    labels = prediction.label_ids
    return {"mean_token": float(np.maximum(prediction.predictions, 0).mean()), "labels": float(labels[labels > 0].mean())}


def best_logits(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """What metrics see of logits: a value per row."""
    best = (logits[0] if isinstance(logits, tuple) else logits).amax(-1)
    return best.masked_fill(labels == -100, 0).sum(-1)


def mean_row(prediction: Any) -> dict[str, float]:
    """A metric of values of rows."""
    return {"mean_row": float(prediction.predictions.mean()), "rows": len(prediction.predictions)}


def save_checkpoint(folder: Path) -> Path:
    """Saves a tiny T5Gemma with a tokenizer of bytes; its decoder begins with [BOS]."""
    inner = Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(["[PAD]", "[BOS]", "[EOS]"])
    names = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
    special = {"pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258, "vocab_size": 259}
    build_seq2seq(parts=special, **special).save_pretrained(folder)
    return folder


def texts() -> list[dict[str, str]]:
    """Returns records of texts, all different."""
    random = Random(0)
    lengths = ((300, 20), (3, 200), (40, 41), (1, 1), (150, 2), (700, 90), (12, 5))
    pairs = [["".join(random.choices(ascii_lowercase, k=length)) for length in pair] for pair in lengths]
    return [dict(zip(("source", "target"), pair, strict=True)) for pair in pairs]
