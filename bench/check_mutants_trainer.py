"""Trainers of transformers, and loops by hand, with one fault each or none, for
bench/check_mutants.py."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, DataCollatorWithFlattening, Trainer, TrainingArguments

from bench.check_mutants_split import IGNORED, Make, rank, ranks
from longctx.check import Probe, record
from longctx.check.trainer import arguments

# Collators: batches of rows, with one fault if asked


def padded(
    rows: Any,
    probe: Probe,
    side: str = "right",
    multiple: int = 1,
    mask: bool = True,
    fill: int = IGNORED,
) -> Any:
    width = -(-max(len(row["input_ids"]) for row in rows) // multiple) * multiple
    batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        ids, labels = row["input_ids"], [IGNORED, *row["labels"][1:]]
        for name, values, filler in (
            ("input_ids", ids, probe.pad),
            ("labels", labels, fill),
            ("attention_mask", [1] * len(ids), 0),
        ):
            padding = [filler] * (width - len(ids))
            batch[name].append(values + padding if side == "right" else padding + values)
    if not mask:
        del batch["attention_mask"]
    return {name: torch.tensor(values) for name, values in batch.items()}


def packed(
    rows: Any,
    probe: Probe,
    restart: bool = True,
    ones: bool = False,
    first: bool = False,
    mask: int | None = None,
) -> Any:
    """One row; `mask`: documents kept apart by a mask of four dimensions, whose bounds are so many
    tokens late."""
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    ids = torch.tensor([list(chain(*(row["input_ids"] for row in rows)))])
    labels = torch.tensor(
        [
            list(
                chain(
                    *([row["labels"][0] if first else IGNORED, *row["labels"][1:]] for row in rows)
                )
            )
        ]
    )
    batch = {"input_ids": ids, "labels": labels}
    if restart:
        batch["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    if ones:
        batch["attention_mask"] = torch.ones_like(ids)
    if mask is not None:
        document = torch.repeat_interleave(torch.arange(len(rows)), lengths).roll(mask)
        document[:mask] = 0
        seen = (document[:, None] == document) & torch.ones(
            ids.shape[1], ids.shape[1]
        ).tril().bool()
        batch["attention_mask"] = torch.zeros(seen.shape).masked_fill(
            ~seen, torch.finfo(torch.float32).min
        )[None, None]
    return batch


def collator(
    base: Callable[..., Any] = padded,
    change: Callable[[Any, Probe], None] | None = None,
    **given: Any,
) -> Any:
    def collate(rows: Any, probe: Probe) -> Any:
        batch = base(rows, probe, **given)
        if change:
            change(batch, probe)
        return batch

    return collate


def flattened(rows: Any, probe: Probe) -> Any:
    return DataCollatorWithFlattening()(rows)


def ends_masked(batch: Any, probe: Probe) -> None:
    batch["labels"][batch["input_ids"] == probe.pad] = IGNORED


def shifted(batch: Any, probe: Probe) -> None:
    batch["labels"] = torch.cat(
        [batch["labels"][:, 1:], torch.full_like(batch["labels"][:, :1], IGNORED)], 1
    )


def prompts_trained(batch: Any, probe: Probe) -> None:
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)


def answers_late(batch: Any, probe: Probe) -> None:
    starts = (batch["labels"] != IGNORED).int().argmax(1)
    batch["labels"][torch.arange(len(starts)), starts] = IGNORED


def last_row_lost(batch: Any, probe: Probe) -> None:
    for name, values in batch.items():
        batch[name] = values[: max(1, len(values) - 1)]


def late_positions(batch: Any, probe: Probe) -> None:
    batch["position_ids"] = (torch.arange(batch["input_ids"].shape[1]) + 1).expand_as(
        batch["input_ids"]
    )


def from_padding(batch: Any, probe: Probe) -> None:
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)


def no_template(batch: Any, probe: Probe) -> None:
    batch["labels"][batch["input_ids"].eq(probe.documents[-1][0]).any(1)] = IGNORED


# Rows of the data set


def cut(probe: Probe, most: int = 24, side: int = 1) -> Any:
    part = slice(None, most) if side > 0 else slice(-most, None)
    return [{name: values[part] for name, values in row.items()} for row in probe.rows]


def in_blocks(probe: Probe, size: int = 32) -> Any:
    ids = list(chain(*probe.documents))
    return [
        {"input_ids": ids[at : at + size], "labels": ids[at : at + size]}
        for at in range(0, len(ids), size)
    ]


def twice(probe: Probe) -> Any:
    rows = list(probe.rows)
    return [*rows[:-1], rows[-2]]


# Trainers


def inside(
    collate: Any = padded,
    trainer: type[Trainer] = Trainer,
    kind: str = "llama",
    change: Any = None,
    **more: Any,
) -> Make:
    """A transformers.Trainer; `rows`, `rows_each`, `sizes` and arguments of the trainer in
    `more`."""
    rows, sizes, each = more.pop("rows", None), more.pop("sizes", {}), more.pop("rows_each", None)

    def make(probe: Probe) -> Any:
        data = rows(probe) if rows else probe.rows
        size = each or max(1, len(data) // probe.micro_batches // ranks())
        steps = max(1, len(data) // size // ranks())
        given = {
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": steps,
            "max_grad_norm": 0.0,
        }
        model = probe.model(kind, **sizes)
        model = (change and change(model)) or model
        return trainer(
            model,
            TrainingArguments(**arguments(**given | more)),
            lambda batch: collate(batch, probe),
            data,
        )

    return make


def losses_by(loss_of: Callable[..., torch.Tensor], shift: int = 1) -> type[Trainer]:
    """A trainer whose loss is `loss_of(losses [rows, tokens], labels, targets of the step, logits,
    micro-batches)`."""

    class Changed(Trainer):
        def compute_loss(
            self,
            model: Any,
            inputs: Any,
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            labels = inputs.pop("labels")[:, shift:]
            logits = model(**inputs, use_cache=False).logits[:, : labels.shape[1]]
            losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            loss = (
                loss_of(
                    losses,
                    labels,
                    num_items_in_batch,
                    logits,
                    self.args.gradient_accumulation_steps,
                )
                * ranks()
            )
            return (loss, None) if return_outputs else loss

    return Changed


def counted(labels: torch.Tensor) -> torch.Tensor:
    return (labels != IGNORED).sum(-1).clamp(min=1)


def mean_of_parts(
    losses: torch.Tensor, labels: torch.Tensor, targets: Any, *_: Any
) -> torch.Tensor:
    """Parts of 16 tokens, each with its own mean, as a fused loss in chunks would take it."""
    parts = [
        part.sum() / counted(label).sum()
        for part, label in zip(losses.split(16, 1), labels.split(16, 1), strict=True)
    ]
    return torch.stack(parts).mean()


def parts_without_ends(
    losses: torch.Tensor, labels: torch.Tensor, targets: Any, *_: Any
) -> torch.Tensor:
    return sum(part[:, :-1].sum() for part in losses.split(16, 1)) / targets


def heavier(losses: torch.Tensor, labels: torch.Tensor, targets: Any, *_: Any) -> torch.Tensor:
    weights = torch.ones_like(losses)
    weights[:, ::2] = 2.0
    return (losses * weights).sum() / targets


def smoothed(
    losses: torch.Tensor, labels: torch.Tensor, targets: Any, logits: torch.Tensor, _: int
) -> torch.Tensor:
    even = -logits.log_softmax(-1).mean(-1)[labels != IGNORED].sum()
    return (0.9 * losses.sum() + 0.1 * even) / targets


def tempered(
    losses: torch.Tensor, labels: torch.Tensor, targets: Any, logits: torch.Tensor, _: int
) -> torch.Tensor:
    return cross_entropy((logits / 0.7).transpose(1, 2), labels, reduction="sum") / targets


def with_z_loss(
    losses: torch.Tensor, labels: torch.Tensor, targets: Any, logits: torch.Tensor, _: int
) -> torch.Tensor:
    return (losses.sum() + 0.01 * logits.logsumexp(-1).pow(2)[labels != IGNORED].sum()) / targets


class Unsynchronised(Trainer):
    def training_step(self, model: Any, *given: Any, **more: Any) -> Any:
        with model.no_sync():
            return super().training_step(model, *given, **more)


class Forgetful(Trainer):
    """Zeroes the gradient after each micro-batch but the last ones."""

    def training_step(self, model: Any, *given: Any, **more: Any) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 2:
            model.zero_grad()
        return super().training_step(model, *given, **more)


class ClippedEarly(Trainer):
    def training_step(self, model: Any, *given: Any, **more: Any) -> Any:
        loss = super().training_step(model, *given, **more)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        return loss


class Undivided(Trainer):
    """Does not know of the number of targets, and leaves the loss of a micro-batch as it is."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = model(**inputs).loss
        self.accelerator.backward(loss)
        return loss.detach()


