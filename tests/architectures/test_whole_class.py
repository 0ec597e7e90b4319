"""The class of a config.json's whole model, and what to install where transformers has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import transformers
import zoo
from commands import Command
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from quantizers.architectures import whole_class
from quantizers.architectures.contradictions import refuse_another_type
from quantizers.architectures.whole_class import LATER, NEWEST, config_class_of, model_class, saved_with_later
from quantizers.system.errors import ArchitectureError

INSTALLED = f"transformers {transformers.__version__}"
SAVED = {"model_type": "brand_new", "transformers_version": "99.2.0.dev0"}
GIVE = "give a model that it has, or facts with `source.facts` that name another class"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a type that the newest has": (
        {"model_type": "later", "transformers_version": "99.2.0"},
        f"NewForCausalLM: {INSTALLED} does not know the model type 'later', and 99.1.0 does; install that: "
        "`pip install -U 'transformers>=99.1.0'`",
    ),
    "a model saved with a later version": (
        SAVED,
        f"{INSTALLED} has no NewForCausalLM; the model was saved with 99.2.0; install that: "
        f"`pip install -U 'transformers>=99.2.0'`, or {GIVE}",
    ),
    "a model saved with an earlier version": (
        SAVED | {"transformers_version": "4.57.1"}, f"{INSTALLED} has no NewForCausalLM; {GIVE}"
    ),
    "no version at all": (SAVED | {"transformers_version": None}, f"{INSTALLED} has no NewForCausalLM; {GIVE}"),
    "code of its own": (
        SAVED | {"auto_map": {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"}},
        f"{INSTALLED} has no NewForCausalLM: it is code of the model's own, which is never run; {GIVE}",
    ),
    "a type that is known, and a class of another name": (
        {"model_type": "olmoe"}, f"{INSTALLED} has no NewForCausalLM; {GIVE}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_class_that_is_missing_says_what_to_install(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_class, "LATER", {"later"})
    monkeypatch.setattr(whole_class, "NEWEST", "99.1.0")
    config, expected = REFUSED[case]
    with pytest.raises(ArchitectureError) as refused:
        model_class("NewForCausalLM", "architectures", config)
    assert str(refused.value) == f"architectures: {expected}"


def test_a_development_version_is_not_older_than_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "99.2.0.dev0")
    assert saved_with_later(SAVED) is None


@pytest.mark.parametrize("verb", ["plan", "run", "new"])
def test_every_command_says_it_in_one_line(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = zoo.save("olmoe", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SAVED | {"architectures": ["NewForCausalLM"]}))
    capsys.readouterr()  # what saving has printed
    words = ["new", folder, tmp_path / "new.yaml"] if verb == "new" else [verb, tiny.write_recipe(tmp_path)]
    command = Command(monkeypatch, capsys)
    assert command(*words) == 2
    assert (
        command.err
        == f"quantize: {folder / 'config.json'}: architectures: {REFUSED['a model saved with a later version'][1]}\n"
    )
    assert not (tmp_path / "new.yaml").exists()


def test_a_class_is_found_by_its_models_type_where_the_two_have_one_name() -> None:
    """Kimi-K2.5's files name `KimiK25ForConditionalGeneration`."""
    kimi = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"]}
    assert model_class(kimi["architectures"][0], "architectures", kimi) is transformers.Kimi_K25ForConditionalGeneration


@pytest.mark.skipif("sarvam_moe" not in CONFIG_MAPPING_NAMES, reason="a type of later versions of transformers")
def test_a_type_may_be_computed_by_the_class_of_another() -> None:
    whole = transformers.Glm4MoeForCausalLM
    for name in ("SarvamMoEForCausalLM", "Glm4MoeForCausalLM"):
        config = {"model_type": "sarvam_moe", "architectures": [name]}
        refuse_another_type(config)
        assert model_class(name, "architectures", config) is whole
        assert config_class_of(whole, config) is transformers.SarvamMoEConfig
    assert config_class_of(whole, {"model_type": "glm4_moe"}) is transformers.Glm4MoeConfig


def test_the_types_that_are_known_to_come_later_are_those_of_the_zoo_that_are_not_here() -> None:
    """CI runs it with the oldest version, which has none of them, and with the newest, which has all."""
    missing = {name for name in LATER if name not in CONFIG_MAPPING_NAMES}
    assert {name for name in missing if not name.endswith("_text")} == {name.partition(" ")[0] for name in zoo.LATER}
    if Version(transformers.__version__) >= Version(NEWEST):
        assert missing == set()
    if Version(transformers.__version__) < Version("5.18"):
        assert missing == LATER
