"""`data.stores`: one store or several, by weights or by epochs; whatever else is refused by name."""

from pathlib import Path

import pytest

from longctx.config import Config, ConfigError, describe, load

MIX = "[{path: a, weight: 3}, {path: b, weight: 1.5}]"


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)
    (only,) = caught.value.problems
    return str(only)


def test_several_stores_take_the_place_of_the_default(tmp_path: Path) -> None:
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
        ("[{path: a, weight: -0.5}]", "must be greater than 0 (at 0.weight)"),
        ("[{path: a, weight: .nan}]", "finite number (at 0.weight)"),
        ("[{path: a, weight: 1}, {path: b, wieght: 1}]", "unknown key wieght (at 1)"),
        ("[{weight: 1}]", "required (at 0.path)"),
        ("a", "valid list"),
    ],
)
def test_lists_that_make_no_sense(stores: str, rule: str) -> None:
    text = problem(f"data.stores={stores}")
    assert rule in text and text.startswith("  data.stores = ")


def test_one_or_several_and_not_both_or_none() -> None:
    assert "cannot be combined with data.store, which is c" in problem(f"data.stores={MIX}", "data.store=c")
    assert "data.store and data.stores cannot both be null" in problem("data.store=null")


def test_help_says_how_a_list_is_written() -> None:
    assert "--data.stores [{path, weight, epochs}, ..]|null" in describe()
