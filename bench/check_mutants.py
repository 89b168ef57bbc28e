"""What `longctx check-step` says of set-ups with one fault each, after published faults, and of right ones that look odd:

python -m bench.check_mutants                                               # one process
torchrun --standalone --nproc-per-node 2 -m bench.check_mutants             # two

Each row of `MUTANTS` has words that a right name of its fault has; none: the set-up is right. Writes bench/results/check_mutants.md.
"""

import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, DataCollatorWithFlattening, Trainer, TrainingArguments

from longctx.check import CheckError, Probe, check_step, record
from longctx.check.trainer import arguments

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.simplefilter("ignore")
Make = Callable[[Probe], Any]
RESULTS = Path(__file__).parent / "results" / "check_mutants.md"
IGNORED = -100


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    return int(os.environ.get("RANK", 0))


# Collators: batches of rows, with one fault if asked


def padded(rows: Any, probe: Probe, side: str = "right", multiple: int = 1, mask: bool = True, fill: int = IGNORED) -> Any:
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
    rows: Any, probe: Probe, restart: bool = True, ones: bool = False, first: bool = False, mask: int | None = None
) -> Any:
    """One row; `mask`: documents kept apart by a mask of four dimensions, whose bounds are so many tokens late."""
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    ids = torch.tensor([sum((row["input_ids"] for row in rows), [])])
    labels = torch.tensor([sum(([row["labels"][0] if first else IGNORED, *row["labels"][1:]] for row in rows), [])])
    batch = {"input_ids": ids, "labels": labels}
    if restart:
        batch["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    if ones:
        batch["attention_mask"] = torch.ones_like(ids)
    if mask is not None:
        document = torch.repeat_interleave(torch.arange(len(rows)), lengths).roll(mask)
        document[:mask] = 0
        seen = (document[:, None] == document) & torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
        batch["attention_mask"] = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    return batch


def collator(base: Callable[..., Any] = padded, change: Callable[[Any, Probe], None] | None = None, **given: Any) -> Any:
    def collate(rows: Any, probe: Probe) -> Any:
        batch = base(rows, probe, **given)
        if change:
            change(batch, probe)
        return batch

    return collate


def ends_masked(batch: Any, probe: Probe) -> None:
    batch["labels"][batch["input_ids"] == probe.pad] = IGNORED


def shifted(batch: Any, probe: Probe) -> None:
    batch["labels"] = torch.cat([batch["labels"][:, 1:], torch.full_like(batch["labels"][:, :1], IGNORED)], 1)


def prompts_trained(batch: Any, probe: Probe) -> None:
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)


def answers_late(batch: Any, probe: Probe) -> None:
    starts = (batch["labels"] != IGNORED).int().argmax(1)
    batch["labels"][torch.arange(len(starts)), starts] = IGNORED


def last_row_lost(batch: Any, probe: Probe) -> None:
    for name, values in batch.items():
        batch[name] = values[: max(1, len(values) - 1)]


def late_positions(batch: Any, probe: Probe) -> None:
    batch["position_ids"] = (torch.arange(batch["input_ids"].shape[1]) + 1).expand_as(batch["input_ids"])


def from_padding(batch: Any, probe: Probe) -> None:
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)


def no_template(batch: Any, probe: Probe) -> None:
    batch["labels"][batch["input_ids"].eq(probe.documents[-1][0]).any(1)] = IGNORED


# Rows of the data set


def cut(probe: Probe, most: int = 24, side: int = 1) -> Any:
    part = slice(None, most) if side > 0 else slice(-most, None)
    return [{name: values[part] for name, values in row.items()} for row in probe.rows]


def in_blocks(probe: Probe, size: int = 32) -> Any:
    ids = sum(probe.documents, [])
    return [{"input_ids": ids[at : at + size], "labels": ids[at : at + size]} for at in range(0, len(ids), size)]


def twice(probe: Probe) -> Any:
    rows = list(probe.rows)
    return [*rows[:-1], rows[-2]]


# Trainers


