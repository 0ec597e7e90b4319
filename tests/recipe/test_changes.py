"""`--set key=value` and `--calibration SET`: what they change, where their paths lead, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from commands import Command
from hypothesis import given
from hypothesis import strategies as st
from runs import change, cut_in_layer
from tiny import write_job

from quantizers.pipeline.options import Options
from quantizers.planning.job import prepare
from quantizers.recipe.portable import settings_hash
from quantizers.recipe.read import changed, changes_of, read_recipe
from quantizers.recipe.schema import Recipe
from quantizers.system.schema import Origin
from quantizers.system.shipped import shipped

TINY = "tiny-minimax-m2-fp8-int4"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe in a folder of its own, its sets beside it."""
    return write_job(tmp_path / "job", layers=2)


def settings(name: object, *texts: str, calibration: str | None = None) -> dict[str, Any]:
    read, _ = read_recipe(str(name), changes_of(texts, calibration))
    return read.settings()


# Dotted keys of nested mappings, and any values, against a version that edits one key at a time.
KEYS = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(tuple)
VALUES = st.one_of(st.integers(-9, 9), st.booleans(), st.text("xyz", min_size=1), st.lists(st.integers(), max_size=2))
TREES: Any = st.recursive(
    st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), VALUES | inner, max_size=3),
    max_leaves=6,
)


