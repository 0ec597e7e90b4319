"""Facts of the user's own: named by a recipe, carried by what is made with them, and found there again."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from calibration_tokenizer import write_tokenizer
from commands import Command
from hub_stand_in import HubStandIn, reached
from runs import cut_in_layer

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for, known
from quantizers.checkpoint.reader import open_folder
from quantizers.commands.verify import verify_folder
from quantizers.model.streamed_model import StreamedModel
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare
from quantizers.recipe.portable import resolve_recipe, settings_hash
from quantizers.recipe.read import read_recipe
from quantizers.system.errors import ArchitectureError, OutputError
from quantizers.system.strict_yaml import dump

CPU = torch.device("cpu")
MINE = {"model_type": "mine", "scale_dtype": "BF16", "unread": [r".*\.sinks"]}


def facts_of_mine(**changes: Any) -> dict[str, Any]:
    """MiniMax-M2's under a model type that no shipped file knows, with a tensor more."""
    values: dict[str, Any] = yaml.safe_load(architecture_for(tiny.config(), "x").as_yaml())
    del values["published"]
    return values | MINE | changes


def write_job(folder: Path, **experts: Any) -> Path:
    """A recipe that names facts of its own for a checkpoint of a family that nobody knows."""
    config = tiny.config(model_type="mine")
    tensors = tiny.tensors(config)
    tensors |= {f"model.layers.{n}.self_attn.sinks": torch.ones(4).bfloat16() for n in (0, 1)}
    write_tokenizer(tiny.write(folder / "model", config, tensors))
    recipe = tiny.write_recipe(folder, **experts)
    values = yaml.safe_load(recipe.read_text())
    values["source"]["facts"] = "mine.yaml"
    recipe.write_text(yaml.safe_dump(values))
    (folder / "mine.yaml").write_text("# of somebody's own\n" + dump(facts_of_mine()))
    return recipe


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job and its finished `output`. Tests copy what they change."""
    folder = tmp_path_factory.mktemp("own")
    run(prepare(str(write_job(folder))), Options(folder / "output", CPU))
    return folder


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


@pytest.fixture
def refused(command: Command) -> Callable[..., str]:
    """`refused(*words)`: the one line of a command that ends with exit code 2."""

    def call(*words: object) -> str:
        assert command(*words) == 2
        assert command.err.count("\n") == 1
        return command.err

    return call


# What a recipe may name.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model_type: mine\nmodel_type: x\n", "mine.yaml:2: model_type: given twice"),
        (dump(facts_of_mine(head="nowhere")), "head: nowhere is not among the tensors"),
        (dump(facts_of_mine(heads=5)), "heads: unknown key"),
        (dump(facts_of_mine(sizes={})), "sizes: layers is missing"),
        (dump(facts_of_mine(kv_cache={"rows_of": ["k"]})), "kv_cache.rows_of: k is no linear module of a layer"),
    ],
)
def test_wrong_facts_are_one_line(text: str, said: str, job: Path, refused: Callable[..., str]) -> None:
    (job.parent / "mine.yaml").write_text(text)
    assert said in refused("plan", job)


def test_facts_in_which_much_is_missing_are_told_all_at_once(job: Path, command: Command) -> None:
    (job.parent / "mine.yaml").write_text("model_type: mine\n")
    assert command("plan", job) == 2
    said = command.err.splitlines()
    absent = [key for key, field in Architecture.model_fields.items() if field.is_required() and key != "model_type"]
    assert said == [f"quantize: {job.parent / 'mine.yaml'}:1: {key}: missing; add it" for key in absent]


def test_facts_of_another_family_and_no_facts_are_one_line(job: Path, refused: Callable[..., str]) -> None:
    config, file = job.parent / "model" / "config.json", job.parent / "mine.yaml"
    file.write_text(dump(facts_of_mine(model_type="yours")))
    assert f"{config}: model_type is 'mine', but {file} holds the facts of 'yours'; give" in refused("plan", job)
    file.rename(job.parent / "facts.yaml")
    line = job.read_text().splitlines().index("  facts: mine.yaml") + 1
    assert f"{job}:{line}: source.facts: mine.yaml: no such file; correct the path" in refused("plan", job)
    assert "nowhere.yaml: cannot be read" in refused("plan", job, "--facts", "nowhere.yaml")


def test_a_plan_with_facts_of_ones_own_is_not_made_from_a_kept_config(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gives facts says that the kept ones are not this model's, so its own headers are needed."""
    model = "MiniMaxAI/MiniMax-M2.1"
    files = {path.name: path.read_bytes() for path in (job.parent / "model").iterdir()}
    with HubStandIn(repositories={model: {"main": files}}) as hub:
        reached(hub, job.parent / "home", monkeypatch)
        planned = prepare("minimax-m2.1-fp8-int4", offline_facts=True, facts_file=job.parent / "mine.yaml")
        assert planned.basis == f"the headers of {model} on the Hub, commit {hub.commit(model)}"
    assert planned.facts.num_layers == 2