def inside(
    collate: Any = padded, trainer: type[Trainer] = Trainer, kind: str = "llama", change: Any = None, **more: Any
) -> Make:
    """A transformers.Trainer; `rows`, `sizes` and arguments of the trainer in `more`."""
    rows, sizes, more = more.pop("rows", None), more.pop("sizes", {}), more

    def make(probe: Probe) -> Any:
        data = rows(probe) if rows else probe.rows
        size = max(1, len(data) // probe.micro_batches // ranks())
        given = {"per_device_train_batch_size": size, "gradient_accumulation_steps": probe.micro_batches, "max_grad_norm": 0.0}
        model = probe.model(kind, **sizes)
        model = (change and change(model)) or model
        return trainer(model, TrainingArguments(**arguments(**given | more)), lambda batch: collate(batch, probe), data)

    return make


def losses_by(loss_of: Callable[..., torch.Tensor], shift: int = 1) -> type[Trainer]:
    """A trainer whose loss is `loss_of(losses [rows, tokens], labels, targets of the step, logits, micro-batches)`."""

    class Changed(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            labels = inputs.pop("labels")[:, shift:]
            logits = model(**inputs, use_cache=False).logits[:, : labels.shape[1]]
            losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            loss = loss_of(losses, labels, num_items_in_batch, logits, self.args.gradient_accumulation_steps) * ranks()
            return (loss, None) if return_outputs else loss

    return Changed


def counted(labels: torch.Tensor) -> torch.Tensor:
    return (labels != IGNORED).sum(-1).clamp(min=1)


def mean_of_parts(losses: torch.Tensor, labels: torch.Tensor, targets: Any, *_: Any) -> torch.Tensor:
    """Parts of 16 tokens, each with its own mean, as a fused loss in chunks would take it."""
    parts = [part.sum() / counted(label).sum() for part, label in zip(losses.split(16, 1), labels.split(16, 1), strict=True)]
    return torch.stack(parts).mean()


def parts_without_ends(losses: torch.Tensor, labels: torch.Tensor, targets: Any, *_: Any) -> torch.Tensor:
    return sum(part[:, :-1].sum() for part in losses.split(16, 1)) / targets


def heavier(losses: torch.Tensor, labels: torch.Tensor, targets: Any, *_: Any) -> torch.Tensor:
    weights = torch.ones_like(losses)
    weights[:, ::2] = 2.0
    return (losses * weights).sum() / targets


def smoothed(losses: torch.Tensor, labels: torch.Tensor, targets: Any, logits: torch.Tensor, _: int) -> torch.Tensor:
    even = -logits.log_softmax(-1).mean(-1)[labels != IGNORED].sum()
    return (0.9 * losses.sum() + 0.1 * even) / targets


def tempered(losses: torch.Tensor, labels: torch.Tensor, targets: Any, logits: torch.Tensor, _: int) -> torch.Tensor:
    return cross_entropy((logits / 0.7).transpose(1, 2), labels, reduction="sum") / targets


def with_z_loss(losses: torch.Tensor, labels: torch.Tensor, targets: Any, logits: torch.Tensor, _: int) -> torch.Tensor:
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
            super().log({key: change(value) if key == name else value for key, value in logs.items()}, *given, **more)

    return Logged


def same_data(trainer: type[Trainer] = Trainer) -> type[Trainer]:
    class Same(trainer):  # type: ignore[valid-type,misc]
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, self.args.per_device_train_batch_size, collate_fn=self.data_collator)

    return Same


# Attention and models with a fault


def plain(seen_of: Callable[[int, Any], torch.Tensor | None], scale: float = 1.0, tiled: bool = False) -> str:
    def attend(
        module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, sliding_window: Any = None, **_: Any
    ) -> Any:
        times = q.shape[1] // k.shape[1]
        k, v = (x.repeat(1, times, 1, 1) if tiled else x.repeat_interleave(times, 1) for x in (k, v))
        out = scaled_dot_product_attention(q, k, v, seen_of(q.shape[2], sliding_window), scale=scaling * scale)
        return out.transpose(1, 2).contiguous(), None

    name = f"bench_{len(AttentionInterface._global_mapping)}"
    AttentionInterface.register(name, attend)
    return name


def causal(tokens: int, window: Any = None) -> torch.Tensor:
    return torch.ones(tokens, tokens).tril().bool()


def attends(**given: Any) -> Callable[[Any], None]:
    name = plain(given.pop("seen_of", causal), **given)
    return lambda model: model.set_attn_implementation(name)


def deaf(module_of: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Cuts the gradient behind a module."""

    def change(model: Any) -> None:
        module_of(model).register_forward_hook(lambda _, __, out: out.detach().requires_grad_())

    return change


def lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"]))


# Loops of context parallelism by hand


class Gather(torch.autograd.Function):
    """Tensors of all ranks, stacked; its gradient is summed at the rank that owns it, if `summed`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, summed: bool) -> torch.Tensor:
        ctx.summed, parts = summed, [torch.empty_like(x) for _ in range(ranks())]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.contiguous()
        if ctx.summed:
            dist.all_reduce(grad)
        return grad[rank()], None


class Split:
    """Who holds which tokens of a row of documents, and which fault attention has."""

    def __init__(self, documents: torch.Tensor, zigzag: bool, way: str, fault: str) -> None:
        chunks = torch.arange(len(documents)).chunk(ranks() * 2)
        pairs = [(at, 2 * ranks() - 1 - at) if zigzag else (2 * at, 2 * at + 1) for at in range(ranks())]
        self.orders = [torch.cat([chunks[first], chunks[second]]) for first, second in pairs]
        self.documents, self.way, self.fault = documents, way, fault
        self.mine = self.orders[0 if fault == "same part" else rank()]

    def sees(self, queries: torch.Tensor, keys: torch.Tensor, window: int | None, alone: bool = True) -> torch.Tensor:
        seen = keys <= queries[:, None]
        if alone:
            seen &= self.documents[queries][:, None] == self.documents[keys]
        return seen & (queries[:, None] - keys < window) if window else seen

    def whole(self, x: torch.Tensor, summed: bool = True) -> torch.Tensor:
        stack = Gather.apply(x, summed)
        orders = self.orders[::-1] if self.fault == "ranks swapped" else self.orders
        back = torch.cat(orders).argsort()
        return torch.cat(list(stack), 2)[:, :, torch.arange(len(back)) if self.fault == "not reordered" else back]

    def gathered(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Any, **more: Any) -> torch.Tensor:
        k, v = (self.whole(x, self.fault != "gradient not returned") for x in (k, v))
        seen = self.sees(self.mine, torch.arange(k.shape[2]), window)
        return scaled_dot_product_attention(q, k, v, seen, **more)

    def ulysses(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Any, **more: Any) -> torch.Tensor:
        q, k, v = (self.whole(x).chunk(ranks(), 1)[rank()] for x in (q, k, v))
        tokens = torch.arange(q.shape[2])
        out = Gather.apply(
            scaled_dot_product_attention(q, k, v, self.sees(tokens, tokens, window), **more), self.fault != "own heads"
        )
        heads = list(out)[::-1] if self.fault == "heads swapped" else list(out)
        heads = torch.stack(heads, 2).flatten(1, 2) if self.fault == "heads interleaved" else torch.cat(heads, 1)
        return heads[:, :, self.mine]

    def ring(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Any, **more: Any) -> torch.Tensor:
        keys, values = (Gather.apply(x, True) for x in (k, v))
        outs, sums = [], []
        for step in range(1 if self.fault == "own part" else ranks()):
            owner = (rank() - step) % ranks()
            window = None if step and self.fault == "window in the first step" else window
            seen = self.sees(self.mine, self.orders[owner], window, not step or self.fault != "documents in the first step")
            if step and self.fault == "mask in each step":
                seen = seen & torch.ones_like(seen).tril()
            if step and self.fault == "one late":
                seen[:, -1] = False
            if step and self.fault == "future":
                seen = self.documents[self.mine][:, None] == self.documents[self.orders[owner]]
            if self.fault == "wrong rank":
                owner = (owner + step + 1) % ranks()
            key, value = keys[owner], values[owner]
            if self.fault == "stale in backward":
                key, value = (stack[owner].detach() + own - own.detach() for stack, own in ((keys, k), (values, v)))
            scores = (q @ key.transpose(2, 3) * more["scale"]).masked_fill(~seen, -1e30)
            outs.append(scores.softmax(-1) @ value * seen.any(1)[:, None])
            sums.append(scores.logsumexp(-1, keepdim=True))
            if self.fault == "no rescaling":
                sums[-1] = (~seen.any(1)[:, None] * -60.0).expand_as(sums[-1])
        return (torch.stack(outs) * torch.stack(sums).softmax(0)).sum(0)


SPLIT: list[Split] = []


def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, sliding_window: Any = None, **_: Any) -> Any:
    times, now = q.shape[1] // k.shape[1], SPLIT[-1]
    if now.fault == "heads tiled":
        k, v = k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)
    else:
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    return getattr(now, now.way)(q, k, v, sliding_window, scale=scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register("bench_split", attend)


def split(
    way: str = "gathered", fault: str = "", zigzag: bool = True, kind: str = "llama", each: bool = False, **sizes: Any
) -> Make:
    """A step on one row, split over ranks; `each`: every document is padded to a multiple of twice the ranks, not the row."""

    def make(probe: Probe) -> Any:
        table = []
        for number, row in enumerate(probe.rows):
            ids, labels = row["input_ids"], [*row["labels"][1:], IGNORED]
            more = -len(ids) % (2 * ranks()) if each else 0
            if more and fault == "padding predicted":
                labels[-1] = probe.pad
            table += zip(
                [*ids, *[probe.pad] * more], [*labels, *[IGNORED] * more], range(len(ids) + more), [number] * 999, strict=False
            )
        end = -len(table) % (2 * ranks())
        table += [(probe.pad, probe.pad if fault == "padding trained" else IGNORED, at, -1) for at in range(end)]
        ids, labels, positions, documents = torch.tensor(table).T
        model = probe.model(kind, **sizes)
        model.set_attn_implementation("bench_split")
        if fault == "bounds divided":
            part = torch.searchsorted(
                documents.unique_consecutive(return_counts=True)[1].cumsum(0) // ranks(), torch.arange(len(ids)) + 1
            )
            documents = part[: len(ids) // ranks()].repeat(ranks())
        now = Split(documents, zigzag, way, fault)
        SPLIT[:] = [now]
        mine, targets, where = now.mine, labels[now.mine], positions[now.mine]
        own = labels.roll(1)[mine]
        plain = torch.arange(len(ids)).chunk(ranks())[rank()]
        if fault == "shifted after the split":
            targets = torch.cat([own[1:], torch.tensor([IGNORED])])
        if fault == "rolled after the split":
            targets = own.roll(-1)
        if fault == "labels of another split":
            targets = labels[plain]
        if fault == "positions of the part":
            where = torch.arange(len(mine))
        if fault == "positions of another split":
            where = positions[plain]
        if fault == "positions begin with the part":
            where = positions[mine] - positions[mine][0] * (documents[mine] == documents[mine][0])
        if fault == "an offset is wrong":
            where = where + (documents[mine] == len(probe.rows) - 1) * (where > 8)
        total = (labels != IGNORED).sum()
        with record(model) as seen:
            logits = model(input_ids=ids[mine][None], position_ids=where[None], use_cache=False).logits[0]
            loss = cross_entropy(logits, targets, reduction="sum") / total
            if fault == "means of ranks":
                loss = cross_entropy(logits, targets) / ranks()
            loss.backward()
            factors = {"mean of gradients": 1 / ranks(), "loss of all ranks": ranks()}
            for name, parameter in model.named_parameters():
                if fault != "not reduced" and not (fault == "norms not reduced" and "norm" in name):
                    dist.all_reduce(parameter.grad)
                parameter.grad *= 1 / ranks() if fault == "norms averaged" and "norm" in name else factors.get(fault, 1)
            total_loss = loss.detach().clone()
            dist.all_reduce(total_loss)
            logged = loss if fault == "loss of one rank" else total_loss
            return seen.step(loss=float(logged) * factors.get(fault, 1), rows=[ids])

    return make


# Loops by hand that are right


def by_ddp(probe: Probe) -> Any:
    model = probe.model("llama")
    total = sum(label != IGNORED for row in probe.rows for label in row["labels"][1:])
    with record(model) as seen:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        batch = padded(probe.rows[rank() :: ranks()], probe)
        logits = wrapped(**{name: values for name, values in batch.items() if name != "labels"}).logits[:, :-1]
        (cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="sum") * ranks() / total).backward()
        return seen.step()


def by_accelerate(probe: Probe) -> Any:
    from accelerate import Accelerator

    model, accelerator = probe.model("llama"), Accelerator(cpu=True, gradient_accumulation_steps=3)
    total = sum(label != IGNORED for row in probe.rows for label in row["labels"][1:])
    with record(model) as seen:
        wrapped = accelerator.prepare(model)
        for at in range(3):
            rows = probe.rows[rank() :: ranks()][at::3]
            with accelerator.accumulate(wrapped):
                if rows:
                    batch = padded(rows, probe)
                    logits = wrapped(batch["input_ids"], batch["attention_mask"]).logits[:, :-1]
                    loss = cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="sum") / total
                    accelerator.backward(loss * 3 * ranks())
        return seen.step()