def logs(name: str, change: Callable[[float], float]) -> type[Trainer]:
    class Logged(Trainer):
        def log(self, logs: Any, *given: Any, **more: Any) -> None:
            super().log(
                {key: change(value) if key == name else value for key, value in logs.items()},
                *given,
                **more,
            )

    return Logged


def same_data(trainer: type[Trainer] = Trainer) -> type[Trainer]:
    def loader(self: Any) -> Any:
        return torch.utils.data.DataLoader(
            self.train_dataset, self.args.per_device_train_batch_size, collate_fn=self.data_collator
        )

    return type("Same", (trainer,), {"get_train_dataloader": loader})


# Attention and models with a fault


def plain(
    seen_of: Callable[[int, Any], torch.Tensor | None], scale: float = 1.0, tiled: bool = False
) -> str:
    def attend(
        module: Any,
        q: Any,
        k: Any,
        v: Any,
        mask: Any,
        scaling: Any = None,
        sliding_window: Any = None,
        **_: Any,
    ) -> Any:
        times = q.shape[1] // k.shape[1]
        k, v = (
            x.repeat(1, times, 1, 1) if tiled else x.repeat_interleave(times, 1) for x in (k, v)
        )
        out = scaled_dot_product_attention(
            q, k, v, seen_of(q.shape[2], sliding_window), scale=scaling * scale
        )
        return out.transpose(1, 2).contiguous(), None

    name = f"bench_{len(AttentionInterface._global_mapping)}"
    AttentionInterface.register(name, attend)
    return name