@given(tree=TREES, key=KEYS, value=VALUES)
def test_a_key_has_the_new_value_and_all_others_the_old_one(tree: Any, key: tuple[str, ...], value: Any) -> None:
    def leaves(part: Any, place: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
        if not isinstance(part, dict):
            return {place: part}
        return {place: {}} | {
            deep: leaf for name, one in part.items() for deep, leaf in leaves(one, (*place, name)).items()
        }

    before = leaves(tree)
    blocked = any(before.get(key[:depth], {}) != {} for depth in range(1, len(key)))
    text = f"{'.'.join(key)}={json.dumps(value)}"
    if blocked:
        with pytest.raises(Exception, match="which holds no keys; give --set"):
            changed(tree, {}, changes_of([text]))
        return
    after, origins = changed(tree, {(): Origin("file", 1)}, changes_of([text]))
    expected = {place: leaf for place, leaf in before.items() if place[: len(key)] != key}
    expected |= {key[:depth]: {} for depth in range(len(key))} | {key: value}
    assert leaves(after) == expected
    assert origins[key].shown == f"--set {text}"
    again, _ = changed(after, origins, changes_of([f"{'.'.join(key)}=null"]))
    del expected[key]
    assert leaves(again) == expected


def test_what_is_set_is_what_the_file_would_say(recipe: Path, tmp_path: Path) -> None:
    """Scalars, flow mappings, a key taken out; and so the same hash as of a recipe that was edited."""
    edited = tmp_path / "job" / "edited.yaml"
    edited.write_text(recipe.read_text())

    def edit(body: dict[str, Any]) -> None:
        body["experts"] = {"group_size": 64, "routed_weight": 0.1, "awq": {"grid": 9}, "rounding": "nearest"}
        body["verify"] = {
            "perplexity": {"data": "held-out.yaml", "max_kl": 0.5, "max_source": "any"},
            "coverage": {"min_routed_tokens": 3},
        }

    change(edited, edit)
    texts = (
        "experts.group_size=64", "experts.routed_weight=1e-1", "experts.awq={grid: 9}", "experts.rounding=nearest",
        "verify.perplexity.max_kl=.5", "verify.coverage.min_routed_tokens=3",
    )  # fmt: skip
    assert settings(recipe, *texts) == settings(edited)
    same = read_recipe(str(recipe), changes_of(texts))
    assert settings_hash(*same) == settings_hash(*read_recipe(str(edited)))
    assert settings_hash(*same) != settings_hash(*read_recipe(str(recipe)))
    assert settings(recipe, "verify=null") == settings(recipe) | {"verify": None}
    assert "budget" in settings(TINY, "experts.budget=1GB", "experts.bits=null", "experts.group_size=null")["experts"]


def test_tokens_stay_when_the_set_is_another_one(recipe: Path) -> None:
    embedded = str(shipped("calibration") / "embedded.yaml")
    assert settings(recipe, "calibration.tokens=99")["calibration"] == {"set": "calibration.yaml", "tokens": 99}
    assert settings(recipe, calibration="embedded")["calibration"] == embedded
    change(recipe, lambda body: body.update(calibration={"set": "calibration.yaml", "tokens": 50}))
    assert settings(recipe, calibration="embedded")["calibration"] == {"set": embedded, "tokens": 50}
    both = settings(recipe, "calibration.tokens=60", calibration="embedded")
    assert both["calibration"] == {"set": embedded, "tokens": 60}
    assert settings(recipe, "calibration=embedded")["calibration"] == embedded
    assert settings(recipe, "calibration.tokens=null")["calibration"] == "calibration.yaml"


def test_paths_start_from_the_current_folder(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    (here / "model").mkdir(parents=True)
    for name in ("mine.yaml", "facts.yaml", "calibration.yaml"):
        (here / name).touch()
    monkeypatch.chdir(here)
    assert settings(recipe, calibration="mine.yaml")["calibration"] == str(here / "mine.yaml")
    # The recipe's own folder has a file of this name too.
    assert settings(recipe, calibration="calibration.yaml")["calibration"] == str(here / "calibration.yaml")
    changed_paths = settings(
        recipe, "source={model: model, facts: facts.yaml}", "calibration={set: ./mine.yaml, tokens: 5}",
        "verify={perplexity: {data: held-out}}",
    )  # fmt: skip
    assert changed_paths["source"]["model"] == str(here / "model")
    assert changed_paths["source"]["facts"] == str(here / "facts.yaml")
    assert changed_paths["calibration"] == {"set": str(here / "mine.yaml"), "tokens": 5}
    assert changed_paths["verify"]["perplexity"]["data"] == str(shipped("calibration") / "held-out.yaml")
    assert settings(recipe, "source.model=owner/name")["source"]["model"] == "owner/name"
    assert settings(recipe)["calibration"] == "calibration.yaml"  # what the file says starts from the file


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "experts.group_siz=64"], ["--set experts.group_siz=64: unknown key (did you mean group_size?)"]),
        (["--set", "expert.bits=8"], ["--set expert.bits=8: expert: unknown key (did you mean experts?)"]),
        (
            ["--set", "experts={bits: 7, scale: mse}"],
            [
                "--set experts={bits: 7, scale: mse}: experts.bits: should be 2, 3, 4, 5, 6 or 8, not 7",
                "--set experts={bits: 7, scale: mse}: experts.scale: unknown key (did you mean scales or scales_sign?)",
            ],
        ),
        (
            ["--set", "experts.bits=7", "--set", "verify.perplexity.max_kl=x"],
            [
                "--set experts.bits=7: should be 2, 3, 4, 5, 6 or 8, not 7",
                "--set verify.perplexity.max_kl=x: should be a valid number, not 'x'",
            ],
        ),
        (
            ["--set", "verify=null", "--set", "verify.perplexity.max_kl=1"],
            ["--set verify.perplexity.max_kl=1: verify.perplexity.data: missing; add it"],
        ),
        (["--set", "experts"], ["--set experts: is not key=value; write it as --set experts.group_size=64"]),
        (["--set", ".bits=4"], ["--set .bits=4: is not key=value; write it as --set experts.group_size=64"]),
        (["--set", "keep="], ["--set keep=: has no value; give one, or null to take the key out of the recipe"]),
        (["--set", "keep=!x y"], ["--set keep=!x y: tags (`!name`) are not supported; write the plain value"]),
        (["--set", "keep={a"], ["--set keep={a: not valid YAML: did not find expected ',' or '}'; "]),
        (["--set", "verify.stop=null"], ["--set verify.stop=null: the recipe has no such key; leave it out"]),
        (
            ["--set", "experts.awq=false", "--set", "experts.awq.grid=9"],
            [
                "--set experts.awq.grid=9: the recipe has `awq: false`, which holds no keys; give --set "
                "experts.awq='{\"grid\": 9}' instead of --set experts.awq=false and --set experts.awq.grid=9"
            ],
        ),
        (
            ["--set", "keep=a", "--set", "keep=b"],
            ["--set keep=b: --set keep=a gives this key too; give one of them"],
        ),
        (
            ["--calibration", "embedded", "--set", "calibration=held-out"],
            ["--calibration embedded: --set calibration=held-out names a set too; give one of them"],
        ),
        (
            ["--calibration", "embeded"],
            [
                "--calibration embeded: no such set (did you mean embedded?); give a file, or the name of a shipped "
                "set such as embedded"
            ],
        ),
        (
            ["--set", "source.model=./nowhere"],
            ["--set source.model=./nowhere: no such folder; give one that is there, or a Hub id"],
        ),
        (["--set", "source.facts=nowhere"], ["--set source.facts=nowhere: no such file; give one that is there"]),
        (
            ["--set", "experts.budget=1kB", "--set", "experts.bits=null", "--set", "experts.group_size=null"],
            ["--set experts.budget=1kB: 1.0 kB is less than the smallest possible, 2.4 MB ("],
        ),
    ],
)  # fmt: skip
def test_what_is_refused(
    words: list[str], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("plan", TINY, *words) == 2
    shown = command
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert len(lines) == len(said)
    assert all(line.startswith(f"quantize: {start}") for line, start in zip(lines, said, strict=True))


def test_a_run_writes_the_changed_recipe_and_refuses_another_one(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """From another folder; and the same command once more finds it finished, while the plain one does not."""
    monkeypatch.chdir(tmp_path)
    words = ("run", recipe, "--output", "out", "--device", "cpu")
    larger = ("--set", "experts.group_size=64")
    options = (*larger, "--set", "calibration.tokens=300", "--calibration", "job/held-out.yaml")
    cut_in_layer(0, prepare(str(recipe)), Options(tmp_path / "out", torch.device("cpu")))
    for more, said in ((options, "calibration.tokens (null, now 300)"), (larger, "experts.group_size (32, now 64)")):
        assert command(*words, *more) == 2
        assert f"holds an unfinished run with another {said}" in command.err
    assert command(*words, *options, "--fresh", "--yes", "--json") == 0
    report = json.loads(command.out)
    assert (report["calibration"]["name"], report["calibration"]["tokens"]) == ("held-out", 300)
    written = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert written["experts"]["group_size"] == 64
    assert written["calibration"] == {"set": "calibration.yaml", "tokens": 300}
    assert str(tmp_path) not in (tmp_path / "out" / "report.json").read_text()
    assert command(*words, *options) == 0
    assert "was finished before" in command.out
    assert command(*words) == 2
    assert "holds the finished output of another recipe" in command.err


def test_coverage_takes_them_too(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("coverage", recipe, "--no-picture", "--device", "cpu", "--json")
    options = ("--calibration", "job/held-out.yaml", "--set", "calibration.tokens=77")
    assert command(*words, *options, "--set", "verify.coverage.min_routed_tokens=10000") == 3
    found = json.loads(command.out)
    assert (found["set"], sum(found["tokens"].values()), found["min_routed_tokens"]) == ("held-out", 77, 10000)
    assert command("coverage", recipe, "--data", "embedded", *options) == 2
    assert "--data and --compare name the sets; leave" in command.err
    assert command("coverage", recipe, "--min-routed-tokens", "5") == 2
    assert "give --set verify.coverage.min_routed_tokens=5 instead of --min-routed-tokens" in command.err


def test_a_plan_follows_them(command: Command) -> None:
    def needs(*words: str) -> dict[str, Any]:
        assert command("plan", TINY, "--json", *words) == 0
        found: dict[str, Any] = json.loads(command.out)
        return found

    assert needs("--set", "calibration.tokens=1000")["needs"]["tokens"] == 1000
    assert needs("--calibration", "held-out")["needs"]["tokens"] < needs()["needs"]["tokens"]
    assert needs("--set", "experts.bits=8")["output_bytes"] > needs()["output_bytes"]


def test_null_takes_out_every_key_that_may_be_left_out() -> None:
    """It stands for leaving a key out, so no key may have a null that means something else."""

    pending: list[Any] = [Recipe]
    seen = 0
    while pending:
        kind = pending.pop()
        pending += get_args(kind)
        for field in kind.model_fields.values() if hasattr(kind, "model_fields") else ():
            assert type(None) not in get_args(field.annotation) or field.default is None
            pending.append(field.annotation)
            seen += 1
    assert seen > 30
