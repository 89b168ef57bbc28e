"""Trainers and a loop with context parallelism by hand, right ones and with one fault each, for
`longctx.check`."""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader

from longctx.check import PROBES, CheckError, Probe, Step, check_step, record
from longctx.check.backward_ways import KEYS_WITHOUT_GRADIENT
from longctx.check.contexts import (
    COUNTED,
    CUT,
    GIVEN,
    LOCAL_POSITIONS,
    RANK_ROW,
    ROW_RESTARTED,
    SHARD,
)
from longctx.check.places import EXCHANGE, LATER, ORDER
from longctx.check.probe import END
from longctx.check.targets import NOT_SHIFTED, OF_OTHERS, SHIFTED_TWICE
from longctx.check.trainer import arguments
from tests.trainer_cases import as_rank

Make = Callable[[Probe], Any]


def pad(
    probe: Probe,
    left: bool = False,
    trained: bool = False,
    longest: int | None = None,
    prompts: bool = False,
) -> Any:
    """A data collator: pads rows at one side; padding or prompts may be trained, and rows cut."""

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
        size = max(len(row["input_ids"][:longest]) for row in rows)
        for row in rows:
            ids, labels = (
                row["input_ids"][:longest],
                row["input_ids" if prompts else "labels"][:longest],
            )
            more = size - len(ids)
            parts = (
                (ids, probe.pad),
                (labels, probe.pad if trained else -100),
                ([1] * len(ids), 0),
            )
            for column, (values, filler) in zip(columns.values(), parts, strict=True):
                column.append([filler] * more + values if left else values + [filler] * more)
        return {name: torch.tensor(values) for name, values in columns.items()}

    return collate