def by_document(probe: Probe) -> Any:
    model = probe.model("qwen3")
    total = sum(label != IGNORED for row in probe.rows for label in row["labels"][1:])
    with record(model) as seen:
        for row in sorted(probe.rows, key=lambda row: len(row["input_ids"])):
            ids, labels = (torch.tensor(row[name]) for name in ("input_ids", "labels"))
            (cross_entropy(model(ids[None]).logits[0, :-1], labels[1:], reduction="sum") / total).backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        return seen.step(grad_norm=float(norm))


MEANS, FACTOR, WEIGHTS = "mean of means", "scale|factor", "weigh"
MUTANTS: dict[str, tuple[Make, str, int, str]] = {
    # transformers 31629: packing needs positions
    "packed, no positions": (inside(collator(packed, restart=False)), "documents see each other", 1, "see each other"),
    # transformers 46634
    "packed, mask of ones": (
        inside(collator(packed, ones=True)),
        "documents see each other, positions restart",
        1,
        "see each other",
    ),
    # NVIDIA-BioNeMo/bionemo-recipes 1449
    "packed, first labels kept": (
        inside(collator(packed, first=True)),
        "last tokens predict the next document",
        1,
        "predict the first",
    ),
    "bounds one token late": (
        inside(collator(packed, mask=1)),
        "first tokens belong to the document before",
        1,
        "see each other",
    ),
    "GPT-2 packed, mask only": (
        inside(collator(packed, restart=False, mask=0), kind="gpt2", sizes={"tie_word_embeddings": False}),
        "positions run on",
        1,
        "positions",
    ),
    "GPT-2, positions from 1": (inside(collator(change=late_positions), kind="gpt2", sizes={"tie_word_embeddings": False}), "positions one late", 1, "positions"),
    "GPT-2, padded at the left": (
        inside(collator(side="left"), kind="gpt2", sizes={"tie_word_embeddings": False}),
        "positions count padding",
        1,
        "positions|padding",
    ),
    "padded at the left, no mask": (inside(collator(side="left", mask=False)), "padding is seen", 1, "padding is seen"),
    "padding has labels": (inside(collator(fill=0)), "padding is trained", 1, "padding .*trained|predict padding"),
    # NVIDIA-NeMo/Megatron-Bridge 4660, huggingface/trl 1623
    "labels of padding's id masked": (inside(collator(change=ends_masked)), "ends have no loss", 1, "last tokens have no loss"),
    # huggingface/transformers 46897
    "shifted by collator and model": (inside(collator(change=shifted)), "shifted twice", 1, "shifted twice"),
    "not shifted": (
        inside(trainer=losses_by(lambda losses, labels, n, *_: losses.sum() / n, 0)),
        "not shifted",
        1,
        "not shifted",
    ),
    "prompts have labels": (inside(collator(change=prompts_trained)), "prompts are trained", 1, "prompts are trained"),
    "first answer token masked": (inside(collator(change=answers_late)), "first tokens of answers have no loss", 1, "no loss"),
    "no template found": (inside(collator(change=no_template)), "a document has no loss", 1, "documents? .*no loss"),
    "last row lost": (inside(collator(change=last_row_lost)), "a document is in no call", 1, "no call|no loss"),
    "cut at the right": (inside(rows=cut), "documents are cut short", 1, "cut short"),
    "cut at the left": (inside(rows=lambda probe: cut(probe, side=-1)), "only ends of documents", 1, "cut"),
    "blocks of 32 tokens": (inside(rows=in_blocks), "cut, and concatenated", 1, "see each other|cut"),
    "a row twice": (inside(rows=twice), "a document twice, another never", 1, "repeated|twice|more than once"),
    # huggingface/transformers 37766
    "micro-batches' means added": (inside(trainer=Undivided), "sum of means", 1, f"{MEANS}|{FACTOR}"),
    # huggingface/transformers 34511, huggingface/blog 2414
    "mean of micro-batches": (
        inside(trainer=losses_by(lambda losses, labels, n, _, steps: losses.sum() / counted(labels).sum() / steps)),
        "mean of means",
        1,
        f"{MEANS}|{FACTOR}",
    ),
    "all tokens counted": (
        inside(trainer=losses_by(lambda losses, labels, n, *_: losses.sum() / labels.numel())),
        "divided by all tokens",
        1,
        FACTOR,
    ),
    "mean of documents": (
        inside(trainer=losses_by(lambda losses, labels, n, *_: (losses.sum(-1) / counted(labels)).mean())),
        "mean of means of documents",
        1,
        MEANS,
    ),
    "mean of parts of the loss": (inside(trainer=losses_by(mean_of_parts)), "mean of means of parts", 1, MEANS),
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
    "window lost": (
        inside(change=attends(), kind="mistral", sizes={"sliding_window": 16}, collate=collator(mask=True)),
        "windows are ignored",
        1,
        "window",
    ),
    "not causal": (inside(change=attends(seen_of=lambda *_: None), rows=None), "tokens see later ones", 1, "not causal"),
    "window one too short": (
        inside(
            change=attends(seen_of=lambda n, _: causal(n) & ~causal(n).tril(-16)), kind="mistral", sizes={"sliding_window": 17}
        ),
        "window of 16, not 17",
        1,
        "window",
    ),
    "scores scaled wrongly": (inside(change=attends(scale=0.5)), "attention computes another thing", 1, "attention"),
    "KV heads tiled": (inside(change=attends(tiled=True)), "groups of heads are wrong", 1, "attention|heads"),
    # paiml/entrenar 314
    "tied embeddings, half the gradient": (
        inside(change=deaf(lambda model: model.get_input_embeddings()), sizes={"tie_word_embeddings": True}),
        "gradient of embeddings",
        1,
        "parameters|embed",
    ),
    "gradient ends in a layer": (
        inside(change=deaf(lambda model: model.model.layers[0].mlp)),
        "a layer has another gradient",
        1,
        "parameters",
    ),
    "gradients not synchronised": (inside(trainer=Unsynchronised), "ranks differ", 2, "differ"),
    "same data on all ranks": (inside(trainer=same_data()), "documents repeated", 2, "repeated|twice|more than once"),
    "loss times ranks": (
        inside(trainer=losses_by(lambda losses, labels, n, *_: losses.sum() / n * ranks())),
        "factor of ranks",
        2,
        FACTOR,
    ),
    "mean of ranks": (
        inside(trainer=losses_by(lambda losses, labels, n, *_: losses.sum() / counted(labels).sum() / ranks())),
        "mean of means",
        2,
        MEANS,
    ),
    "zigzag gathered, arrival order": (split(fault="not reordered"), "halves are not put in order", 2, "order|causal|zigzag"),
    "gathered, ranks swapped": (
        split(fault="ranks swapped", zigzag=False),
        "keys and values of the wrong rank",
        2,
        "order|causal|rank",
    ),
    "KV gradient not returned": (
        split(fault="gradient not returned"),
        "gradient of keys and values of other ranks is lost",
        2,
        "parameters",
    ),
    "both ranks the first part": (
        split(fault="same part", way="gathered"),
        "half of the row is trained twice",
        2,
        "repeated|no call|twice",
    ),
    "ring, own part only": (split("ring", "own part", False), "ranks see only their own part", 2, "own part"),
    "ring, mask in each step": (
        split("ring", "mask in each step", False),
        "causal mask also between parts",
        2,
        "causal|mask|part|see",
    ),
    "ring, last key of the part before": (
        split("ring", "one late", False),
        "one token of the part before is not seen",
        2,
        "see",
    ),
    "ring, first rank sees the second": (split("ring", "future", False), "a later part is seen", 2, "not causal"),
    "ring, KV of the wrong rank": (
        split("ring", "wrong rank", False),
        "keys and values of the wrong rank",
        2,
        "rank|order|causal",
    ),
    "ring, no rescaling": (split("ring", "no rescaling", False), "no log-sum-exp", 2, "attention|log-sum-exp|ring"),
    "zigzag ring, no rescaling": (split("ring", "no rescaling"), "no log-sum-exp", 2, "attention|log-sum-exp|ring"),
    "ring, stale KV in backward": (split("ring", "stale in backward", False), "gradient of keys and values", 2, "parameters"),
    "ring, documents in the first step": (
        split("ring", "documents in the first step", False),
        "documents see each other in later steps",
        2,
        "see each other",
    ),
    "zigzag ring, documents in the first step": (
        split("ring", "documents in the first step"),
        "documents see each other in later steps",
        2,
        "see each other",
    ),
    "ring, window in the first step": (
        split("ring", "window in the first step", False, "mistral", sliding_window=16),
        "window is ignored in later steps",
        2,
        "window",
    ),
    "ring, bounds divided by ranks": (
        split("ring", "bounds divided", False),
        "wrong bounds of documents",
        2,
        "see each other|cut",
    ),
    "Ulysses, heads swapped": (split("ulysses", "heads swapped", False), "heads of ranks are swapped", 2, "attention|heads"),
    "Ulysses, heads interleaved": (
        split("ulysses", "heads interleaved", False),
        "heads in another order",
        2,
        "attention|heads",
    ),
    "Ulysses, heads tiled": (split("ulysses", "heads tiled", False), "groups of heads are wrong", 2, "attention|heads"),
    "Ulysses, gradient of own heads": (
        split("ulysses", "own heads", False),
        "gradient of heads on other ranks is lost",
        2,
        "parameters",
    ),
    "Ulysses, ranks swapped": (split("ulysses", "ranks swapped", False), "parts in another order", 2, "order|causal"),
    "shifted after the split": (
        split(fault="shifted after the split", zigzag=False),
        "last tokens of parts have no loss",
        2,
        "shifted after",
    ),
    "rolled after the split": (
        split(fault="rolled after the split", zigzag=False),
        "last tokens of parts predict the first ones",
        2,
        "after the split|predict",
    ),
    "labels contiguous, tokens zigzag": (split(fault="labels of another split"), "tokens predict others", 2, "labels|predict"),
    "positions of the part": (split(fault="positions of the part", zigzag=False), "positions of shards", 2, "positions"),
    "positions contiguous, tokens zigzag": (
        split(fault="positions of another split"),
        "positions of another split",
        2,
        "positions",
    ),
    "positions begin with the part": (
        split(fault="positions begin with the part", zigzag=False),
        "a document's positions begin anew on the second rank",
        2,
        "positions",
    ),
    "one document's offset wrong": (
        split(fault="an offset is wrong", zigzag=False),
        "one document skips a position",
        2,
        "positions",
    ),
    "mean of ranks' losses": (split(fault="means of ranks", zigzag=False), "mean of means", 2, "mean of means"),
    "mean of gradients": (split(fault="mean of gradients"), "factor of 1 / ranks", 2, "scale|factor"),
    "loss of all ranks": (split(fault="loss of all ranks"), "factor of ranks", 2, "scale|factor"),
    "gradients not reduced": (split(fault="not reduced"), "ranks differ", 2, "differ"),
    "norms not reduced": (split(fault="norms not reduced"), "ranks differ", 2, "differ"),
    "norms averaged": (split(fault="norms averaged"), "some parameters have half the gradient", 2, "parameters"),
    "padding of the row trained": (split(fault="padding trained"), "padding is trained", 2, "padding"),
    "padding of documents predicted": (
        split(fault="padding predicted", each=True),
        "last tokens predict padding",
        2,
        "padding",
    ),
    "loss of one rank logged": (split(fault="loss of one rank", zigzag=False), "logged loss", 2, "logged loss"),
    # Right ones
    "right: padded to multiples of 64": (inside(collator(multiple=64)), "", 1, ""),
    "right: padded at the left, positions": (inside(collator(side="left", change=from_padding)), "", 1, ""),
    "right: one document in each row": (inside(per_device_train_batch_size=1, gradient_accumulation_steps=12), "", 1, ""),
    "right: batches of five": (inside(per_device_train_batch_size=5, gradient_accumulation_steps=3), "", 1, ""),
    "right: packed, mask only": (inside(collator(packed, restart=False, mask=0)), "", 1, ""),
    "right: three rows packed each": (
        inside(
            lambda rows, probe: DataCollatorWithFlattening()(rows),
            kind="qwen3",
            per_device_train_batch_size=3,
            gradient_accumulation_steps=4,
        ),
        "",
        1,
        "",
    ),
    "right: activation checkpointing": (inside(gradient_checkpointing=True), "", 1, ""),
    "right: clipping, weight decay, warm-up": (inside(max_grad_norm=0.1, weight_decay=0.1, warmup_steps=10), "", 1, ""),
    "right: LoRA": (inside(change=lora), "", 1, ""),
    "right: tied embeddings": (inside(sizes={"tie_word_embeddings": True}), "", 1, ""),
    "right: window": (inside(kind="mistral", sizes={"sliding_window": 16}), "", 1, ""),
    "right: loss by hand": (inside(trainer=losses_by(lambda losses, labels, n, *_: losses.sum() / n)), "", 1, ""),
    "right: by document, sorted by length": (by_document, "", 1, ""),
    "right: accelerate by hand": (by_accelerate, "", 1, ""),
    "right: DDP by hand": (by_ddp, "", 2, ""),
    "right: accelerate by hand, two processes": (by_accelerate, "", 2, ""),
    "right: gathered": (split(zigzag=False), "", 2, ""),
    "right: zigzag gathered": (split(), "", 2, ""),
    "right: ring": (split("ring", zigzag=False), "", 2, ""),
    "right: zigzag ring, each document padded": (split("ring", each=True), "", 2, ""),
    "right: Ulysses": (split("ulysses", zigzag=False), "", 2, ""),
    "right: zigzag Ulysses": (split("ulysses"), "", 2, ""),
    "right: ring, window": (split("ring", zigzag=False, kind="mistral", sliding_window=16), "", 2, ""),
    "right: two processes, batches of two": (inside(per_device_train_batch_size=2, gradient_accumulation_steps=3), "", 2, ""),
}


