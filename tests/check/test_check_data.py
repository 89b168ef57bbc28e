"""`check_data`: who sees whom in batches is what models see, what has labels is said as it is, faults
are found, and right set-ups are silent."""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings, strategies
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from transformers import modeling_flash_attention_utils as flash_of_transformers
from transformers.masking_utils import flash_attention_mask
from trl import SFTConfig, SFTTrainer

from longctx.check import CheckError, Data, DataOfTrainer, Probe, UsageError, check_data
from longctx.check.data_batches import batch_of
from longctx.check.data_documents import ids_of_text
from longctx.check.data_labels import (
    BOS_TWICE,
    ENDS,
    FROM_PADDING,
    NEXT_DOCUMENT,
    NOTHING,
    OTHER,
    PADDING_TRAINED,
    SHIFTED,
)
from longctx.check.data_places import CUT, HIDDEN, LATER, MIXED, SEES_PADDING, places_of
from longctx.check.data_roles import Roles, Tokenizer
from longctx.check.data_shown import MISSING, REPEATED, SCALE
from longctx.check.data_sight import FLASH, READINGS, UNSEEN, marks, sight
from longctx.check.trainer import arguments
from longctx.cli import main
from tests.check.test_flash_attn_cpu import flash, padding
from tests.marks import examples
from tests.template_cases import FAMILIES
from tests.trainer_cases import conversations, tokenizer

Batch = dict[str, Any]
Rows = list[dict[str, Any]]
PAD, END, USER = 0, 1, 2
"""Ids of the tokenizer of `tests.trainer_cases`."""
TEXTS = conversations(12)
LENGTHS = (1, 2, 3, 5, 7, 8, 11)


def rows_of(lengths: Sequence[int], first: int = 5) -> Rows:
    """Returns rows of documents whose tokens are different ones, and that end with END."""
    found = []
    for length in lengths:
        ids = [*range(first, first + length - 1), END]
        first += length - 1
        found.append({"input_ids": ids, "labels": list(ids)})
    return found


def conversations_as_rows(made_by: Any) -> Rows:
    rows = []
    for text in TEXTS:
        rendered = made_by.apply_chat_template(text["messages"], tokenize=False)
        ids = made_by(rendered, add_special_tokens=False)["input_ids"]
        rows.append({"input_ids": ids, "labels": list(ids)})
    return rows


def kinds_of(made: Any, **given: Any) -> list[str]:
    return [finding.kind for finding in check_data(made, **given).findings]


# --- who sees whom, against models


def positions_of(*lengths: int) -> list[int]:
    return [place for length in lengths for place in range(length)]


def blocks(*lengths: int, dtype: torch.dtype) -> torch.Tensor:
    """A mask of four dimensions of documents that see themselves: True, or 0 to add."""
    number = torch.tensor([number for number, length in enumerate(lengths) for _ in range(length)])
    seen = (number[:, None] == number).tril()
    if dtype == torch.bool:
        return seen[None, None]
    least = torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, least)[None, None]


def lengths_given(*lengths: int) -> Batch:
    """What tells flash attention of documents."""
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


ONES = [[1] * 8]
SIGHTS: dict[str, Batch] = {
    "nothing": {},
    "a mask of ones": {"attention_mask": ONES},
    "padded at the right": {"attention_mask": [[1] * 8, [1] * 5 + [0] * 3]},
    "padded at the left": {"attention_mask": [[1] * 8, [0] * 3 + [1] * 5]},
    "a hole in the mask": {"attention_mask": [[1, 1, 0, 1, 1, 1, 1, 1]]},
    "positions": {"position_ids": [positions_of(3, 1, 4)]},
    "positions from 2 on": {"position_ids": [[2, 3, 2, 3, 4, 2, 3, 4]]},
    "positions of one document": {"position_ids": [positions_of(8)]},
    "positions that jump": {"position_ids": [[0, 1, 2, 5, 6, 7, 8, 9]]},
    "positions, two rows": {"position_ids": [positions_of(3, 5), positions_of(2, 1, 5)]},
    "positions and ones": {"attention_mask": ONES, "position_ids": [positions_of(3, 5)]},
    "positions and padding": {
        "attention_mask": [[1] * 6 + [0] * 2],
        "position_ids": [[*positions_of(3, 3), 0, 0]],
    },
    "numbers": {"attention_mask": [[1, 1, 1, 2, 2, 3, 3, 3]]},
    "numbers and padding": {"attention_mask": [[1, 1, 1, 2, 2, 3, 0, 0]]},
    "lengths": lengths_given(3, 5),
    "lengths, two rows": {"position_ids": [positions_of(8)] * 2, **lengths_given(3, 5, 8)},
    "lengths over rows": {"position_ids": [positions_of(8)] * 2, **lengths_given(6, 10)},
    "lengths and ones": {"attention_mask": ONES, **lengths_given(2, 6)},
    "lengths and positions": {"position_ids": [positions_of(3, 5)], **lengths_given(3, 5)},
    "lengths that are short": lengths_given(3, 4),
    "four dimensions": {"attention_mask": blocks(3, 5, dtype=torch.bool)},
    "four dimensions to add": {"attention_mask": blocks(3, 5, dtype=torch.float32)},
    "four dimensions of 0 and 1": {"attention_mask": blocks(3, 5, dtype=torch.bool).float()},
}


def batch_with(given: Batch) -> Batch:
    """A batch of eight tokens a row, and what is given as tensors."""
    tensors = {
        name: torch.tensor(value) if isinstance(value, list) else value
        for name, value in given.items()
    }
    rows = max(
        (len(tensors[name]) for name in ("attention_mask", "position_ids") if name in given),
        default=1,
    )
    ids = torch.arange(5, 5 + 8 * rows).view(rows, 8)
    return {"input_ids": ids, "labels": ids, **tensors}