def trainer(
    probe: Probe,
    kind: Any = "qwen3",
    collator: Any = None,
    loss: Any = None,
    rows: Any = None,
    **more: Any,
) -> Any:
    """A transformers.Trainer whose one step takes all documents; `loss(logits, labels,
    accumulation)` replaces its own."""
    from transformers import Trainer, TrainingArguments

    class Own(Trainer):
        def compute_loss(
            self,
            model: Any,
            inputs: Any,
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            labels = inputs.pop("labels")
            return loss(model(**inputs).logits, labels, self.args.gradient_accumulation_steps)

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rows = rows or probe.rows
    size = max(1, -(-len(rows) // probe.micro_batches // ranks))
    steps = TrainingArguments(
        **arguments(
            per_device_train_batch_size=size,
            gradient_accumulation_steps=probe.micro_batches,
            seed=3,
            **more,
        )
    )
    model = probe.model(kind) if isinstance(kind, str) else kind
    return (Own if loss else Trainer)(model, steps, collator or pad(probe), rows)


def entropy(
    logits: torch.Tensor, labels: torch.Tensor, shift: int = 1, **more: Any
) -> torch.Tensor:
    return F.cross_entropy(
        logits[:, : logits.shape[1] - shift].flatten(0, 1), labels[:, shift:].flatten(), **more
    )


def by_row(logits: torch.Tensor, labels: torch.Tensor, _: int) -> torch.Tensor:
    rows = [
        entropy(logits[n : n + 1], labels[n : n + 1])
        for n in range(len(labels))
        if (labels[n, 1:] >= 0).any()
    ]
    return torch.stack(rows).mean()


def by_document(logits: torch.Tensor, labels: torch.Tensor, _: int) -> torch.Tensor:
    """Of one row, in which a first token has no label."""
    losses, document = entropy(logits, labels, reduction="none"), (labels < 0).cumsum(1)[0, 1:]
    several = [
        document == number
        for number in document.unique()
        if (labels[0, 1:][document == number] >= 0).any()
    ]
    return torch.stack(
        [losses[own].sum() / (labels[0, 1:][own] >= 0).sum() for own in several]
    ).mean()


def of_all_ranks(logits: torch.Tensor, labels: torch.Tensor, accumulation: int) -> torch.Tensor:
    """The mean of a micro-batch over all ranks; DDP divides by ranks."""
    count = (labels[:, 1:] >= 0).sum()
    dist.all_reduce(count)
    return entropy(logits, labels, reduction="sum") / count * dist.get_world_size() / accumulation


def masked(probe: Probe, sees: Callable[..., torch.Tensor]) -> Any:
    """A trainer on one row with a mask: `sees(query, key, document of the query, document of the
    key)`, by their places."""

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([[token for row in rows for token in row["input_ids"]]])
        labels = torch.tensor([[label for row in rows for label in (-100, *row["labels"][1:])]])
        places = torch.tensor([[at for row in rows for at in range(len(row["labels"]))]])
        row, document = torch.arange(ids.shape[1]), (places[0] == 0).cumsum(0)
        seen = sees(row[:, None], row, document[:, None], document)
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[
            None, None
        ]
        return {"input_ids": ids, "labels": labels, "position_ids": places, "attention_mask": mask}

    return trainer(probe, "llama", collate)


def sees_next(query: Any, key: Any, own: Any, other: Any) -> Any:
    return (key <= query + 1) & (own == other)


def sees_half(query: Any, key: Any, own: Any, other: Any) -> Any:
    """Every other token of the row's first document is seen by all others."""
    return (key <= query) & ((own == other) | ((other == 1) & (key % 2 == 0)))


def with_adapters(probe: Probe) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    return trainer(probe, get_peft_model(probe.model("llama"), config))


def with_adapters_of_transformers(probe: Probe) -> Any:
    """A model that two adapters were added to, of which one is active, and no PeftModel."""
    from peft import LoraConfig

    torch.manual_seed(1)
    model = probe.model("llama")
    for name, rank in (("unused", 2), ("active", 4)):
        config = LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)
        model.add_adapter(config, adapter_name=name)
    return trainer(probe, model)


def without_gradients_of(name: str) -> Make:
    """A trainer in which the gradients of some parameters are halved."""

    def make(probe: Probe) -> Any:
        model = probe.model("llama")
        for each, weight in model.named_parameters():
            if name in each:
                weight.register_hook(lambda slope: slope / 2)
        return trainer(probe, model)

    return make


def packed(probe: Probe, kind: str = "qwen3") -> Any:
    from transformers import DataCollatorWithFlattening

    return trainer(probe, kind, DataCollatorWithFlattening())


def by_trl(strategy: str | None, **more: Any) -> Make:
    def make(probe: Probe) -> Any:
        import datasets
        from trl import SFTConfig, SFTTrainer

        given: dict[str, Any] = {
            "per_device_train_batch_size": 12,
            "max_length": 64,
            "gradient_checkpointing": False,
            **more,
        }
        if strategy is not None:
            given |= {
                "packing": True,
                "packing_strategy": strategy,
                "per_device_train_batch_size": 6,
            }
        rows = datasets.Dataset.from_list([{"input_ids": ids} for ids in probe.documents])
        return SFTTrainer(
            probe.model("qwen3"),
            SFTConfig(**arguments(**given)),
            train_dataset=rows,
            processing_class=_tokenizer(probe),
        )

    return make


def _tokenizer(probe: Probe) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"<{number}>": number for number in range(probe.vocab_size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "<0>")), pad_token="<0>", eos_token="<1>"
    )


def ours(probe: Probe, **options: Any) -> Any:
    from longctx.trainers import dynamic_context_parallel

    made = trainer(probe)
    dynamic_context_parallel(
        made, tokens_per_rank=options.pop("tokens_per_rank", 256), profile="cpu-2core", **options
    )
    return made


# --- context parallelism by hand: zigzag shards, K and V gathered from all ranks