def judged(kinds: list[str], unnamed: bool, words: str) -> str:
    """Returns what became of a mutant: its place in the table's counts."""
    if not words:
        return "false alarm" if kinds else "right"
    if any(re.search(words, kind) for kind in kinds):
        return "named"
    return "missed" if not kinds else "unnamed" if unnamed else "misnamed"


def main() -> None:
    rows, counts = [], Counter()
    for name, (make, fault, processes, words) in MUTANTS.items():
        if processes != ranks() or not re.search(sys.argv[1] if len(sys.argv) > 1 else "", name):
            continue
        try:
            report = check_step(make)
            kinds = list(dict.fromkeys(each.kind for verdict in report.verdicts for each in verdict.findings))
            became = judged(kinds, report.status == 2, words)
        except (CheckError, ValueError) as error:
            kinds, became = [f"refused: {str(error).splitlines()[0]}"], "refused"
        counts[became] += 1
        rows.append(f"| {name} | {fault or '-'} | {'; '.join(kinds) or 'right'} | {became} |")
        if rank() == 0:
            print(rows[-1], flush=True)
    if rank() == 0 and len(sys.argv) == 1:
        head = [
            f"## {ranks()} process{'es' * (ranks() > 1)}",
            "",
            ", ".join(f"{n} {name}" for name, n in counts.most_common()),
            "",
        ]
        table = "\n".join([*head, "| set-up | fault | verdict | |", "|---|---|---|---|", *rows, ""])
        parts = re.split("(?m)^(?=## )", RESULTS.read_text()) if RESULTS.exists() else []
        RESULTS.write_text(
            "\n".join(sorted([table, *(part.rstrip() + "\n" for part in parts if not part.startswith(head[0]))]))
        )


if __name__ == "__main__":
    main()