def test_facts_in_the_source_itself_are_not_taken(job: Path, refused: Callable[..., str]) -> None:
    """So that the facts of this model are derived, which needs a class that transformers has."""
    model, data = job.parent / "model", job.parent / "held-out.yaml"
    (job.parent / "mine.yaml").rename(model / "facts.yaml")
    job.write_text(job.read_text().replace("  facts: mine.yaml\n", ""))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["MineForCausalLM"]}))
    for words in (
        ("plan", job),
        ("coverage", "--model", model, "--data", data),
        ("eval", model, model, "--data", data),
    ):
        assert "has no MineForCausalLM; give a model that it has, or facts with" in refused(*words)


def unknown_class(values: dict[str, Any]) -> None:
    values["model_class"] = "NoSuchModel"


def tensor_without_place(values: dict[str, Any]) -> None:
    values["kinds"][0]["tensors"]["self_attn.sinks"] = {"shape": [4], "dtype": "BF16"}


def linear_left_out(values: dict[str, Any]) -> None:
    del values["kinds"][0]["linears"]["self_attn.q_proj"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (unknown_class, r"model_class: transformers .* has no NoSuchModel; give a model"),
        (tensor_without_place, r"no place for self_attn\.sinks; if the model computes without it, name it among"),
        (linear_left_out, r"transformers' layer needs self_attn\.q_proj\.weight; name it among"),
        (lambda _: None, None),
    ],
)
def test_transformers_is_asked_whether_the_facts_fit_it(
    change: Callable[[dict[str, Any]], None], said: str | None, job: Path
) -> None:
    values = facts_of_mine()
    change(values)
    (job.parent / "mine.yaml").write_text(dump(values))
    source = open_folder(job.parent / "model")
    facts = architecture_for(source.config, "x", job.parent / "mine.yaml")
    with contextlib.nullcontext() if said is None else pytest.raises(ArchitectureError, match=said):
        model = StreamedModel(source, facts, CPU, torch.float32)
        with model.layer(0):
            pass


def test_the_hash_covers_what_the_facts_say_and_not_where_or_how(job: Path) -> None:
    recipe, path = read_recipe(str(job))
    before, file = settings_hash(recipe, path), job.parent / "mine.yaml"
    resolved = resolve_recipe(recipe, path)
    assert (resolved.hash, resolved.recipe.source.facts) == (before, "facts.yaml")
    assert yaml.safe_load(resolved.texts()["facts.yaml"]) == facts_of_mine()
    assert "somebody" not in resolved.texts()["facts.yaml"]
    file.write_text(file.read_text().replace("of somebody's own", "another comment"))
    assert settings_hash(recipe, path) == before
    file.write_text(dump(facts_of_mine(scale_dtype="F32")))
    assert settings_hash(recipe, path) != before


# What is made with them.


def test_an_output_carries_its_facts_and_is_read_with_them(made: Path, command: Command) -> None:
    output, source, data = made / "output", made / "model", made / "held-out.yaml"
    report = json.loads((output / "report.json").read_text())
    assert report["settings"]["recipe"]["source"]["facts"] == "facts.yaml"
    assert {"facts.yaml"} <= set(report["files"]) & set(report["sha256"])
    assert [gate["name"] for gate in report["gates"] if gate["passed"]] == ["audit", "consumers"]
    assert command("verify", output, "--source", source) == 0
    assert "\nread with the facts that it carries, facts.yaml\n" in (said := command.out)
    assert "no differences" in said
    assert command("eval", source, output, "--data", data, "--no-picture", "--json") == 0
    evaluated = command
    assert json.loads(evaluated.out)["candidates"][0]["kl"]["mean"] == pytest.approx(report["kl"]["mean"], rel=1e-3)
    assert f"facts: {output / 'facts.yaml'}\n" in evaluated.err
    words = ("coverage", "--model", source, "--facts", output / "facts.yaml", "--data", data, "--no-picture", "--json")
    assert command(*words) == 0
    assert command("publish", output, "--repo", "a/b", "--source", source, "--dry-run") == 3
    assert "facts.yaml" in command.out
    assert command.out.endswith("would stop the upload: token\n")