class Zigzag:
    """A loop with one fault, or none."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def shard(self, whole: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        chunks, rank = (
            whole.chunk(2 * dist.get_world_size()),
            dist.get_rank() if rank is None else rank,
        )
        return torch.cat([chunks[rank], chunks[-1 - rank]])

    def attend(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        scaling: float,
        **_: Any,
    ) -> Any:
        from torch.distributed.nn.functional import all_gather

        place, document = self.shard(self.places), self.shard(self.documents)
        ranks = range(dist.get_world_size())
        their_places, their_documents = place, document
        if "no exchange" not in self.fault:
            ks, vs = (list(all_gather(rows.contiguous())) for rows in (k, v))
            if self.fault == "no gradient of others":
                ks, vs = (
                    [each if n == dist.get_rank() else each.detach() for n, each in enumerate(rows)]
                    for rows in (ks, vs)
                )
            if self.fault == "values of another rank":
                vs = vs[1:] + vs[:1]
            if self.fault == "half the values of others":
                vs = [each if n == dist.get_rank() else each / 2 for n, each in enumerate(vs)]
            k, v = torch.cat(ks, 2), torch.cat(vs, 2)
            their_places, their_documents = (
                torch.cat([self.shard(whole, rank) for rank in ranks])
                for whole in (self.places, self.documents)
            )
        seen = their_places <= place[:, None]
        if "documents mixed" not in self.fault:
            seen = seen & (their_documents == document[:, None])
        k, v = (rows.repeat_interleave(module.num_key_value_groups, 1) for rows in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    def __call__(self, probe: Probe) -> Step:
        from transformers import AttentionInterface

        warnings.simplefilter("ignore", FutureWarning)
        AttentionInterface.register("zigzag", self.attend)
        ranks, model = dist.get_world_size(), probe.model("llama")
        tokens = [token for ids in probe.documents for token in ids]
        more = -len(tokens) % (2 * ranks)
        trained = [
            probe.trained(n, at) for n, ids in enumerate(probe.documents) for at in range(len(ids))
        ] + [False] * more
        labels = [
            token if use else -100 for token, use in zip(tokens + [0] * more, trained, strict=True)
        ]
        ids = torch.tensor(tokens + [probe.pad] * more)
        self.places = torch.arange(len(ids))
        self.documents = torch.tensor(
            [n for n, ids in enumerate(probe.documents) for _ in ids] + [-1] * more
        )
        starts = torch.tensor(
            [at for ids in probe.documents for at in range(len(ids))] + [0] * more
        )
        wanted = self.shard(torch.tensor([*labels[1:], -100]))
        if self.fault == "shifted after the split":
            own = self.shard(torch.tensor(labels))
            wanted = torch.cat([own[1:], own.new_tensor([-100])])
        if self.fault == "labels reversed":
            wanted = wanted.flip(0)
        with record(model) as seen:
            model.set_attn_implementation("zigzag")
            places = (
                torch.arange(len(wanted))
                if self.fault == "positions of the shard"
                else self.shard(starts)
            )
            places = places * 2 if self.fault == "positions doubled" else places
            logits = model(
                input_ids=self.shard(ids)[None], position_ids=places[None], use_cache=False
            ).logits[0]
            count = sum(label >= 0 for label in labels[1:])
            divisor = (
                int((wanted >= 0).sum()) * ranks if self.fault == "mean of the rank" else count
            )
            loss = F.cross_entropy(logits, wanted, reduction="sum") / divisor
            loss.backward()
            for weight in model.parameters():
                if self.fault != "not reduced":
                    dist.all_reduce(weight.grad)
                    weight.grad /= ranks if self.fault == "mean over ranks" else 1
            dist.all_reduce(loss := loss.detach())
            return seen.step(loss=float(loss), rows=[ids])


# --- cases: a trainer, a probe, and the kinds of faults

PLAIN, PROMPTS, ENDS, SEVERAL, FEW = PROBES
SHORT = Probe(lengths=(5, 9, 1, 13, 20))
"""For models whose gradients are fitted all at once, which takes longer."""


def right(probe: Probe) -> Any:
    return trainer(probe)


def left(probe: Probe, kind: str = "qwen3") -> Any:
    return trainer(probe, kind, pad(probe, left=True))


def everything(probe: Probe) -> Any:
    made = trainer(probe)
    made.get_train_dataloader = lambda: DataLoader(
        made.train_dataset, 12, collate_fn=made.data_collator
    )
    return made


def padding(probe: Probe) -> Any:
    return trainer(probe, collator=pad(probe, trained=True))


def prompts(probe: Probe) -> Any:
    return trainer(probe, collator=pad(probe, prompts=True))


def cut(probe: Probe) -> Any:
    return trainer(probe, collator=pad(probe, longest=32))


def ends(probe: Probe) -> Any:
    from transformers import DataCollatorForLanguageModeling

    tokenizer = _tokenizer(probe)
    tokenizer.pad_token = tokenizer.eos_token
    rows = [{"input_ids": ids} for ids in probe.documents]
    return trainer(probe, collator=DataCollatorForLanguageModeling(tokenizer, mlm=False), rows=rows)


def repeated(probe: Probe) -> Any:
    return trainer(probe, rows=[*probe.rows, *probe.rows[2:4]])


def ended(probe: Probe) -> Any:
    return trainer(
        probe, rows=[{name: [*values, END] for name, values in row.items()} for row in probe.rows]
    )


def pieces(probe: Probe) -> Any:
    rows = [
        {name: values[at : at + 16] for name, values in row.items()}
        for row in probe.rows
        for at in range(0, len(row["labels"]), 16)
    ]
    return trainer(probe, rows=rows)


def own(probe: Probe, loss: Any) -> Any:
    return trainer(probe, loss=loss)


def flattened_by_document(probe: Probe) -> Any:
    from transformers import DataCollatorWithFlattening

    return trainer(probe, collator=DataCollatorWithFlattening(), loss=by_document)


def twice(logits: Any, labels: Any, _: int) -> Any:
    return entropy(logits, labels, shift=2)


def unshifted(logits: Any, labels: Any, _: int) -> Any:
    return entropy(logits, labels, shift=0)


def mean(logits: Any, labels: Any, accumulation: int) -> Any:
    return entropy(logits, labels) / accumulation


def total(logits: Any, labels: Any, _: int) -> Any:
    return entropy(logits, labels, reduction="sum")


def of_type(probe: Probe, kind: str, **sizes: Any) -> Any:
    return trainer(probe, probe.model(kind, **sizes))


LOST = "first tokens of the later parts of documents have no loss"
CASES: dict[str, tuple[Make, Probe, list[str]]] = {
    **{f"right: {probe.name}": (right, probe, []) for probe in PROBES},
    "right: packed by position_ids": (packed, PROMPTS, []),
    "right: adapters": (with_adapters, SHORT, []),
    "right: adapters of transformers": (with_adapters_of_transformers, SHORT, []),
    "right: tied embeddings": (partial(of_type, kind="llama", tie_word_embeddings=True), SHORT, []),
    "right: windows": (
        partial(of_type, kind="gemma3_text", sliding_window=8, query_pre_attn_scalar=8),
        SHORT,
        [],
    ),
    "right: experts": (
        partial(of_type, kind="mixtral", num_local_experts=4, num_experts_per_tok=2),
        PLAIN,
        [],
    ),
    "right: TRL, rows": (by_trl(None), PLAIN, []),
    "right: TRL, bfd": (by_trl("bfd"), PLAIN, []),
    "packed by position_ids in gpt-oss": (partial(packed, kind="gpt_oss"), PLAIN, [ROW_RESTARTED]),
    "padded at the left": (left, PLAIN, ["first tokens are predicted from padding"]),
    "padding with labels": (padding, PLAIN, ["padding is trained"]),
    "prompts with labels": (prompts, PROMPTS, ["prompts are trained"]),
    "ends masked as padding": (ends, ENDS, ["last tokens have no loss"]),
    "ends that the probe has not": (
        ended,
        PLAIN,
        ["an end token was appended that the probe does not have"],
    ),
    "rows of 32 tokens": (cut, PLAIN, ["documents are cut short: tokens are in no call"]),
    "parts of 16 tokens": (pieces, PLAIN, [CUT, LOST]),
    "a document twice": (repeated, PLAIN, ["documents are repeated in the step"]),
    "means of micro-batches": (
        partial(own, loss=mean),
        SEVERAL,
        ["the loss is a mean of means of micro-batches"],
    ),
    "means of rows": (partial(own, loss=by_row), PLAIN, ["the loss is a mean of means of rows"]),
    "means of documents": (
        flattened_by_document,
        PLAIN,
        ["the loss is a mean of means of documents"],
    ),
    "the next token is seen": (
        partial(masked, sees=sees_next),
        PLAIN,
        ["tokens see the one after them, which they predict"],
    ),
    "half a document is seen": (
        partial(masked, sees=sees_half),
        PLAIN,
        [LATER],
    ),
    "a sum": (partial(own, loss=total), PLAIN, ["the loss has a wrong scale"]),
    "no shift": (partial(own, loss=unshifted), PLAIN, [NOT_SHIFTED]),
    "two shifts": (partial(own, loss=twice), PLAIN, [SHIFTED_TWICE]),
    "half a gradient": (without_gradients_of("k_proj"), PLAIN, ["the backward pass is wrong"]),
    "GPT-2, padded at the left": (
        partial(left, kind="gpt2"),
        PLAIN,
        # 241 labels are counted, of which the first one of the longest row is not predicted.
        [COUNTED, "first tokens are predicted from padding", "the loss has a wrong scale"],
    ),
    "GPT-2: transformers count first tokens": (
        partial(of_type, kind="gpt2"),
        SHORT,
        ["the loss has a wrong scale"],
    ),
}
ON_TWO: dict[str, tuple[Make, Probe, list[str]]] = {
    "right: Trainer": (right, SEVERAL, []),
    "right: longctx": (ours, PROMPTS, []),
    "right: longctx, degree 2": (
        partial(ours, mode="static", degree=2, tokens_per_rank=200),
        ENDS,
        [],
    ),
    "right: by hand": (Zigzag(), PROMPTS, []),
    "no exchange": (Zigzag("no exchange"), PLAIN, [SHARD]),
    "no exchange, documents mixed": (Zigzag("no exchange, documents mixed"), PLAIN, [RANK_ROW]),
    "means of micro-batches of all ranks": (
        partial(own, loss=of_all_ranks),
        SEVERAL,
        ["the loss is a mean of means of micro-batches of all ranks"],
    ),
    "documents mixed": (Zigzag("documents mixed"), PROMPTS, [ROW_RESTARTED]),
    "positions of the shard": (Zigzag("positions of the shard"), PLAIN, [LOCAL_POSITIONS]),
    "no gradient of others": (
        Zigzag("no gradient of others"),
        PLAIN,
        [KEYS_WITHOUT_GRADIENT],
    ),
    "mean of the rank": (
        Zigzag("mean of the rank"),
        PLAIN,
        ["the loss is a mean of means of ranks"],
    ),
    "mean over ranks": (Zigzag("mean over ranks"), PLAIN, ["the loss has a wrong scale"]),
    "not reduced": (Zigzag("not reduced"), PLAIN, ["gradients differ between ranks"]),
    "values of another rank": (Zigzag("values of another rank"), PLAIN, [ORDER]),
    "half the values of others": (Zigzag("half the values of others"), PLAIN, [EXCHANGE]),
    "positions doubled": (Zigzag("positions doubled"), PLAIN, [GIVEN]),
    "labels reversed": (
        Zigzag("labels reversed"),
        PLAIN,
        ["tokens are predicted from padding", OF_OTHERS],
    ),
    "right: the same data on all ranks": (everything, PLAIN, []),  # as with tensor parallelism
}


def faults(names: list[str], inferred: bool = False) -> dict[str, list[str]]:
    """On each rank: the kinds of faults of each case, or what was refused; `inferred` without what
    the output layer shows, as with losses that are fused with it."""
    with pytest.MonkeyPatch.context() as patch:
        if inferred:
            patch.setattr(
                sys.modules["longctx.check.gathered"], "look", lambda *given, **named: None
            )
        return _faults(names)


def _faults(names: list[str]) -> dict[str, list[str]]:
    found = {}
    for name in names:
        as_rank()
        make, probe, _ = CASES.get(name) or ON_TWO[name]
        try:
            found[name] = [
                finding.kind for finding in check_step(make, [probe]).verdicts[0].findings
            ]
        except CheckError as error:
            found[name] = [f"refused: {error}"]
    return found