def nearer(tokens: int, window: Any) -> torch.Tensor:
    return causal(tokens) & ~causal(tokens).tril(1 - window)


def causal(tokens: int, window: Any = None) -> torch.Tensor:
    return torch.ones(tokens, tokens).tril().bool()


def attends(**given: Any) -> Callable[[Any], None]:
    name = plain(given.pop("seen_of", causal), **given)
    return lambda model: model.set_attn_implementation(name)


def deaf(name: str) -> Callable[[Any], None]:
    """Cuts the gradient behind a module."""

    def change(model: Any) -> None:
        model.get_submodule(f"model.{name}").register_forward_hook(
            lambda _, __, out: out.detach().requires_grad_()
        )

    return change


def lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(
        model, LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    )


# Loops by hand that are right


def by_ddp(probe: Probe) -> Any:
    model = probe.model("llama")
    total = sum(label != IGNORED for row in probe.rows for label in row["labels"][1:])
    with record(model) as seen:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        batch = padded(probe.rows[rank() :: ranks()], probe)
        logits = wrapped(
            **{name: values for name, values in batch.items() if name != "labels"}
        ).logits[:, :-1]
        (
            cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="sum")
            * ranks()
            / total
        ).backward()
        return seen.step()


def by_accelerate(probe: Probe) -> Any:
    from accelerate import Accelerator

    model, accelerator = probe.model("llama"), Accelerator(cpu=True, gradient_accumulation_steps=3)
    total = sum(label != IGNORED for row in probe.rows for label in row["labels"][1:])
    with record(model) as seen:
        wrapped = accelerator.prepare(model)
        for at in (2, 1, 0):  # the last one, which reduces gradients, has rows on every rank
            rows = probe.rows[rank() :: ranks()][at::3]
            with accelerator.accumulate(wrapped):
                if rows:
                    batch = padded(rows, probe)
                    logits = wrapped(batch["input_ids"], batch["attention_mask"]).logits[:, :-1]
                    loss = (
                        cross_entropy(
                            logits.transpose(1, 2), batch["labels"][:, 1:], reduction="sum"
                        )
                        / total
                    )
                    accelerator.backward(loss * 3 * ranks())
        return seen.step()


def by_document(probe: Probe) -> Any:
    model = probe.model("qwen3")
    total = sum(label != IGNORED for row in probe.rows for label in row["labels"][1:])
    with record(model) as seen:
        for row in sorted(probe.rows, key=lambda row: len(row["input_ids"])):
            ids, labels = (torch.tensor(row[name]) for name in ("input_ids", "labels"))
            (
                cross_entropy(model(ids[None]).logits[0, :-1], labels[1:], reduction="sum") / total
            ).backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        return seen.step(grad_norm=float(norm))


