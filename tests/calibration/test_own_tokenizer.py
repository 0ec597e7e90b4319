"""A tokenizer with code of its own runs only where that is allowed, and the model's code never does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import transformers
from calibration_tokenizer import write_tokenizer
from commands import Command
from own_tokenizer import own_ids, write_own_tokenizer
from sets import rows_set

from quantizers.calibration.render import Renderer, custom_class
from quantizers.calibration.row_formats import Content
from quantizers.recipe.read import read_recipe
from quantizers.system.errors import CalibrationError

TEXT = "def f(x): return 'grüße'"


def content(text: str) -> Content:
    return Content((), (), text)


@pytest.fixture(autouse=True)
def _own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies such code to a folder, from which it imports it: one for each test."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)

    def asked(*_: object) -> str:
        raise AssertionError("asks on the terminal")

    monkeypatch.setattr("builtins.input", asked)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_own_tokenizer(tmp_path / "model", tmp_path / "ran")


def test_its_ids_are_those_of_its_code_and_the_models_code_does_not_run(folder: Path, tmp_path: Path) -> None:
    renderer = Renderer(str(folder), trust_remote_code=True)
    ids = renderer.render(content(TEXT), 1000).tokens.tolist()
    assert ids == own_ids(TEXT)
    assert renderer.tokenizer.decode(ids) == TEXT
    assert not (tmp_path / "ran").exists()


def test_without_leave_it_is_refused_in_one_line_that_names_the_key(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenization_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(CalibrationError) as failure:
        Renderer(str(folder))
    said = str(failure.value)
    assert said.startswith(f"{folder}: its tokenizer is code of its own (tokenization_own.ByteTokenizer)")
    assert "source.trust_remote_code: tokenizer" in said
    assert "\n" not in said
    assert not (tmp_path / "ran").exists()


def test_leave_changes_nothing_for_a_tokenizer_without_code(folder: Path, tmp_path: Path) -> None:
    """Even if the model has code, and a type that transformers does not know."""
    config = folder / "config.json"
    plain = write_tokenizer(tmp_path / "plain")
    (plain / "config.json").write_bytes(config.read_bytes())
    (plain / "configuration_own.py").write_bytes((folder / "configuration_own.py").read_bytes())
    strict, trusting = (Renderer(str(plain), trust_remote_code=leave) for leave in (False, True))
    ids = [renderer.render(content(TEXT), 1000).tokens.tolist() for renderer in (strict, trusting)]
    assert ids[0] == ids[1]
    assert (
        strict.fingerprint() == trusting.fingerprint() == Renderer(str(write_tokenizer(tmp_path / "x"))).fingerprint()
    )
    assert not (tmp_path / "ran").exists()


def test_a_fault_in_its_code_is_one_line(folder: Path) -> None:
    (folder / "words.py").write_text("raise ImportError('Run `pip install something`.\\nSecond line')\n")
    with pytest.raises(CalibrationError) as failure:
        Renderer(str(folder), trust_remote_code=True)
    assert "pip install something" in str(failure.value)
    assert "\n" not in str(failure.value)


def test_the_fingerprint_changes_with_the_code(folder: Path) -> None:
    """For ids are cached under it, and code may make other ids of the same vocabulary."""
    before = Renderer(str(folder), trust_remote_code=True).fingerprint()
    assert Renderer(str(folder), trust_remote_code=True).fingerprint() == before
    words = folder / "words.py"
    words.write_text(words.read_text() + "\n# changed\n")
    assert Renderer(str(folder), trust_remote_code=True).fingerprint() != before


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"auto_map": None}, None),
        ({"auto_map": {"AutoModel": "a.B"}}, None),
        ({"auto_map": {"AutoTokenizer": ["a.B", None]}}, "a.B"),
        ({"auto_map": {"AutoTokenizer": [None, "a.C"]}}, "a.C"),
        ({"auto_map": {"AutoTokenizer": ["a.B", "a.C"]}}, "a.C"),  # transformers prefers the fast one
        ({"auto_map": ["a.B", None]}, "a.B"),  # as older files have it
        ({"auto_map": {"AutoTokenizer": "a.B"}}, "a.B"),
    ],
)
def test_the_class_that_a_checkpoint_has(settings: dict[str, object], expected: str | None) -> None:
    assert custom_class(settings) == expected


@pytest.mark.parametrize(("said", "trusts"), [("", False), ("false", False), ("tokenizer", True), ("true", True)])
def test_the_recipes_key(said: str, trusts: bool, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    key = f"  trust_remote_code: {said}\n" if said else ""
    recipe.write_text(f"source:\n  model: a/b\n{key}calibration: embedded\n")
    source = read_recipe(str(recipe))[0].source
    assert source.trusts_tokenizer is trusts
    # Settings are hashed: those of an old recipe must stay what they were.
    assert source.model_dump()["trust_remote_code"] == {"": False, "tokenizer": "tokenizer"}.get(said, said == "true")


def test_commands_without_a_recipe_take_an_option(folder: Path, tmp_path: Path, command: Command) -> None:
    path = rows_set(tmp_path, [("code/python", f"{TEXT} {n}") for n in range(3)])
    words = ("calibration", path, "--tokenizer", folder)
    assert command(*words) == 2
    assert command.err.startswith(f"quantize: {folder}: its tokenizer is code of its own")
    assert "--trust-remote-code" in command.err
    assert len(command.err.splitlines()) == 1
    assert command(*words, "--trust-remote-code", "--json") == 0
    assert json.loads(command.out)["summary"]["tokens"] == 3 * (len(TEXT.encode()) + 2)
    assert not (tmp_path / "ran").exists()