def test_data_as_of_a_family_are_laid_over_what_the_class_says(job: Path) -> None:
    values = yaml.safe_load(known()["minimax_m2"].read_text()) | MINE
    before, file = prepare(str(job)).facts, job.parent / "mine.yaml"
    file.write_text(dump(values | {"published": []}))
    assert prepare(str(job)).facts == before
    file.write_text(dump(values | {"roles": values["roles"] | {"norms": "x"}}))
    with pytest.raises(ArchitectureError, match=r"mine.yaml:\d+: roles.norms: unknown key"):
        prepare(str(job))
    for key, value, said in (
        ("experts", "block", "roles.experts: no layer of MiniMaxM2ForCausalLM has a module block"),
        ("readers", ["mlp.shared"], "norm.readers: mlp.shared is neither router, experts nor residual, nor any tensor"),
    ):
        file.write_text(dump(values | {"roles": values["roles"] | {key: value}}))
        with pytest.raises(ArchitectureError, match=rf"config.json: .*{said}"):
            prepare(str(job))


def test_the_published_recipe_makes_the_same_plan(made: Path) -> None:
    first = prepare(str(made / "recipe.yaml"))
    again = prepare(str(made / "output" / "recipe.yaml"), source_folder=made / "model")
    assert (again.facts, again.plan) == (first.facts, first.plan)
    assert settings_hash(again.recipe, again.path) == settings_hash(first.recipe, first.path)
    assert run(first, Options(made / "output", CPU))["already_done"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.unlink(), "facts.yaml: cannot be read (No such file or directory)"),
        (lambda file: file.write_text("model_type: mine\n"), "facts.yaml: changed since the run wrote it"),
        (lambda file: file.write_text(file.read_text() + "# more\n"), "facts.yaml: changed since the run wrote it"),
    ],
)
def test_facts_that_are_gone_or_changed_are_a_difference(
    change: Callable[[Path], object], said: str, made: Path, tmp_path: Path, command: Command
) -> None:
    shutil.copytree(made / "output", tmp_path / "copy")
    change(tmp_path / "copy" / "facts.yaml")
    assert command("verify", tmp_path / "copy", "--source", made / "model") == 3
    out = command.out
    assert said in out
    assert "1 difference:" in out
    words = ("verify", tmp_path / "copy", "--source", made / "model", "--facts", made / "mine.yaml")
    assert command(*words) == 3
    assert said in command.out


def test_facts_beside_an_output_that_was_made_without_are_not_read(made: Path, tmp_path: Path) -> None:
    """They are no side file of a model either: the source of such a name is not copied, nor called a stranger."""
    write_tokenizer(tiny.make(tmp_path / "model"))
    (tmp_path / "model" / "facts.yaml").write_text("of the source\n")
    recipe = tiny.write_recipe(tmp_path)
    run(prepare(str(recipe)), Options(tmp_path / "output", CPU))
    assert not (tmp_path / "output" / "facts.yaml").exists()
    (tmp_path / "output" / "facts.yaml").write_text("nonsense: [")
    assert verify_folder(tmp_path / "output", open_folder(tmp_path / "model"), CPU).differences == []


def test_a_run_is_not_resumed_with_other_facts(job: Path) -> None:
    output, file = job.parent / "output", job.parent / "mine.yaml"
    cut_in_layer(0, prepare(str(job)), Options(output, CPU))
    file.write_text(dump(facts_of_mine(scale_dtype="F32")))
    with pytest.raises(OutputError, match=r"holds an unfinished run with another facts\.yaml "):
        run(prepare(str(job)), Options(output, CPU))


def test_a_stitched_output_carries_them_too(made: Path, tmp_path: Path, command: Command) -> None:
    words = ("stitch", "--source", made / "model", "--experts", made / "output", "--output", tmp_path / "mixed")
    assert command(*words) == 2
    assert command(*words, "--repair-router", "--facts", made / "mine.yaml") == 0
    assert (tmp_path / "mixed" / "facts.yaml").read_text() == (made / "output" / "facts.yaml").read_text()
    assert command("verify", tmp_path / "mixed", "--source", made / "model") == 0
    assert "no differences" in command.out