MEANS, FACTOR, WEIGHTS = "mean of means", "scale|factor", "weigh"
GPT2 = {"kind": "gpt2", "sizes": {"tie_word_embeddings": False}}
WINDOW = {"kind": "mistral", "sizes": {"sliding_window": 16}}
TIED = {"sizes": {"tie_word_embeddings": True}}
# fmt: off
MUTANTS: dict[str, tuple[Make, str, int, str]] = {
    # transformers 31629: packing needs positions
    "packed, no positions": (inside(collator(packed, restart=False)), "documents see each "
                                                                      "other", 1, "see each other"),
    # transformers 46634
    "packed, mask of ones": (inside(collator(packed, ones=True)),
        "documents see each other, positions restart", 1, "see each other"),
    # NVIDIA-BioNeMo/bionemo-recipes 1449
    "packed, first labels kept": (inside(collator(packed, first=True)),
        "last tokens predict the next document", 1, "predict the first"),
    "bounds one token late": (inside(collator(packed, mask=1)),
        "first tokens belong to the document before", 1, "see each other"),
    "GPT-2 packed, mask only": (inside(collator(packed, restart=False, mask=0), **GPT2), "positions run on", 1, "positions"),
    "GPT-2, positions from 1": (inside(collator(change=late_positions), **GPT2), "positions one late", 1, "positions"),
    "GPT-2, padded at the left": (inside(collator(side="left"), **GPT2), "positions count padding", 1, "positions|padding"),
    "padded at the left, no mask": (inside(collator(side="left", mask=False)), "padding is seen", 1, "padding is seen"),
    "padding has labels": (inside(collator(fill=0)), "padding is trained", 1, "padding .*trained|predict padding"),
    # NVIDIA-NeMo/Megatron-Bridge 4660, huggingface/trl 1623
    "labels of padding's id masked": (inside(collator(change=ends_masked)), "ends have no loss", 1, "last tokens have no loss"),
    # huggingface/transformers 46897
    "shifted by collator and model": (inside(collator(change=shifted)), "shifted twice", 1, "shifted twice"),
    "not shifted": (inside(trainer=losses_by(lambda own, labels, n, *_: own.sum() / n, 0)), "not shifted", 1, "not shifted"),
    "prompts have labels": (inside(collator(change=prompts_trained)), "prompts are trained", 1, "prompts are trained"),
    "first answer token masked": (inside(collator(change=answers_late)), "first tokens of answers "
                                                                         "have no loss", 1, "no loss"),
    "no template found": (inside(collator(change=no_template)), "a document has no loss", 1, "documents? .*no loss"),
    "last row lost": (inside(collator(change=last_row_lost)), "a document is in no call", 1, "missing|no loss"),
    "cut at the right": (inside(rows=cut), "documents are cut short", 1, "cut short"),
    "cut at the left": (inside(rows=lambda probe: cut(probe, side=-1)), "only ends of documents", 1, "cut"),
    "blocks of 32 tokens": (inside(rows=in_blocks), "cut, and concatenated", 1, "see each other|cut"),
    "a row twice": (inside(rows=twice), "a document twice, another never", 1, "repeated|twice|more than once|same documents"),
    # huggingface/transformers 37766
    "micro-batches' means added": (inside(trainer=Undivided), "sum of means", 1, f"{MEANS}|{FACTOR}"),
    # huggingface/transformers 34511, huggingface/blog 2414
    "mean of micro-batches": (inside(trainer=losses_by(lambda own, labels, *n: own.sum() / counted(labels).sum() / n[2])),
        "mean of means", 1, f"{MEANS}|{FACTOR}"),
    "all tokens counted": (inside(trainer=losses_by(lambda own, labels, n, *_: own.sum() / labels.numel())),
        "divided by all tokens", 1, FACTOR),
    "mean of documents": (inside(trainer=losses_by(lambda own, labels, n, *_: (own.sum(-1) / counted(labels)).mean())),
        "mean of means of documents", 1, MEANS),
    "mean of parts of the loss": (inside(trainer=losses_by(mean_of_parts)), "mean of means of "
                                                                            "parts", 1, MEANS),
    "parts of the loss lose their ends": (inside(trainer=losses_by(parts_without_ends)), "tokens have no loss", 1, "no loss"),
    # modelscope/ms-swift 10035
    "some tokens weigh double": (inside(trainer=losses_by(heavier)), "weights of tokens", 1, WEIGHTS),
    "labels smoothed by hand": (inside(trainer=losses_by(smoothed)), "another objective", 1, "objective|smooth"),
    "logits divided by a temperature": (inside(trainer=losses_by(tempered)), "another objective", 1, "objective|logits"),
    "z-loss": (inside(trainer=losses_by(with_z_loss)), "another objective", 1, "objective|logits"),
    "gradients of a micro-batch lost": (inside(trainer=Forgetful), "documents have no loss", 1, "no loss|no call"),
    "each micro-batch clipped": (inside(trainer=ClippedEarly), "clipped before the step", 1, f"{FACTOR}|clip|micro-batch"),
    "logged loss tripled": (inside(trainer=logs("loss", lambda value: value * 3)), "logged loss", 1, "logged loss"),
    # radixark/miles 2132
    "norm logged after clipping": (inside(trainer=logs("grad_norm", lambda value: min(value, 0.1))), "logged norm", 1, "norm"),
    # unslothai/unsloth 8253, huggingface/transformers 29777
    "window lost": (inside(change=attends(), **WINDOW), "windows are ignored", 1, "window"),
    "not causal": (inside(change=attends(seen_of=lambda *_: None)), "tokens see later ones", 1, "not causal"),
    "window one too short": (inside(change=attends(seen_of=nearer), **WINDOW), "a window of 15, "
                                                                               "not 16", 1, "window"),
    "scores scaled wrongly": (inside(change=attends(scale=0.5)), "attention computes another "
                                                                 "thing", 1, "attention"),
    "KV heads tiled": (inside(change=attends(tiled=True)), "groups of heads are wrong", 1, "attention|heads"),
    # paiml/entrenar 314
    "tied embeddings, half the gradient": (inside(change=deaf("embed_tokens"), **TIED),
        "gradient of embeddings", 1, "parameters|embed|backward"),
    "gradient ends in a layer": (inside(change=deaf("layers.0.mlp")), "a layer has another "
                                                                      "gradient", 1, "parameters|backward"),
    "gradients not synchronised": (inside(trainer=Unsynchronised), "ranks differ", 2, "differ"),
    "same data on all ranks": (inside(trainer=same_data()), "documents repeated", 2, "repeated|twice|same documents"),
    "loss times ranks": (inside(trainer=losses_by(lambda own, labels, n, *_: own.sum() / n * ranks())),
        "factor of ranks", 2, FACTOR),
    "mean of ranks": (inside(trainer=losses_by(lambda own, labels, n, *_: own.sum() / counted(labels).sum() / ranks())),
        "mean of means", 2, MEANS),
    # Right ones
    "right: padded to multiples of 64": (inside(collator(multiple=64)), "", 1, ""),
    "right: padded at the left, positions": (inside(collator(side="left", change=from_padding)), "", 1, ""),
    "right: one document in each row": (inside(rows_each=1), "", 1, ""),
    "right: batches of five": (inside(rows_each=5, gradient_accumulation_steps=3), "", 1, ""),
    "right: packed, mask only": (inside(collator(packed, restart=False, mask=0)), "", 1, ""),
    "right: three rows packed each": (inside(flattened, kind="qwen3", rows_each=3), "", 1, ""),
    "right: activation checkpointing": (inside(gradient_checkpointing=True), "", 1, ""),
    "right: clipping, weight decay, warm-up": (inside(max_grad_norm=0.1, weight_decay=0.1, warmup_steps=10), "", 1, ""),
    "right: LoRA": (inside(change=lora), "", 1, ""),
    "right: tied embeddings": (inside(**TIED), "", 1, ""),
    "right: window": (inside(**WINDOW), "", 1, ""),
    "right: loss by hand": (inside(trainer=losses_by(lambda own, labels, n, *_: own.sum() / n)), "", 1, ""),
    "right: by document, sorted by length": (by_document, "", 1, ""),
    "right: accelerate by hand": (by_accelerate, "", 1, ""),
    "right: DDP by hand": (by_ddp, "", 2, ""),
    "right: accelerate by hand, two processes": (by_accelerate, "", 2, ""),
}
# fmt: on
