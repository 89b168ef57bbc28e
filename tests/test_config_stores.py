"""`data.stores`: one store or several, by weight or by epochs; other values are refused."""

from pathlib import Path

import pytest

from longctx.config import Config, ConfigError, describe, load

MIX = "[{path: a, weight: 3}, {path: b, weight: 1.5}]"


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)
    (only,) = caught.value.problems
    return str(only)


def test_several_stores_replace_the_default_store(tmp_path: Path) -> None:
    config = load(None, [f"data.stores={MIX}"])
    assert config.data.store is None and config.data.paths == [Path("a"), Path("b")] and config.data.said == "a, b"
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load(tmp_path / "again.yaml") == config
    assert Config().data.paths == [Path("stores/python-stdlib")]


@pytest.mark.parametrize(
    ("stores", "rule"),
    [
        ("[]", "must not be empty"),
        ("[{path: a}]", "each store needs either weight or epochs"),
        ("[{path: a, weight: 1, epochs: 2}]", "each store needs either weight or epochs"),
        ("[{path: a, weight: 1}, {path: b, epochs: 2}]", "stores with weight and stores with epochs cannot be mixed"),
        ("[{path: a, weight: 1}, {path: ./a, weight: 2}]", "a store must not be listed twice"),
        ("[{path: a, weight: 0}]", "must be greater than 0 (at 0.weight)"),
        ("[{path: a, weight: 1}, {path: b, wieght: 1}]", "unknown key wieght (at 1)"),
        ("[{weight: 1}]", "required (at 0.path)"),
    ],
)
def test_invalid_lists_of_stores(stores: str, rule: str) -> None:
    text = problem(f"data.stores={stores}")
    assert rule in text and text.startswith("  data.stores = ")


def test_help_shows_the_form_of_a_list() -> None:
    assert "--data.stores [{path, weight, epochs}, ..]|null" in describe()