def changed_by(
    forward: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor
) -> torch.Tensor:
    """Returns which tokens' outputs (first two axes) a token (last two) changes: [rows, tokens, rows,
    tokens], by giving the token other values."""
    rows, tokens, _ = values.shape
    before = forward(values)
    found = torch.zeros(rows, tokens, rows, tokens, dtype=torch.bool)
    for row in range(rows):
        for token in range(tokens):
            other = values.clone()
            other[row, token] += 1.0
            found[:, :, row, token] = (forward(other) - before).abs().amax(-1) > 1e-6
    return found


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", SIGHTS)
def test_who_sees_whom_is_what_a_model_sees(name: str, implementation: str) -> None:
    made = batch_with(SIGHTS[name])
    batch = batch_of([], made)
    model = Probe().model("llama", num_hidden_layers=1, attn_implementation=implementation)
    embedded = torch.randn(*batch.ids.shape, 32, generator=torch.Generator().manual_seed(0))
    given = {name: value for name, value in made.items() if name not in ("input_ids", "labels")}

    def forward(values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(inputs_embeds=values, use_cache=False, **given).logits
        return logits

    assert_sees(changed_by(forward, embedded), made, implementation)


OF_FLASH = [name for name in SIGHTS if "four" not in name and "short" not in name]


@pytest.mark.parametrize("name", OF_FLASH)
def test_who_sees_whom_in_flash_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers calls of it, with a stand-in that computes the same on a CPU."""
    functions = (
        flash.flash_attn_func,
        flash.flash_attn_varlen_func,
        None,
        padding.pad_input,
        padding.unpad_input,
    )
    process = flash_of_transformers._lazy_define_process_function(flash.flash_attn_varlen_func)
    monkeypatch.setattr(
        flash_of_transformers,
        "lazy_import_flash_attention",
        lambda implementation: (functions, (process, dict)),
    )
    made = batch_with(SIGHTS[name])
    mask = made.get("attention_mask")
    if mask is not None:
        mask = mask.bool()
    values = torch.randn(*made["input_ids"].shape, 8, generator=torch.Generator().manual_seed(0))
    tokens = values.shape[1]
    lengths = {name: value for name, value in made.items() if "_length" in name or "_lens_" in name}

    def forward(values: torch.Tensor) -> torch.Tensor:
        rows = len(values)
        heads = values[:, :, None]
        found: torch.Tensor = flash_of_transformers._flash_attention_forward(
            heads,
            heads,
            heads,
            attention_mask=flash_attention_mask(rows, tokens, tokens, attention_mask=mask),
            query_length=tokens,
            is_causal=True,
            position_ids=made.get("position_ids"),
            **lengths,
        )
        return torch.nan_to_num(found.view(rows, tokens, -1))

    assert_sees(changed_by(forward, values), made, FLASH)


def assert_sees(changed: torch.Tensor, made: Batch, reading: str) -> None:
    """Compares what changes with what is said of all tokens that are no padding."""
    batch = batch_of([], made)
    said = sight(batch, reading)
    rows, tokens = batch.ids.shape
    assert not said.unknown
    for row, token in batch.not_padded.nonzero().tolist():
        for key in range(tokens):
            expected = said.sees(row, token, key, tokens=tokens)
            if said.segments is not None and said.segments[row * tokens + token] == UNSEEN:
                expected = False
            if key != token:
                assert bool(changed[row, token, row, key]) == expected, (row, token, key)
    if said.segments is not None and rows > 1:
        across = changed[1, :, 0].any()
        segments = said.segments.view(rows, tokens)
        assert bool(across) == bool((segments[1, :, None] == segments[0]).any())


def test_readings_of_unknown_kinds_are_not_judged() -> None:
    batch = batch_of([], batch_with({"attention_mask": blocks(3, 5, dtype=torch.bool)}))
    assert "no mask of four dimensions" in sight(batch, FLASH).unknown
    batch = batch_of([], batch_with({"attention_mask": blocks(3, 5, dtype=torch.bool).long()}))
    assert "takes no mask of torch.int64" in sight(batch, "sdpa").unknown
    batch.given["position_ids"] = torch.zeros(3, 1, 8)
    assert {sight(batch, reading).unknown for reading in READINGS} == {
        "positions have several axes"
    }


MARKS: dict[str, tuple[Batch, list[str]]] = {
    "nothing": ({}, []),
    "positions": ({"position_ids": [positions_of(3, 5)]}, ["position_ids"]),
    "positions of one document": ({"position_ids": [positions_of(8)]}, []),
    "positions that are no document's": (
        {"attention_mask": [[0, 0, *[1] * 6]], "position_ids": [[1, 1, *positions_of(6)]]},
        [],
    ),
    "numbers": ({"attention_mask": [[1, 1, 1, 2, 2, 2, 0, 0]]}, ["attention_mask"]),
    "ones": ({"attention_mask": [[1] * 6 + [0] * 2]}, []),
    "indices": ({"seq_idx": [[0] * 3 + [1] * 5]}, ["seq_idx"]),
    "one index": ({"seq_idx": [[0] * 8]}, []),
    "lengths": (lengths_given(3, 5), ["cu_seq_lens_q"]),
    "lengths of one": (lengths_given(8), []),
    "four dimensions": ({"attention_mask": blocks(3, 5, dtype=torch.bool)}, ["attention_mask"]),
}


@pytest.mark.parametrize("name", MARKS)
def test_what_says_that_a_row_has_several_documents(name: str) -> None:
    given, expected = MARKS[name]
    assert list(marks(batch_of([], batch_with(given)))) == expected


# --- where documents are


@given(lengths=strategies.lists(strategies.sampled_from(LENGTHS), min_size=1, max_size=9))
@settings(max_examples=examples(60))
def test_every_document_is_placed(lengths: list[int]) -> None:
    """Joined or padded on either side, in another order, with padding that is the end of texts."""
    rows = rows_of(lengths)
    documents = [row["input_ids"] for row in rows]
    joined = [token for document in reversed(documents) for token in document]
    made_by = tokenizer()
    for pad in (PAD, END):
        made_by.pad_token_id = pad
        longest = max(lengths)
        at_the_left = [[pad] * (longest - len(ids)) + ids for ids in documents]
        at_the_right = [ids + [pad] * (longest - len(ids)) for ids in documents]
        for ids in (at_the_left, at_the_right, [joined + [pad] * 3], [joined]):
            batch = batch_of([], {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)})
            places = places_of(batch, documents, Tokenizer(made_by))
            assert (places.placing.left, places.placing.parts, places.unknown) == ([], {}, 0)
            found = sorted(
                piece.document for _, piece in places.pieces if piece.document is not None
            )
            assert found == list(range(len(documents)))
            padded = sum(len(row) for row in ids) - len(joined)
            # One token of padding may be an end that a collator adds.
            assert padded - len(ids) <= int(places.padding.sum()) <= padded


def padded(
    rows: Rows, *, left: bool = False, mask: bool = True, pad: int = PAD, trained: bool = False
) -> Batch:
    longest = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        missing = longest - len(row["input_ids"])
        filler = pad if trained else -100
        sides = (
            ("input_ids", row["input_ids"], pad),
            ("labels", row["labels"], filler),
            ("attention_mask", [1] * len(row["input_ids"]), 0),
        )
        for name, values, more in sides:
            values = list(values)
            batch[name].append([more] * missing + values if left else values + [more] * missing)
    if not mask:
        del batch["attention_mask"]
    return {name: torch.tensor(values) for name, values in batch.items()}


def without_first_label(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": row["input_ids"], "labels": [-100, *row["labels"][1:]]}


def padded_at_the_left(rows: Rows) -> Batch:
    return padded([without_first_label(row) for row in rows], left=True)


def left_without_mask(rows: Rows) -> Batch:
    return padded([without_first_label(row) for row in rows], left=True, mask=False)


def left_in_four(rows: Rows) -> Batch:
    """A mask that hides later tokens alone."""
    batch = padded_at_the_left(rows)
    count, width = batch["input_ids"].shape
    seen = torch.ones(count, 1, width, width, dtype=torch.bool).tril()
    return batch | {"attention_mask": seen}


def without_labels(rows: Rows) -> Batch:
    batch = padded(rows)
    return batch | {"labels": torch.full_like(batch["labels"], -100)}


def joined(
    rows: Rows,
    *,
    numbers: bool = False,
    ones: bool = False,
    positions: bool = True,
    first: bool = False,
) -> Batch:
    """One row; with a mask of ones or of documents' numbers, with positions; first tokens may have
    labels."""
    labelled = rows if first else [without_first_label(row) for row in rows]
    batch = {
        name: torch.tensor([[value for row in labelled for value in row[name]]])
        for name in ("input_ids", "labels")
    }
    lengths = [len(row["input_ids"]) for row in rows]
    if positions:
        batch["position_ids"] = torch.tensor([positions_of(*lengths)])
    counted = [number for number, length in enumerate(lengths, start=1) for _ in range(length)]
    if numbers:
        batch["attention_mask"] = torch.tensor([counted])
    if ones:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch


def shifted(rows: Rows) -> Batch:
    batch = padded(rows)
    labels = torch.full_like(batch["labels"], -100)
    labels[:, :-1] = batch["labels"][:, 1:]
    return batch | {"labels": labels}


def with_other_labels(rows: Rows) -> Batch:
    batch = padded(rows)
    batch["labels"][0, 1] += 1
    return batch


def with_hole(rows: Rows) -> Batch:
    batch = padded(rows)
    batch["attention_mask"][0, 1] = 0
    return batch


def in_four(rows: Rows, dtype: torch.dtype = torch.float32) -> Batch:
    batch = joined(rows, positions=False)
    lengths = [len(row["input_ids"]) for row in rows]
    return batch | {"attention_mask": blocks(*lengths, dtype=dtype)}


def in_four_with_later(rows: Rows) -> Batch:
    batch = in_four(rows)
    batch["attention_mask"][0, 0, 0, 1] = 0.0
    return batch


def with_lengths(rows: Rows, short: int = 0) -> Batch:
    batch = joined(rows)
    lengths = [len(row["input_ids"]) for row in rows]
    lengths[-1] -= short
    return batch | lengths_given(*lengths)


def with_lengths_alone(rows: Rows) -> Batch:
    batch = with_lengths(rows)
    del batch["position_ids"]
    return batch


def in_four_of_ones(rows: Rows) -> Batch:
    batch = in_four(rows, dtype=torch.bool)
    return batch | {"attention_mask": batch["attention_mask"].float()}


def with_positions_inside(rows: Rows) -> Batch:
    batch = joined(rows)
    batch["position_ids"][0, 2:] = torch.tensor(positions_of(batch["position_ids"].shape[1] - 2))
    return batch


def restarted_once(rows: Rows) -> Batch:
    """Positions begin anew with the third document, not with the second."""
    batch = joined(rows)
    first, second = (len(row["input_ids"]) for row in rows[:2])
    batch["position_ids"][0, : first + second] = torch.arange(first + second)
    return batch


FAULTS: dict[str, tuple[Callable[[Rows], Batch], Callable[[Rows], Batch], str, list[str]]] = {
    "a mask of ones": (joined, partial(joined, ones=True), "sdpa", [MIXED]),
    "numbers": (joined, partial(joined, numbers=True, positions=False), "", [MIXED]),
    "numbers and positions": (joined, partial(joined, numbers=True), "sdpa", [MIXED]),
    "positions begin anew too late": (joined, restarted_once, "", [MIXED]),
    "positions begin anew inside": (joined, with_positions_inside, "sdpa", [MIXED, CUT]),
    "later tokens": (in_four, in_four_with_later, "sdpa", [LATER]),
    "True and False are added": (
        in_four,
        partial(in_four, dtype=torch.bool),
        "eager",
        [MIXED, LATER],
    ),
    "padding is seen": (
        padded_at_the_left,
        left_without_mask,
        "",
        [SEES_PADDING],
    ),
    "padding is seen, four dimensions": (
        padded_at_the_left,
        left_in_four,
        "sdpa",
        [SEES_PADDING],
    ),
    "a hole in the mask": (padded, with_hole, "", [HIDDEN]),
    "first tokens have labels": (
        joined,
        partial(joined, first=True),
        "",
        [NEXT_DOCUMENT],
    ),
    "first tokens after padding": (
        padded_at_the_left,
        partial(padded, left=True),
        "",
        [FROM_PADDING],
    ),
    "padding is trained": (padded, partial(padded, trained=True), "", [PADDING_TRAINED]),
    "padding is trained, and the end of texts": (
        partial(padded, pad=END),
        partial(padded, pad=END, trained=True),
        "",
        [PADDING_TRAINED],
    ),
    "shifted labels": (padded, shifted, "", [SHIFTED]),
    "another label": (padded, with_other_labels, "", [OTHER]),
    "no label": (
        padded,
        without_labels,
        "",
        [NOTHING],
    ),
    "a document is missing": (padded, lambda rows: padded(rows[1:]), "", [MISSING]),
    "a document is twice": (padded, lambda rows: padded([*rows, rows[0]]), "", [REPEATED]),
    "lengths end early": (
        with_lengths,
        partial(with_lengths, short=1),
        "flash_attention_2",
        ["cu_seq_lens_q leave out the last tokens"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_a_right_batch_is_not_accused(name: str) -> None:
    right, wrong, attention, kinds = FAULTS[name]
    made_by = tokenizer()
    if "end of texts" in name:
        made_by.pad_token_id = END
    rows = rows_of((7, 3, 5))
    assert kinds_of(Data(rows, right, made_by, attention=attention)) == []
    assert kinds_of(Data(rows, wrong, made_by, attention=attention)) == kinds


def in_two_rows(rows: Rows) -> Batch:
    """Two rows of the first documents, whose positions begin anew."""
    first = joined(rows[:2])
    second = joined(rows[2:])
    return {name: torch.cat([first[name], second[name]]) for name in first}


CAUSES: dict[str, tuple[Callable[[Rows], Batch], str, str]] = {
    "positions, and ones": (
        partial(joined, ones=True),
        "sdpa",
        "with an attention mask, positions that begin anew part nothing",
    ),
    "numbers": (
        partial(joined, numbers=True, positions=False),
        "",
        "transformers reads numbers of attention_mask as 0 or 1",
    ),
    "lengths": (with_lengths_alone, "eager", "eager does not part them by cu_seq_lens_q"),
    "True and False": (
        partial(in_four, dtype=torch.bool),
        "eager",
        "eager adds this mask to scores, and it hides nothing",
    ),
    "0 and 1": (
        in_four_of_ones,
        "sdpa",
        "sdpa adds this mask to scores, and it hides nothing",
    ),
    "elsewhere": (restarted_once, "", "positions do not begin anew there"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_said(name: str) -> None:
    collate, attention, cause = CAUSES[name]
    findings = check_data(
        Data(rows_of((7, 3, 5)), collate, tokenizer(), attention=attention)
    ).findings
    assert findings[0].kind == MIXED
    assert findings[0].details.endswith(f"; {cause}")


def test_documents_that_begin_alike_are_told_apart() -> None:
    """In any order, and where two look like a third."""
    short = [5, 6, END]
    long = [5, 6, END, 8, 7, END]
    for documents, row in (
        ([short, long], [*long, *short]),
        ([long, short], [*short, *long]),
        ([short, [9, 7, END], long], [*short, 9, 7, END, *long]),
        ([[7, 9, END], short, long], [*long, *short, 7, 9, END]),
    ):
        rows = [{"input_ids": ids, "labels": ids} for ids in documents]
        given = {"input_ids": torch.tensor([row]), "labels": torch.tensor([row])}
        report = check_data(Data(rows, partial(as_given, given=given), tokenizer()))
        assert report.findings == []
        words = "\n".join(report.facts)
        assert "no document" not in words and "cut" not in words


def test_a_document_that_is_repeated_among_other_tokens() -> None:
    rows = rows_of((9, 4))
    more = [60, 61, *rows[0]["input_ids"], 62, 63]
    row = [token for each in rows for token in each["input_ids"]] + more
    given = {"input_ids": torch.tensor([row]), "labels": torch.tensor([row])}
    assert kinds_of(Data(rows, partial(as_given, given=given), tokenizer())) == [REPEATED]


def as_given(_: Rows, given: Batch) -> Batch:
    return given


def test_a_separator_is_no_padding() -> None:
    """An end that a collator adds between documents, though padding is the same token."""
    made_by = tokenizer()
    made_by.pad_token_id = END
    rows = [
        {"input_ids": row["input_ids"][:-1], "labels": row["labels"][:-1]}
        for row in rows_of((7, 5))
    ]

    def separated(given: Rows) -> Batch:
        ids = [*given[0]["input_ids"], END, *given[1]["input_ids"], END]
        return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([ids])}

    report = check_data(Data(rows, separated, made_by))
    assert report.findings == []
    words = "\n".join(report.facts)
    assert "no document and no padding: 2, 2 of them targets" in words
    assert "special tokens at the end of 2 documents, mostly [E], 2 of them targets" in words


def test_rows_may_be_padded_before_they_are_collated() -> None:
    """Positions of padding are all 0 there, as in packed rows of LLaMA-Factory."""
    row = {
        "input_ids": [*range(5, 10), END, *range(10, 13), END, PAD, PAD, PAD],
        "labels": [-100, *range(6, 10), END, -100, 11, 12, END, -100, -100, -100],
        "position_ids": [*positions_of(6, 4), 0, 0, 0],
    }
    whole = partial(columns, names=("input_ids", "labels", "position_ids"))
    report = check_data(Data([row], whole, tokenizer()))
    assert report.findings == []
    assert report.facts[0] == "read: 2 documents in 1 row of 1 batch: 13 tokens, 3 of padding"
    del row["position_ids"]
    report = check_data(Data([row], partial(columns, names=("input_ids", "labels")), tokenizer()))
    assert report.facts[0] == "read: 1 document in 1 row of 1 batch: 13 tokens, 3 of padding"


def columns(rows: Rows, names: Sequence[str]) -> Batch:
    return {name: torch.tensor([row[name] for row in rows]) for name in names}


def test_labels_that_are_shifted_have_no_picture() -> None:
    """As they stand at other tokens than their own."""
    report = check_data(Data(rows_of((7, 3, 5)), shifted, tokenizer()))
    assert report.picture == []
    assert not any(fact.startswith("ends") for fact in report.facts)
    right = check_data(Data(rows_of((7, 3, 5)), padded, tokenizer()))
    assert len(right.picture) == 2


def test_readings_that_differ_are_said() -> None:
    rows = rows_of((7, 3, 8, 2))
    apart = Data(rows, in_two_rows, tokenizer())
    said = "data: documents see each other in flash attention; not in eager, sdpa, flex_attention"
    assert said in check_data(apart).lines()
    apart.attention = "sdpa"
    assert kinds_of(apart) == []
    apart.attention = "kernels-community/flash-attn3"
    (finding,) = check_data(apart).findings
    assert finding.kind == MIXED
    assert finding.details.endswith("flash attention reads positions of batches of one row")
    apart.attention = "own"
    report = check_data(apart)
    assert report.findings == []
    assert report.not_tested["who sees whom"] == "attn_implementation 'own' is not known"
    apart.collate = partial(in_four, dtype=torch.bool)
    apart.attention = ""
    lines = check_data(apart).lines()
    assert f"data: {LATER} in eager, flex_attention; not in sdpa" in lines


def test_documents_that_nothing_marks_are_a_choice() -> None:
    rows = rows_of((7, 3))
    report = check_data(Data(rows, partial(joined, positions=False, first=True), tokenizer()))
    assert report.status == 0
    words = "\n".join(report.facts)
    assert "nothing marks them: 3 tokens, the first is token 7 of row 0 of batch 0" in words
    assert "first tokens of documents that follow another are targets: token 7 of row 0" in words


def test_rows_that_say_where_documents_begin_must_be_heard() -> None:
    """As TRL's rows do by `seq_lengths`, and others' by positions or numbers in the mask."""
    ids = [*range(5, 12), END, *range(12, 15), END]
    labels = [-100, *ids[1:8], -100, *ids[9:]]
    ways = {
        "seq_lengths": [8, 4],
        "position_ids": positions_of(8, 4),
        "attention_mask": [1] * 8 + [2] * 4,
    }
    for name, value in ways.items():
        row = {"input_ids": ids, "labels": labels, name: value}
        assert kinds_of(Data([row], padded, tokenizer())) == [MIXED], name
    assert kinds_of(Data([{"input_ids": ids, "labels": labels}], padded, tokenizer())) == []


# --- collators of others


def as_conversations(made_by: Any) -> Rows:
    """The conversations as rows, with labels of all tokens."""
    rows = []
    for text in TEXTS:
        rendered = made_by.apply_chat_template(text["messages"], tokenize=False)
        ids = made_by(rendered, add_special_tokens=False)["input_ids"]
        rows.append({"input_ids": ids, "labels": list(ids)})
    return rows


def ids_alone(rows: Rows) -> Rows:
    return [{"input_ids": row["input_ids"]} for row in rows]


def test_collators_of_transformers() -> None:
    made_by = tokenizer()
    rows = as_conversations(made_by)
    language = DataCollatorForLanguageModeling(made_by, mlm=False)
    right = {
        "positions": (rows, DataCollatorWithFlattening()),
        "all that flash attention takes": (
            rows,
            DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
        ),
        "padded": (rows, DataCollatorForSeq2Seq(made_by)),
        "ids alone": (ids_alone(rows), language),
        "lists": ([row["input_ids"] for row in rows], language),
    }
    for name, (taken, collate) in right.items():
        report = check_data(Data(taken, collate, made_by, texts=TEXTS))
        assert report.findings == [], name
        said = "data: who sees whom, in usual models: tokens see what is before them in their doc"
        assert any(line.startswith(said) for line in report.lines()), name
    kwargs = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=False)
    for attention, kinds in (("flash_attention_2", []), ("sdpa", [MIXED]), ("", [])):
        assert kinds_of(Data(rows, kwargs, made_by, attention=attention)) == kinds
    made_by.add_special_tokens({"mask_token": "[M]"})
    masked = DataCollatorForLanguageModeling(made_by, mlm=True, mlm_probability=0.5, seed=0)
    assert kinds_of(Data(ids_alone(rows), masked, made_by)) == [OTHER]


def test_padding_that_is_the_end_of_texts() -> None:
    made_by = tokenizer()
    made_by.pad_token = made_by.eos_token
    rows = as_conversations(made_by)
    collate = DataCollatorForLanguageModeling(made_by, mlm=False)
    (finding,) = check_data(Data(ids_alone(rows), collate, made_by)).findings
    ends = sum(row["input_ids"].count(END) for row in rows)
    assert finding.kind == ENDS and f"{ends} tokens" in finding.details
    assert "all [E]; give padding its own token" in finding.details
    made_by.padding_side = "left"
    assert kinds_of(Data(ids_alone(rows), collate, made_by)) == [FROM_PADDING, ENDS]
    # Where rows' own labels leave out the ends, it is a choice.
    for row in rows:
        row["labels"] = [-100 if token == END else token for token in row["labels"]]
    made_by.padding_side = "right"
    report = check_data(Data(rows, DataCollatorForSeq2Seq(made_by), made_by))
    assert report.status == 0
    assert any("nothing trains a model to stop there: 12" in fact for fact in report.facts)


def test_ends_that_are_lost_are_those_after_targets() -> None:
    made_by = tokenizer()
    made_by.pad_token = made_by.eos_token
    ids = [USER, 5, 6, END, 7, 8, END]

    def collate(rows: Rows) -> Batch:
        return {
            "input_ids": torch.tensor([ids]),
            "labels": torch.tensor([[-100] * 4 + [7, 8, -100]]),
        }

    (finding,) = check_data(Data([{"input_ids": ids}], collate, made_by)).findings
    assert finding.kind == ENDS
    assert finding.details.startswith("token 6 of row 0 of batch 0, all [E]")
    # Where one of them is trained, the others are left out by choice.
    other = [USER, 5, END, 9, END]

    def collate_two(rows: Rows) -> Batch:
        row = [*ids, *other]
        labels = [*[-100] * 4, 7, 8, *[-100] * 4, 9, END]
        return {"input_ids": torch.tensor([row]), "labels": torch.tensor([labels])}

    assert kinds_of(Data([{"input_ids": ids}, {"input_ids": other}], collate_two, made_by)) == []


def test_an_end_after_what_is_not_trained_is_no_lost_one() -> None:
    rows = rows_of((7, 3))
    rows[0]["labels"] = [-100] * 4 + rows[0]["labels"][4:]
    rows[1]["labels"] = [-100] * 3
    report = check_data(Data(rows, padded, tokenizer()))
    assert (
        "ends: special tokens at the end of 2 documents, mostly [E], 1 of them targets"
        in report.facts
    )
    assert not any("trains a model to stop" in fact for fact in report.facts)
    assert "documents without a target: 1" in report.facts


def test_labels_that_are_given_shifted_are_those_that_count() -> None:
    """As `shift_labels`, which losses of transformers take in place of labels."""

    def with_shifted(rows: Rows) -> Batch:
        return padded(rows) | {"shift_labels": shifted(rows)["labels"]}

    right = check_data(Data(rows_of((7, 3, 5)), with_shifted, tokenizer()))
    assert right.findings == []
    assert "N: 12 targets in a batch, 12 in all" in right.facts

    def not_shifted(rows: Rows) -> Batch:
        return padded(rows) | {"shift_labels": padded(rows)["labels"]}

    assert kinds_of(Data(rows_of((7, 3, 5)), not_shifted, tokenizer())) == [OTHER]


def test_a_begin_that_is_also_padding_is_no_lost_end() -> None:
    made_by = tokenizer()
    made_by.pad_token = made_by.bos_token = made_by.eos_token
    rows = [{"input_ids": [END, 5, 6]}, {"input_ids": [END, 7, 8, 9]}]
    assert kinds_of(Data(rows, DataCollatorWithFlattening(), made_by)) == []


def test_a_begin_that_is_there_twice() -> None:
    made_by = tokenizer()
    made_by.bos_token = "[X]"
    once = [
        {"input_ids": [4, *row["input_ids"]], "labels": [4, *row["labels"]]}
        for row in rows_of((3, 5))
    ]
    twice = [{"input_ids": [4, *row["input_ids"]], "labels": [4, *row["labels"]]} for row in once]
    assert kinds_of(Data(once, padded, made_by)) == []
    assert kinds_of(Data(twice, padded, made_by)) == [BOS_TWICE]


def sft(rows: Rows = TEXTS, made_by: Any = None, **given: Any) -> SFTTrainer:
    model = Probe().model("llama")
    config = SFTConfig(**arguments(per_device_train_batch_size=4, **given))
    return SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=made_by or tokenizer(),
    )


PAIRS = [{"prompt": text["messages"][:1], "completion": text["messages"][1:2]} for text in TEXTS]
SETUPS: dict[str, tuple[Rows, dict[str, Any], str]] = {
    "padded": (TEXTS, {"max_length": None}, "user {user} of {user}"),
    "packing": (TEXTS, {"max_length": 128, "packing": True}, "user {user} of {user}"),
    "padding_free": (TEXTS, {"max_length": None, "padding_free": True}, "user {user} of {user}"),
    "assistant": (TEXTS, {"max_length": None, "assistant_only_loss": True}, "user 0 of {user}"),
    "completion": (PAIRS, {"max_length": None}, "user 0 of {user}"),
}


@pytest.mark.parametrize("name", SETUPS)
def test_right_trainers_of_trl(name: str) -> None:
    rows, given, trained = SETUPS[name]
    trainer = sft(rows, **given)
    before = (trainer.data_collator, trainer.args)
    report = check_data(DataOfTrainer(trainer, texts=rows))
    assert report.findings == []
    assert (trainer.data_collator, trainer.args) == before
    conversation = [text.get("messages") or [*text["prompt"], *text["completion"]] for text in rows]
    words = {
        role: sum(
            len(message["content"].split())
            for messages in conversation
            for message in messages
            if message["role"] == role
        )
        for role in ("user", "assistant")
    }
    (by_role,) = [fact for fact in report.facts if fact.startswith("trained by role: ")]
    assert "assistant {assistant} of {assistant}".format(**words) in by_role
    assert trained.format(**words) in by_role
    (counted,) = [fact for fact in report.facts if fact.startswith("N: ")]
    assert counted.endswith("and the Trainer counts as many")
    assert not any(
        "cut" in fact or "no text" in fact or "in no row" in fact for fact in report.facts
    )


def test_texts_over_several_rows_and_cut_ones() -> None:
    wrapped = sft(max_length=50, packing=True, packing_strategy="wrapped")
    report = check_data(DataOfTrainer(wrapped, texts=TEXTS))
    words = "\n".join(report.facts)
    assert report.status == 0
    assert "of them are parts of texts" in words and "nothing marks them" in words
    assert "in no row" not in words and "no text" not in words
    assert "rows of several documents" in check_data(wrapped).not_tested
    total = sum(len(row["input_ids"]) for row in as_conversations(tokenizer()))
    for way in ("keep_start", "keep_end"):
        cut = sft(max_length=30, truncation_mode=way)
        kept = sum(len(row["input_ids"]) for row in cut.train_dataset)
        facts = check_data(DataOfTrainer(cut, texts=TEXTS)).facts
        (said,) = [fact for fact in facts if fact.startswith("cut texts: ")]
        assert said.endswith(f", of which {total - kept} tokens are in no row")
    few = check_data(DataOfTrainer(sft(TEXTS[:-2], max_length=None), texts=TEXTS))
    assert "texts that are in no row: 2 of 12" in few.facts
    first = check_data(DataOfTrainer(sft(max_length=None), texts=TEXTS, most_rows=4))
    assert first.not_tested["other rows"] == "8 were not read (most_rows)"
    assert not any("in no row" in fact for fact in first.facts)


@pytest.mark.parametrize("width", [16, 33, 64, 200])
def test_rows_that_cut_texts_anywhere_are_parted_where_texts_are(width: int) -> None:
    """Every token is that of a text, whatever row it is in."""
    made_by = PreTrainedTokenizerFast(
        tokenizer_object=FAMILIES["SmolLM2"].tokenizer, **FAMILIES["SmolLM2"].named
    )
    made_by.chat_template = FAMILIES["SmolLM2"].template
    made_by.pad_token = "<|endoftext|>"
    conversations = dict(FAMILIES["SmolLM2"].conversations)
    del conversations["ends with a question"]  # it begins with the whole of another
    texts = [*conversations.values(), "", "plain words"]
    ids = [token for text in texts for token in ids_of_text(text, made_by)]
    rows = [{"input_ids": ids[at : at + width]} for at in range(0, len(ids), width)]
    for row in rows:
        row["labels"] = row["input_ids"]
    in_another_order = [*rows[1::2], *rows[::2]]
    report = check_data(Data(in_another_order, padded, made_by, texts=texts))
    assert report.findings == []
    words = "\n".join(report.facts)
    assert not re.search("no row|no text|no document and|repeated", words), words
    assert f"special tokens at the end of {len(texts) - 2} documents, mostly <|im_end|>" in words


def test_the_number_that_a_trainer_divides_by() -> None:
    """GPT-2's loss has another name, for which Trainer counts first tokens, too."""
    rows = rows_of((7, 3, 5))
    for kind, kinds in (("llama", []), ("gpt2", [SCALE])):
        steps = TrainingArguments(**arguments(per_device_train_batch_size=3))
        model = Probe().model(kind)
        made = Trainer(model, steps, padded, rows, processing_class=tokenizer())
        report = check_data(made)
        assert [finding.kind for finding in report.findings] == kinds
    (finding,) = report.findings
    assert finding.details == (
        "× 0.8 in batch 0: the Trainer divides by 15, and 12 tokens have a loss"
    )


# --- roles


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_are_those_that_templates_mark(family: str) -> None:
    """What the assistant says, and only that, is its messages, their ends, and what templates write
    for it beside them."""
    kind = FAMILIES[family]
    made_by = PreTrainedTokenizerFast(tokenizer_object=kind.tokenizer, **kind.named)
    asked = Tokenizer(made_by)
    roles = Roles(asked)
    found = dict[str, tuple[list[int], list[int]]]()
    for name, messages in kind.conversations.items():
        made = made_by.apply_chat_template(
            messages,
            chat_template=kind.marked,
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
        found[name] = made["input_ids"], made["assistant_masks"]
        roles.learn(made["input_ids"], messages)
    known = 0
    for name, messages in kind.conversations.items():
        ids, marked = found[name]
        of_tokens = roles.of(ids, messages)
        known += bool(of_tokens)
        for number, (role, is_marked) in enumerate(zip(of_tokens, marked, strict=bool(of_tokens))):
            where = (name, number, asked.text(ids[:number]), asked.text([ids[number]]))
            if role in ("user", "system", "tool", "end of user"):
                assert not is_marked, where
            if role == "assistant":
                assert is_marked, where
    assert known >= len(kind.conversations) - 3


OTHER_TEMPLATE = (
    "{% for message in messages %}[U] w0 w0 w0 w0 w0 {{ message.content }} [E] {% endfor %}"
)


def test_rows_of_another_template_than_the_tokenizers() -> None:
    """Their texts are known by their order, and roles by their messages."""
    other = tokenizer()
    other.chat_template = OTHER_TEMPLATE
    rows = as_conversations(other)
    collate = DataCollatorWithFlattening()
    without = tokenizer()
    without.chat_template = None
    for made_by in (tokenizer(), without, other):
        report = check_data(Data(rows, collate, made_by, texts=TEXTS))
        assert report.findings == []
        words = "\n".join(report.facts)
        assert re.search(r"assistant (\d+) of \1\b.*user (\d+) of \2\b", words), words
        assert "no text" not in words and "no row" not in words and "nothing marks" not in words
    few = check_data(Data(rows[1:], collate, without, texts=TEXTS))
    assert "documents of no text, as the tokenizer's template makes it: 11" in few.facts
    with pytest.raises(CheckError, match="template does not take a text"):
        check_data(Data(TEXTS, lambda texts: padded(rows), without))


def test_a_row_that_has_more_than_its_text_is_one_document() -> None:
    made_by = tokenizer()
    rows = as_conversations(made_by)
    for row in rows[:4]:
        row["input_ids"] = [5, 6, 7, 8, 9, 10, 11, *row["input_ids"]]
        row["labels"] = [-100] * 7 + row["labels"]
    report = check_data(Data(rows[:5], padded, made_by, texts=TEXTS))
    words = "\n".join(report.facts)
    assert "nothing marks" not in words and "read: 5 documents in 5 rows" in words


def test_rows_that_have_texts_beside_ids_need_no_others() -> None:
    made_by = tokenizer()
    rows = [{**row, **text} for row, text in zip(as_conversations(made_by), TEXTS, strict=True)]
    report = check_data((rows, arrays, made_by))
    assert report.findings == []
    assert any(fact.startswith("trained by role: ") for fact in report.facts)
    plain = [{**row, "text": "w1 w2"} for row in rows_of((3,))]
    assert "rows of several documents" not in check_data((plain, padded, made_by)).not_tested


def arrays(rows: Rows) -> Batch:
    return {name: value.numpy() for name, value in padded(rows).items()}


def test_a_trainer_with_a_loss_of_its_own_is_not_said_to_divide() -> None:
    class Own(Trainer):  # type: ignore[misc]  # transformers is untyped here
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            return super().compute_loss(*given, **named)

    steps = TrainingArguments(**arguments(per_device_train_batch_size=3))
    model = Probe().model("gpt2")
    made = Own(model, steps, padded, rows_of((7, 3, 5)), processing_class=tokenizer())
    report = check_data(made)
    assert report.findings == []
    assert "N: 12 targets in a batch, 12 in all" in report.facts


def test_documents_that_a_collator_cuts() -> None:
    rows = rows_of((9, 4, 7))
    for cut in (slice(None, 5), slice(-5, None)):

        def collate(given: Rows, cut: slice = cut) -> Batch:
            return padded([{name: ids[cut] for name, ids in row.items()} for row in given])

        report = check_data(Data(rows, collate, tokenizer()))
        assert report.findings == []
        assert "cut documents: 2, of which 6 tokens are in no batch" in report.facts


def test_models_with_an_encoder_are_refused() -> None:
    steps = TrainingArguments(**arguments(per_device_train_batch_size=3))
    config = T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8, vocab_size=64)
    model = T5ForConditionalGeneration(config)
    made = Trainer(model, steps, padded, rows_of((3,)), processing_class=tokenizer())
    with pytest.raises(CheckError, match="has an encoder"):
        check_data(made)
    made = Trainer(Probe().model("llama"), steps, padded, rows_of((3,)))
    with pytest.raises(CheckError, match="pass processing_class"):
        check_data(made)


def test_the_picture_shows_what_is_trained() -> None:
    made_by = tokenizer()
    texts = [
        {"messages": [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]}
    ]
    trainer = sft(texts, made_by, max_length=None, assistant_only_loss=True)
    assert check_data(trainer).picture == ["[U] w1 w2 [E] [A]«w3 [E]»"]


# --- the command


SCRIPT = """
from tests.check.test_check_data import padded, partial, rows_of, tokenizer
def data():
    return rows_of((7, 3, 5)), padded, tokenizer()
def wrong():
    return rows_of((7, 3, 5)), partial(padded, trained=True), tokenizer()
def nothing():
    return 7
"""


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "check.py"
    file.write_text(SCRIPT)
    command = ["check-step", str(file), "--data"]
    assert main(command) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "data: right"
    assert out[1] == "data: read: 3 documents in 3 rows of 1 batch: 21 tokens, 6 of padding"
    assert main([*command, "--make", "wrong", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [fault["kind"] for fault in report["faults"]] == [PADDING_TRAINED]
    assert main([*command, "--make", "wrong", "--allow", PADDING_TRAINED]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "data: right",
        f"data: allowed: {PADDING_TRAINED}",
    ]
    assert main([*command, "--make", "wrong", "--github"]) == 1
    assert (
        f"::error file={file},title=check-step%2C data::{PADDING_TRAINED}: "
        in capsys.readouterr().out
    )
    assert main([*command, "--make", "nothing"]) == 3
    assert "data is int: return a Data, or rows, collator" in capsys.readouterr().err
    assert main([*command, "--make", "absent"]) == 2
    assert "has no function absent()" in capsys.readouterr().err
    assert main([*command, "--allow", "padding"]) == 2
    assert f"or {PADDING_TRAINED!r}" in capsys.readouterr().err
    assert main([*command, "--probe", "prompts"]) == 2
    assert "--data has no probes" in capsys.readouterr().err
    file.write_text("def data():\n    return 1 / 0")
    assert main(command) == 4
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_the_template_prints_what_the_page_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], repository: Path
) -> None:
    file = str(tmp_path / "check.py")
    assert main(["check-step", "--template", "data", "-o", file]) == 0
    assert capsys.readouterr().out == (
        f"{file}: replace what PUT YOURS HERE marks, then run longctx check-step {file} --data\n"
    )
    assert main(["check-step", file]) == 2
    assert "has no function make(probe): --data checks data()" in capsys.readouterr().err
    assert main(["check-step", file, "--data"]) == 0
    printed = capsys.readouterr().out.splitlines()
    page = (repository / "docs" / "check-step.md").read_text("utf-8")
    (shown,) = re.findall(r"^```text\n(data: .*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert [line for line in printed if line in shown.splitlines()] == shown.splitlines()


def test_what_cannot_be_read_is_refused() -> None:
    made_by = tokenizer()
    rows = rows_of((3, 2))
    refused = {
        "no labels, but input_ids, attention_mask": lambda rows: {
            name: value for name, value in padded(rows).items() if name != "labels"
        },
        "must be alike": lambda rows: padded(rows) | {"labels": torch.zeros(2, 1)},
    }
    for words, collate in refused.items():
        with pytest.raises(CheckError, match=words):
            check_data(Data(rows, collate, made_by))
    with pytest.raises(CheckError, match="is the data set empty"):
        check_data(Data([], padded, made_by))
    with pytest.raises(CheckError, match="seq_lengths sum up to 4, but a row has 3 tokens"):
        check_data(Data([rows[0] | {"seq_lengths": [4]}], padded, made_by))
    with pytest.raises(CheckError, match="a text is int"):
        check_data(Data(rows, padded, made_by, texts=[7]))
    with pytest.raises(UsageError, match="no fault of data is called 'x'"):
        check_data(Data(rows, padded, made_by), allow=["x"])
    with pytest.raises(AssertionError, match=PADDING_TRAINED):
        check_data(Data(rows, partial(padded, trained=True), made_by)).raise_if_wrong()
