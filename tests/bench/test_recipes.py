"""Pages of recipes and of others' measurements say what is predicted now; every recipe is loaded,
fits and is planned."""

import pytest

from bench import published, recipes
from bench.recipes import (
    FOLDER,
    MODELS,
    PAGE,
    RECIPES,
    Prediction,
    page,
    predict,
    replaced,
    stand_in,
)
from longctx.config import load

pytestmark = pytest.mark.slow

PARAMETERS = {
    "meta-llama/Llama-3.1-8B": 8.03e9,
    "meta-llama/Llama-3.1-70B": 70.6e9,
    "Qwen/Qwen3-8B": 8.19e9,
    "Qwen/Qwen3-30B-A3B-Base": 30.5e9,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79.7e9,
}
"""Published sizes."""


@pytest.fixture(scope="module")
def predictions() -> list[Prediction]:
    return [predict(recipe) for recipe in RECIPES]


def test_every_recipe_fits(predictions: list[Prediction]) -> None:
    assert all(each.memory.total <= each.available for each in predictions)
    assert {f"{each.recipe.file}.yaml" for each in predictions} == {
        path.name for path in FOLDER.iterdir()
    }
    assert all(max(each.plan.lengths) == each.config.data.max_length for each in predictions)


def test_every_recipe_names_its_file(predictions: list[Prediction]) -> None:
    for each in predictions:
        assert f"examples/recipes/{each.recipe.file}.yaml" in recipes.commands(each.recipe)[-1]


def test_the_page_is_what_is_predicted(predictions: list[Prediction]) -> None:
    text = PAGE.read_text("utf-8")
    assert replaced(text, "recipes", page(predictions)) == text, "run python -m bench.recipes"


@pytest.mark.parametrize("name", PARAMETERS)
def test_stand_ins_have_the_published_sizes(name: str) -> None:
    spec = (
        load(None, [f"model.from_pretrained={stand_in(name)}"])
        .model_source(MODELS[name].get("vocab_size"))
        .spec
    )
    assert spec.parameters == pytest.approx(PARAMETERS[name], rel=0.02)


def test_the_page_has_every_figure_as_it_is_predicted() -> None:
    measured = published.rows()
    text = published.PAGE.read_text("utf-8")
    assert published.replaced(text, "published", published.table_of(measured)) == text, (
        "run python -m bench.published"
    )
    assert {row.who for row in measured} == {
        "Megatron-LM",
        "Megatron-LM dev",
        "verl",
        "ALST",
        "MagiAttention",
    }
    speeds = [row for row in measured if row.who == "Megatron-LM"]
    assert len(speeds) == 3 and all(0.86 <= row.ratio <= 1.14 for row in speeds if row.ratio)
