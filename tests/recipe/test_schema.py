"""The recipe's schema: defaults, limits, its digest, and where its paths lead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantizers.recipe.read import read_recipe, set_location, source_location
from quantizers.recipe.schema import Recipe
from quantizers.system.errors import RecipeError
from quantizers.system.shipped import find, shipped

LEAST = {"source": {"model": "a/b"}, "calibration": "c.yaml"}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "r.yaml"
        path.write_text(text)
        return path

    return write


def test_defaults() -> None:
    assert Recipe.model_validate(LEAST).settings() == {
        "source": {"model": "a/b", "revision": "main", "trust_remote_code": False},
        "calibration": "c.yaml",
        "experts": {
            "bits": 4,
            "group_size": 32,
            "symmetric": True,
            "engine": "gram",
            "awq": {"grid": 20, "duo_scaling": True},
            "routed_weight": 0.9,
            "scales": "mse",
            "scales_sign": "both",
            "rounding": "gptq",
        },
        "keep": "everything-else",
        "verify": None,
    }


@pytest.mark.parametrize(
    "text",
    [
        "source: {model: a/b}\ncalibration: c.yaml\n",
        "calibration: 'c.yaml'\nsource:\n  model: a/b\n  revision: main\n",
        "source: {model: a/b}\ncalibration: c.yaml\nexperts: {bits: 4.0, routed_weight: 9e-1}\n",
        "source: {model: a/b}\ncalibration: c.yaml\nexperts: {awq: {grid: 20}}\n",
    ],
)
def test_equal_meaning_has_one_digest(write: Any, text: str) -> None:
    recipe, _ = read_recipe(str(write(text)))
    assert recipe.settings() == Recipe.model_validate(LEAST).settings()


def test_a_gpu_stands_for_its_kind_of_card(write: Any) -> None:
    served = "verify:\n  perplexity: {data: held-out}\n  as_served: "
    settings = []
    for cards in ("[hopper, ada]", "[NVIDIA H100 80GB HBM3, H200, nvidia l40s]"):
        recipe, _ = read_recipe(str(write(f"source: {{model: a/b}}\ncalibration: c.yaml\n{served}{cards}\n")))
        settings.append(recipe.settings())
    assert settings[0] == settings[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bits: 7", "r.yaml:4: experts.bits: should be 2, 3, 4, 5, 6 or 8, not 7"),
        ("bits: 4.5", "r.yaml:4: experts.bits: should be 2, 3, 4, 5, 6 or 8, not 4.5"),
        ("group_size: 16", "r.yaml:4: experts.group_size: should be 32, 64 or 128, not 16"),
        ("symmetric: false", "r.yaml:4: experts.symmetric: should be True, not False"),
        ("engine: gptq", "r.yaml:4: experts.engine: should be 'gram' or 'llmcompressor', not 'gptq'"),
        ("awq: yes", "r.yaml:4: experts.awq:"),
        ("awq: {grid: 2}", "r.yaml:4: experts.awq.grid: should be greater than or equal to 3, not 2"),
        ("awq: {grid: 201}", "r.yaml:4: experts.awq.grid: should be less than or equal to 200, not 201"),
        ("awq:\n    grid: 2", "r.yaml:5: experts.awq.grid: should be greater than or equal to 3, not 2"),
        ("awq: {gird: 20}", "r.yaml:4: experts.awq.gird: unknown key (did you mean grid?)"),
        ("routed_weight: -0.1", "r.yaml:4: experts.routed_weight: should be greater than or equal to 0"),
        ("routed_weight: 1e1", "r.yaml:4: experts.routed_weight: should be less than or equal to 1, not 10.0"),
        ("scales: max", "r.yaml:4: experts.scales: should be 'mse' or 'minmax', not 'max'"),
        ("rounding: 4", "r.yaml:4: experts.rounding: should be 'gptq' or 'nearest', not 4"),
        ("budget: 120", "r.yaml:4: experts.budget: 120 is not a size; write it as 120GiB or 120GB"),
        ("budget: lots", "r.yaml:4: experts.budget: 'lots' is not a size; write it as 120GiB or 120GB"),
        ("bits_per_weight: 0", "r.yaml:4: experts.bits_per_weight: should be greater than 0, not 0"),
        ("budget: 1GB\n  bits: 4", "r.yaml:5: experts.bits: experts.budget decides this; remove one of the two keys"),
        ("bits: 4\n  budget: 1GB", "r.yaml:4: experts.bits: experts.budget decides this; remove one of the two keys"),
        (
            "budget: 1GB\n  group_size: 64",
            "r.yaml:5: experts.group_size: experts.budget decides this; remove one of the two",
        ),
        ("bits_per_weight: 5\n  bits: 8", "r.yaml:5: experts.bits: experts.bits_per_weight decides this; remove one"),
        ("bits_per_weight: 5\n  budget: 1GB", "r.yaml:4: experts.bits_per_weight: experts.budget decides this; remove"),
        ("budget: 1GB\n  engine: llmcompressor", "r.yaml:5: experts.engine: experts.budget needs the gram engine;"),
        ("tensor_parallel: 2", "r.yaml:4: experts.tensor_parallel: bounds what a budget chooses; give experts.budget "),
        ("budget: 1GB\n  tensor_parallel: 0", "r.yaml:5: experts.tensor_parallel: should be greater than or equal to"),
    ],
)
def test_what_experts_refuse(write: Any, text: str, said: str) -> None:
    path = write(f"source: {{model: a/b}}\ncalibration: c.yaml\nexperts:\n  {text}\n")
    with pytest.raises(RecipeError) as failure:
        read_recipe(str(path))
    assert said in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("source: {model: ''}", "r.yaml:2: source.model: should have at least 1 character"),
        ("source: {model: a, revison: x}", "r.yaml:2: source.revison: unknown key (did you mean revision?)"),
        ("source: {model: a, trust_remote_code: no}", "r.yaml:2: source.trust_remote_code: should be False, 'tok"),
        ("source: {model: a}\nkeep: attention", "r.yaml:3: keep: should be 'everything-else', not 'attention'"),
        ("source: {model: a}\nverify: {coverage: {min_routed_tokens: -1}}", "r.yaml:3: verify.coverage.min_routed"),
        ("source: {model: a}\nverify: {coverage: {max_uncovered: 2}}", "r.yaml:3: verify.coverage.max_uncovered:"),
        (
            "source: {model: a}\nverify: {perplexity: {max_kl: 1.0}}",
            "r.yaml:3: verify.perplexity.data: missing; add it",
        ),
        ("source: {model: a}\nverify: {perplexity: {data: d, max_kl: -1}}", "r.yaml:3: verify.perplexity.max_kl:"),
        ("source: {model: a}\nverify: {perplexity: {data: d, max_p99: -1}}", "r.yaml:3: verify.perplexity.max_p99:"),
        ("source: {model: a}\nverify: on", "r.yaml:3: verify: must be a mapping of keys to values, not 'on'"),
    ],
)
def test_what_the_rest_refuses(write: Any, text: str, said: str) -> None:
    with pytest.raises(RecipeError) as failure:
        read_recipe(str(write(f"calibration: c.yaml\n{text}\n")))
    assert said in str(failure.value)


@pytest.mark.parametrize("given", [{"budget": "120GiB"}, {"bits_per_weight": 4.25, "tensor_parallel": 4}])
def test_a_budget_stands_in_the_settings_instead_of_what_it_decides(given: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(LEAST | {"experts": given})
    assert recipe.experts.by_budget
    settings = recipe.settings()["experts"]
    assert not {"bits", "group_size"} & settings.keys()
    assert {key: settings[key] for key in given} == given
    assert Recipe.model_validate(recipe.settings()) == recipe
    assert recipe.settings() != Recipe.model_validate(LEAST).settings()


@pytest.mark.parametrize("path", sorted(shipped("recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_found_by_name_and_name_shipped_sets(path: Path, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, found = read_recipe(path.stem)
    assert found == path
    assert set_location(recipe.calibration_set, path).is_file()
    assert recipe.verify is not None
    assert recipe.verify.perplexity is not None
    assert set_location(recipe.verify.perplexity.data, path).is_file()


@pytest.mark.parametrize("name", ["nothing", "nothing.yaml", "~nobody/x.yaml", "a\0b", "x" * 5000, "", ".", "~"])
def test_a_recipe_that_is_not_there(name: str) -> None:
    with pytest.raises(RecipeError, match="no such recipe; give a file, or a name that `quantize recipes` lists"):
        read_recipe(name)


def test_paths_start_from_the_recipe(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "set.yaml").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = tmp_path / "recipes" / "r.yaml"
    recipe = Recipe.model_validate(LEAST | {"source": {"model": "../model"}})
    assert source_location(recipe, path) == str(tmp_path / "model")
    assert source_location(Recipe.model_validate(LEAST), path) == "a/b"
    assert set_location("../set.yaml", path).samefile(tmp_path / "set.yaml")
    assert set_location("held-out", path) == shipped("calibration") / "held-out.yaml"


@pytest.mark.parametrize("model", ["~nobody/model", "m" * 5000, "a\0b"])
def test_a_model_that_is_no_path_stays_as_written(tmp_path: Path, model: str) -> None:
    recipe = Recipe.model_validate(LEAST | {"source": {"model": model}})
    assert source_location(recipe, tmp_path / "r.yaml") == model


def test_a_file_goes_before_a_shipped_name(tmp_path: Path) -> None:
    (tmp_path / "held-out").touch()
    assert find("held-out", "calibration", beside=tmp_path) == tmp_path / "held-out"
    assert find("nothing-of-that-name", "calibration", beside=tmp_path) == tmp_path / "nothing-of-that-name"
    assert find("a/held-out", "calibration", beside=tmp_path) == tmp_path / "a" / "held-out"
