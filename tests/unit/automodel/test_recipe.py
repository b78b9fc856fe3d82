"""The extended recipe: extended once, and found by name without importing the host."""

from __future__ import annotations

from typing import Any

import pytest

from dmuown.automodel import recipe
from dmuown.automodel.checks.targets import find_target
from dmuown.automodel.recipe import extend


class Host:
    """Stands for a recipe of the host."""

    cfg: Any = None


def test_a_recipe_is_extended_once() -> None:
    """Twice, gradients would be clipped twice and the second norm logged."""
    extended = extend(Host)
    assert issubclass(extended, Host)
    assert extended is not Host
    assert extended.__name__ == "Host"
    assert extend(extended) is extended
    assert extend(type("Derived", (extended,), {})).__mro__.count(extended) == 1


def test_the_name_that_yaml_files_use_is_found_and_is_an_extended_recipe_of_the_host() -> None:
    assert find_target("dmuown.automodel.recipe.FinetuneRecipe").status == "found"
    assert find_target("dmuown.automodel.recipe.FinetuneRecipes").status == "missing"
    assert recipe.FinetuneRecipe.dmuown_extended
    assert recipe.FinetuneRecipe.__mro__[1].__name__ == "TrainFinetuneRecipeForNextTokenPrediction"
    with pytest.raises(AttributeError, match="FinetuneRecipes"):
        _ = recipe.FinetuneRecipes
