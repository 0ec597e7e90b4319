"""Whatever is wrong with the input ends in exit code 2, one line with place and remedy, and no finished output."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import JobFolder

from quantizers.planning.job import prepare
from quantizers.system.errors import InputError

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
LAYER = "model.layers.0."
MATRIX = LAYER + "block_sparse_moe.experts.3.w2"
Edit = Callable[["JobFolder"], object]


def refuses(quantize: Callable[..., Any], case: JobFolder, *said: str) -> None:
    """`quantize run` ends as it must, and its one line, or its line for each mistake, says all of `said`."""
    code, out, err = quantize("run", case.recipe, "--output", case.output, "--device", "cpu")
    assert code == 2, err
    assert out == ""
    begun = [line for line in err.splitlines() if " → " in line]  # the line with which a run begins
    assert len(begun) <= 1
    said_wrong = [line for line in err.splitlines() if line not in begun]
    assert all(line.startswith("quantize: ") for line in said_wrong)
    mistakes = err.count(": missing; add it\n")
    assert len(said_wrong) == max(1, mistakes), err
    assert [words for words in said if words not in err] == [], err
    assert not (case.output / "config.json").exists()
    assert not (case.output / INDEX).exists()


# The edits: each returns a function that spoils one thing.


def recipe(text: str) -> Edit:
    return lambda case: case.recipe.write_text(text)


def config(**changes: Any) -> Edit:
    """Keys of config.json set to a value, or removed where the value is ...."""

    def edit(case: JobFolder) -> None:
        body = json.loads((case.model / "config.json").read_text()) | changes
        body = {key: value for key, value in body.items() if value is not ...}
        (case.model / "config.json").write_text(json.dumps(body))

    return edit


def shard(change: Callable[[bytes], bytes]) -> Edit:
    return lambda case: (case.model / FIRST).write_bytes(change((case.model / FIRST).read_bytes()))


def tensors(change: Callable[[dict[str, torch.Tensor]], object], **sizes: Any) -> Edit:
    """The checkpoint written anew with other tensors, index included."""

    def edit(case: JobFolder) -> None:
        c = tiny.config(**({"num_hidden_layers": 1} | sizes))
        weights = tiny.tensors(c)
        change(weights)
        tiny.write(case.model, c, weights)

    return edit


def spoil(name: str, value: float = math.nan) -> Edit:
    return tensors(lambda weights: weights[name].view(-1)[:1].fill_(value))


def nan_in_fp8(name: str) -> Edit:
    return tensors(lambda weights: weights[name].view(torch.uint8).view(-1)[5:6].fill_(0x7F))


def link_out(case: JobFolder) -> None:
    (case.model / SECOND).rename(case.folder / "elsewhere.safetensors")
    (case.model / SECOND).symlink_to(case.folder / "elsewhere.safetensors")


SOURCE = "source: {model: model}\n"
SET = "calibration: set.yaml\n"
RECIPES: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "unknown key below": (
        recipe(SOURCE + SET + "experts:\n  bit: 4\n"),
        (":4: experts.bit:", "did you mean bits or bits_per_weight?"),
    ),
    "empty": (recipe(""), ("recipe.yaml:1: source: missing; add it", "recipe.yaml:1: calibration: missing; add it")),
    "not YAML": (recipe("source: {model: model\n"), ("recipe.yaml:2: not valid YAML", "correct it")),
    "no recipe": (lambda case: case.recipe.unlink(), ("recipe.yaml: no such recipe; give a file",)),
    "no set": (
        lambda case: (case.folder / "set.yaml").unlink(),
        ("recipe.yaml:3: calibration: set.yaml: no such set; correct the path",),
    ),
    "no data": (lambda case: (case.folder / "t.jsonl").unlink(), ("set.yaml:", "t.jsonl")),
    "no model": (
        lambda case: shutil.rmtree(case.model),
        (
            "recipe.yaml:",
            "source.model: model is neither a folder beside the recipe nor a Hub id (owner/name); give --source",
        ),
    ),
    "Hub id without network": (recipe("source: {model: nobody/nothing}\n" + SET), ("nobody/nothing", "download it")),
}

CONFIGS: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "not a MoE": (
        config(model_type="llama", architectures=["LlamaForCausalLM"], num_local_experts=..., num_experts_per_tok=...),
        ("no layers with a module called experts; give a mixture-of-experts model",),
    ),
    "no facts": (
        config(model_type="dots9", architectures=["Dots9ForCausalLM"]),
        ("has no Dots9ForCausalLM; give a model that it has, or facts with `source.facts`",),
    ),
    "softmax router": (
        config(scoring_func="softmax"),
        (
            "config.json: scoring_func is 'softmax', but MiniMaxM2ForCausalLM in transformers does not read it",
            'give another model; or if this one was trained so, write "sigmoid" there',
        ),
    ),
    "absurd hidden size": (config(hidden_size=1 << 40), ("hidden_size is 1099511627776; a whole number from 1 to",)),
    "missing size": (config(head_dim=...), ("q_norm.weight has shape [256], config.json says [512]; they do not",)),
    "too many chosen": (
        config(num_experts_per_tok=5),
        ("num_experts_per_tok 5 is larger than num_local_experts 4; correct",),
    ),
    "heads": (config(num_key_value_heads=3), ("num_key_value_heads 3 does not divide num_attention_heads 4; correct",)),
    "odd rotary_dim": (config(rotary_dim=31), ("rotary_dim is 31; an even number up to 64 is needed",)),
    "rotary factor": (
        config(rope_parameters={"partial_rotary_factor": 1.0}),
        ("partial_rotary_factor is 1.0", "means 0.5"),
    ),
    "no config": (
        lambda case: (case.model / "config.json").unlink(),
        ("has no config.json; give a checkpoint folder",),
    ),
    "config is not JSON": (
        lambda case: (case.model / "config.json").write_text('{\n"a": 1,\n}'),
        ("config.json:3: not valid JSON; download this file again",),
    ),
}

FILES: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "missing shard": (
        lambda case: (case.model / SECOND).unlink(),
        (f"names {SECOND}, which is not in the folder; download",),
    ),
    "link out": (link_out, (f"{SECOND}: is a link that leads out of the checkpoint; put the file itself there",)),
    "truncated": (shard(lambda raw: raw[:-10]), (FIRST, "the file is truncated", "download this shard again")),
}

TENSORS: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "unknown tensor": (
        tensors(lambda w: w.update({LAYER + "block_sparse_moe.shared.weight": torch.ones(2)})),
        (LAYER + "block_sparse_moe.shared.weight is not among the facts of minimax_m2", "refused"),
    ),
    "vocabulary": (
        config(vocab_size=321),
        ("model.embed_tokens.weight has shape [320, 128], config.json says [321, 128]",),
    ),
}

# Found while the run is going, when the layer is read.
NOT_FINITE: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "NaN in an expert": (nan_in_fp8(f"{MATRIX}.weight"), (f"{MATRIX}.weight or its scale holds a NaN", "download")),
    "infinite scale": (spoil(f"{MATRIX}.weight_scale_inv", math.inf), (f"{MATRIX}.weight or its scale holds a NaN",)),
    "NaN in a norm": (spoil(LAYER + "input_layernorm.weight"), ("input_layernorm.weight holds a NaN", "download")),
    "NaN in the router": (spoil(LAYER + "block_sparse_moe.gate.weight"), ("block_sparse_moe.gate.weight holds a NaN",)),
    "NaN in the head": (spoil("lm_head.weight"), ("lm_head.weight or its scale holds a NaN",)),  # which no layer reads
    "NaN in the embedding": (spoil("model.embed_tokens.weight"), ("model.embed_tokens.weight holds a NaN", "download")),
}

ALL = {f"{name}-{key}": value for name, table in (
    ("recipe", RECIPES), ("config", CONFIGS), ("file", FILES), ("tensor", TENSORS), ("number", NOT_FINITE),
) for key, value in table.items()}  # fmt: skip


@pytest.mark.parametrize(("edit", "said"), ALL.values(), ids=ALL)
def test_bad_input_is_refused(quantize: Callable[..., Any], case: JobFolder, edit: Edit, said: tuple[str, ...]) -> None:
    edit(case)
    refuses(quantize, case, *said)


def test_the_good_input_runs(quantize: Callable[..., Any], case: JobFolder) -> None:
    """What the tests above spoil is otherwise whole."""
    code, _, err = quantize("run", case.recipe, "--output", case.output, "--device", "cpu")
    assert code == 0, err
    assert (case.output / "config.json").is_file()
    assert not (case.output / ".quantize").exists()


def test_a_nan_in_a_later_layer_leaves_nothing_finished(quantize: Callable[..., Any], case: JobFolder) -> None:
    name = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    tensors(lambda w: w[name].view(torch.uint8)[0].fill_(0x7F), num_hidden_layers=2)(case)
    code, _, err = quantize("run", case.recipe, "--output", case.output, "--device", "cpu")
    assert code == 2
    assert name in err.splitlines()[-1]
    assert [path.name for path in case.output.iterdir()] == [".quantize"]


# The output folder.


def test_an_output_with_something_else_in_it(quantize: Callable[..., Any], case: JobFolder) -> None:
    case.output.mkdir()
    (case.output / "thesis.txt").write_text("mine")
    refuses(quantize, case, f"{case.output}: is not empty", "give a new or empty folder")
    assert [path.name for path in case.output.iterdir()] == ["thesis.txt"]


def test_an_output_that_is_a_file(quantize: Callable[..., Any], case: JobFolder) -> None:
    case.output.write_text("mine")
    refuses(quantize, case, f"{case.output}: is a file; give a new or empty folder")
    assert case.output.read_text() == "mine"


def test_an_output_below_a_file(quantize: Callable[..., Any], case: JobFolder) -> None:
    (case.folder / "file").write_text("mine")
    code, _, err = quantize("run", case.recipe, "--output", case.folder / "file" / "output", "--device", "cpu")
    assert (code, err.count("\n")) == (2, 1)
    assert str(case.folder / "file") in err


def test_the_source_as_output(quantize: Callable[..., Any], case: JobFolder) -> None:
    before = {path.name: path.read_bytes() for path in case.model.iterdir()}
    code, _, err = quantize("run", case.recipe, "--output", case.model, "--device", "cpu")
    assert (code, err.count("\n")) == (2, 1)
    assert before == {path.name: path.read_bytes() for path in case.model.iterdir()}


@pytest.mark.parametrize("report", ['{"settings": {"hash": "another"}}', '{"settings": 1}', "[]"])
def test_an_output_finished_by_another_recipe(quantize: Callable[..., Any], case: JobFolder, report: str) -> None:
    case.output.mkdir()
    (case.output / "config.json").write_text("{}")
    (case.output / "report.json").write_text(report)
    code, _, err = quantize("run", case.recipe, "--output", case.output, "--device", "cpu")
    assert (code, err.count("\n")) == (2, 1), err
    assert str(case.output) in err
    assert {path.name for path in case.output.iterdir()} == {"config.json", "report.json"}


@pytest.mark.parametrize("journal", ['{"experts": 1}', "[]", "{"])
def test_an_unfinished_run_of_other_settings(quantize: Callable[..., Any], case: JobFolder, journal: str) -> None:
    (case.output / ".quantize").mkdir(parents=True)
    (case.output / ".quantize" / "run.json").write_text(journal)
    refuses(quantize, case, str(case.output), "--fresh")


# The command line.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "no-such-recipe", "--output", "x"), "no-such-recipe: no such recipe; give a file, or a name"),
        (("plan", "~nobody-at-all/recipe.yaml"), "~nobody-at-all/recipe.yaml: no such recipe"),
        (("plan", "r" * 5000), "no such recipe"),
        (("plan", "."), "no such recipe"),
        (("run", "tiny"), "tiny: no such recipe (did you mean tiny-minimax-m2-fp8-int4?); give a file, or a name"),
        (("run",), "RECIPE"),
        (("plan", "x", "--nonsense"), "--nonsense"),
        (("nonsense",), "nonsense"),
        (("verify", "no-such-folder", "--source", "./no-such-source"), "no such folder"),
    ],
)
def test_bad_arguments(quantize: Callable[..., Any], arguments: tuple[str, ...], said: str) -> None:
    code, out, err = quantize(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert said in err


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_here(quantize: Callable[..., Any], case: JobFolder, device: str) -> None:
    code, _, err = quantize("run", case.recipe, "--output", case.output, "--device", device)
    assert (code, err.count("\n")) == (2, 1), err
    assert f"--device {device}" in err
    assert not case.output.exists()


# A plan from a lone config.json.


@pytest.mark.parametrize(
    "body", ["{", json.dumps(tiny.config(num_hidden_layers=100, num_local_experts=4096))], ids=["not JSON", "absurd"]
)
def test_a_plan_from_a_lone_config_that_is_wrong(quantize: Callable[..., Any], case: JobFolder, body: str) -> None:
    shutil.rmtree(case.model)
    case.model.mkdir()
    (case.model / "config.json").write_text(body)
    code, out, err = quantize("plan", case.recipe)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "config.json" in err


# Values that transformers reads and the plan does not.


@pytest.mark.parametrize(
    "changes", [{"rms_norm_eps": "small"}, {"attention_dropout": []}], ids=lambda changes: next(iter(changes))
)
def test_a_config_that_transformers_refuses(
    quantize: Callable[..., Any], case: JobFolder, changes: dict[str, Any]
) -> None:
    config(**changes)(case)
    refuses(quantize, case, str(case.model), next(iter(changes)))


# Anything at all in config.json.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = [*tiny.config(), "shared_intermediate_size", "rope_parameters"]


@settings(derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3))
def test_any_config_is_planned_or_refused(case: JobFolder, changes: dict[str, Any]) -> None:
    body = tiny.config(num_hidden_layers=1) | changes
    (case.model / "config.json").write_text(json.dumps(body))
    said = ""
    try:
        job = prepare(str(case.recipe))
    except InputError as failure:
        said = str(failure)
    if said:
        assert "\n" not in said
        assert str(case.model) in said
    else:
        assert len(job.plan.actions) == len(tiny.tensors(tiny.config(num_hidden_layers=1)))
