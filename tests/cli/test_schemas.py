"""What is made from the schemas: tables of keys, example rows, JSON schemas; and the examples on the two pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import yaml
from calibration_tokenizer import write_tokenizer
from commands import Command
from conftest import REPOSITORY, Finished
from make_reference import SCHEMAS, key_table
from pydantic import BaseModel

from quantizers.calibration.load_set import load_set
from quantizers.calibration.set import CalibrationSet, Shape
from quantizers.calibration.set_files import new_set
from quantizers.recipe.schema import Recipe
from quantizers.system.schema import Strict, load
from quantizers.system.strict_yaml import parse

DOCS = REPOSITORY / "docs" / "reference"
MODELS: dict[str, type[BaseModel]] = {"recipe.schema.json": Recipe, "calibration-set.schema.json": CalibrationSet}
SHIPPED = [
    *(("recipe.schema.json", path) for path in sorted((REPOSITORY / "recipes").glob("*.yaml"))),
    *(("calibration-set.schema.json", path) for path in sorted((REPOSITORY / "calibration").glob("*.yaml"))),
]
RECIPE: dict[str, Any] = {"source": {"model": "owner/model"}, "calibration": "embedded"}
SOURCE = {"dataset": "a.jsonl", "columns": ["text"], "shape": "text", "samples": 1, "category": "x"}
SET: dict[str, Any] = {"name": "x", "sequence_length": 64, "sources": [SOURCE]}


def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((DOCS / "schemas" / name).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize(("name", "path"), SHIPPED, ids=lambda value: getattr(value, "name", value))
def test_every_shipped_file_is_valid(name: str, path: Path) -> None:
    validator(name).validate(parse(path)[0])


def test_the_commands_print_the_schemas(command: Command) -> None:
    for group, name in (("recipes", "recipe.schema.json"), ("calibration", "calibration-set.schema.json")):
        assert command(group, "schema") == 0
        assert command.out == (DOCS / "schemas" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted((DOCS / "schemas").iterdir()), ids=lambda path: path.name)
def test_a_published_schema_is_made_from_the_program_and_named_on_a_page(path: Path) -> None:
    validator(path.name)
    assert path.name in SCHEMAS
    assert any(f"(schemas/{path.name})" in page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))


def test_what_verify_prints_is_valid(finished: Finished, command: Command) -> None:
    assert command("verify", finished.folder, "--source", finished.source, "--json") == 0
    printed = json.loads(command.out)
    validator("verify.schema.json").validate(printed)
    with pytest.raises(jsonschema.ValidationError):
        validator("verify.schema.json").validate({key: value for key, value in printed.items() if key != "differences"})


@pytest.mark.parametrize(
    ("name", "values", "wrong"),
    [
        ("recipe.schema.json", RECIPE | {"experts": {"bits": 4, "awq": {"grid": 20, "fold": False}}}, None),
        ("recipe.schema.json", RECIPE | {"experts": {"awq": False}, "verify": {"coverage": {}}}, None),
        ("recipe.schema.json", RECIPE | {"experts": {"group_siz": 32}}, "group_siz"),
        ("recipe.schema.json", RECIPE | {"experts": {"bits": 7}}, "7"),
        ("recipe.schema.json", RECIPE | {"experts": {"routed_weight": 1.5}}, "1.5"),
        ("recipe.schema.json", RECIPE | {"extra": 1}, "extra"),
        ("recipe.schema.json", {"calibration": "embedded"}, "source"),
        ("calibration-set.schema.json", SET | {"sources": [SOURCE | {"samples": "all"}]}, None),
        ("calibration-set.schema.json", SET | {"sources": [SOURCE | {"category": {"column": "kind"}}]}, None),
        ("calibration-set.schema.json", SET | {"sources": [SOURCE | {"samples": 0}]}, "0"),
        ("calibration-set.schema.json", SET | {"sources": [SOURCE | {"shape": "tabular"}]}, "tabular"),
        ("calibration-set.schema.json", SET | {"sources": [SOURCE | {"catgory": "x"}]}, "catgory"),
        ("calibration-set.schema.json", SET | {"languages": {"programing": []}}, "programing"),
        ("calibration-set.schema.json", {"name": "x"}, "required"),
    ],
)
def test_the_json_schema_agrees_with_the_program(name: str, values: Any, wrong: str | None, tmp_path: Path) -> None:
    """Both take the right ones, both refuse the wrong ones, for the same reason."""
    path = tmp_path / "x.yaml"
    path.write_text(json.dumps(values))
    if wrong is None:
        validator(name).validate(values)
        load(path, MODELS[name])
        return
    with pytest.raises(jsonschema.ValidationError) as refused:
        validator(name).validate(values)
    causes = [refused.value, *refused.value.context]
    assert any(wrong in error.message for error in causes), [error.message for error in causes]
    with pytest.raises(Exception, match=r"x\.yaml:1: "):
        load(path, MODELS[name])


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


YAML = [(page, text) for page in ("recipe.md", "calibration.md") for text in blocks(page, "yaml")]


@pytest.mark.parametrize(("page", "text"), YAML, ids=[f"{page}-{number}" for number, (page, _) in enumerate(YAML)])
def test_every_yaml_example_is_valid(page: str, text: str, tmp_path: Path) -> None:
    """An example may leave out what is not its point: required keys at the top are then added."""
    path = tmp_path / "example.yaml"
    path.write_text(text, encoding="utf-8")
    values, _ = parse(path)
    model, least = (Recipe, RECIPE) if page == "recipe.md" or "calibration" in values else (CalibrationSet, SET)
    path.write_text(json.dumps(least | values), encoding="utf-8")
    load(path, model)
    validator("recipe.schema.json" if model is Recipe else "calibration-set.schema.json").validate(least | values)
    assert values


def test_the_pages_have_examples() -> None:
    assert [page for page, _ in YAML].count("recipe.md") >= 5
    assert [page for page, _ in YAML].count("calibration.md") >= 3


def test_every_shape_has_an_example_row_that_loads(tmp_path: Path) -> None:
    """The rows as they stand on the page, in the shapes and columns that it names, through the loading of a set."""
    text = (DOCS / "calibration.md").read_text(encoding="utf-8")
    section = r"### `([\w-]+)`\n.*?```json\n(.*?)\n```\n\nWith `columns: \[(.*?)\]`.*?````\n(.*?)\n````"
    found = re.findall(section, text, re.DOTALL)
    assert [shape for shape, *_ in found] == list(get_args(Shape))
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    for shape, row, columns, read in found:
        (tmp_path / f"{shape}.jsonl").write_text(row + "\n", encoding="utf-8")
        source = SOURCE | {
            "dataset": f"{shape}.jsonl",
            "shape": shape,
            "columns": columns.split(", "),
            "samples": "all",
        }
        path = tmp_path / "set.yaml"
        path.write_text(json.dumps(SET | {"sequence_length": 4096, "sources": [source]}))
        (sample,) = load_set(path, tokenizer).samples
        answer = sample.text.rpartition("\n\n")[2]
        assert answer in read
        data = tmp_path / f"{shape}.jsonl"
        made = yaml.safe_load(new_set(tmp_path / "new.yaml", data)[0][tmp_path / "new.yaml"])["sources"][0]
        assert (made["dataset"], made["shape"], made["columns"]) == (f"./{data.name}", shape, columns.split(", "))


def test_a_key_without_a_description_is_refused() -> None:
    class Undescribed(Strict):
        known: int = 1

    with pytest.raises(ValueError, match="known: has no description"):
        key_table(Undescribed)
