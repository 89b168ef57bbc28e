"""What a checkpoint's template makes of conversations: the tokens are those of transformers, and what is learnt is what a
renderer written out by hand says that the assistant writes."""

from pathlib import Path
from typing import Any

import pytest

from longctx.data import IGNORED_LABEL
from longctx.data.corpus import open_corpus
from longctx.data.prepare import prepare
from longctx.data.store import Store
from tests.data_cases import write_jsonl
from tests.template_cases import FAMILIES, TOOLS, Family, Pieces

CASES = [(name, title) for name, family in FAMILIES.items() for title in family.conversations]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: family.save(folder / name) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def loaded(checkpoints: dict[str, Path]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    return {name: AutoTokenizer.from_pretrained(folder) for name, folder in checkpoints.items()}


def record(family: Family, title: str) -> dict[str, Any]:
    messages = family.conversations[title]
    return {"messages": messages, **({"tools": TOOLS} if any("tool_calls" in message for message in messages) else {})}


@pytest.fixture(scope="module")
def stores(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    """All conversations of a family, in their order."""
    folder, made = tmp_path_factory.mktemp("stores"), {}
    for name, family in FAMILIES.items():
        source = write_jsonl(folder / f"{name}.jsonl", [record(family, title) for title in family.conversations])
        prepare(open_corpus(str(source)), folder / name, tokenizer=str(checkpoints[name]))
        made[name] = Store.open(folder / name)
    return made


def learnt_tokens(tokenizer: Any, pieces: Pieces) -> list[bool]:
    """Which tokens of the pieces, joined, hold a character that the assistant writes, by the tokenizer's own offsets."""
    written = [learnt for text, learnt in pieces for _ in text]
    encoded = tokenizer("".join(text for text, _ in pieces), add_special_tokens=False, return_offsets_mapping=True)
    return [any(written[start:stop]) for start, stop in encoded["offset_mapping"]]


def read(store: Store, document: int) -> tuple[list[int], list[bool]]:
    """Tokens, and which of them are targets; the first never is."""
    tokens, labels = store.read(document, 0, int(store.lengths[document]))
    return tokens.tolist(), [False, *(labels[:-1] != IGNORED_LABEL).tolist()]


@pytest.mark.parametrize(("name", "title"), CASES)
def test_tokens_are_those_of_transformers_and_the_assistants_are_learnt(
    stores: dict[str, Store], loaded: dict[str, Any], name: str, title: str
) -> None:
    family, given = FAMILIES[name], record(FAMILIES[name], title)
    tokens, trained = read(stores[name], list(family.conversations).index(title))
    pieces = family.pieces(given["messages"], given.get("tools"))
    options = {"tools": given.get("tools"), "return_dict": False}
    assert "".join(text for text, _ in pieces) == loaded[name].apply_chat_template(given["messages"], tokenize=False, **options)
    assert tokens == loaded[name].apply_chat_template(given["messages"], **options)
    assert trained == learnt_tokens(loaded[name], pieces)
    assert any(trained)
