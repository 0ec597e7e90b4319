"""Facts for a checkpoint that differs from the kept ones: every difference is named at once, and the facts then fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from commands import quantize
from planned import published, tiny_model

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for, known
from quantizers.architectures.sizes import sizes_of
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.planning.assign_actions import make_plan
from quantizers.planning.facts_text import facts_text
from quantizers.planning.fit_facts import Fitted, fit_facts
from quantizers.planning.job import prepare
from quantizers.planning.plan import Plan
from quantizers.recipe.schema import Experts
from quantizers.system.errors import ArchitectureError, CheckpointError
from quantizers.system.schema import load

Tensors = dict[str, Spec]
Change = Callable[[dict[str, Any], Tensors], object]
LAYER, MOE, Q = "model.layers.*", "block_sparse_moe", "self_attn.q"


def checkpoint(**changes: Any) -> tuple[dict[str, Any], Tensors]:
    """config.json and headers of a tiny MiniMax-M2 as the built-in facts have it."""
    model = tiny_model(**changes)
    return model.config, model.tensors


def read_back(fitted: Fitted, folder: Path) -> Architecture:
    (folder / "facts.yaml").write_text(facts_text(fitted, "tiny"))
    return load(folder / "facts.yaml", Architecture, ArchitectureError)


def planned(facts: Architecture, config: dict[str, Any], tensors: Tensors) -> Plan:
    return make_plan(facts, sizes_of(facts, config, "x"), tensors, Experts(), "x", (128, 128))


def in_layers(name: str, dtype: str, *shape: int) -> Change:
    return lambda _, tensors: tensors.update({f"model.layers.{n}.{name}": Spec(dtype, shape) for n in (0, 1)})


def without(name: str) -> Change:
    def change(_: dict[str, Any], tensors: Tensors) -> None:
        for n in (0, 1):
            del tensors[f"model.layers.{n}.{name}"]

    return change


def scales(dtype: str) -> Change:
    def change(_: dict[str, Any], tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith("_scale_inv"):
                tensors[name] = Spec(dtype, tensors[name].shape)

    return change


def fp8_linear(config: dict[str, Any], tensors: Tensors) -> None:
    in_layers("shared.up.weight", "F8_E4M3", 192, 128)(config, tensors)
    in_layers("shared.up.weight_scale_inv", "F32", 2, 1)(config, tensors)


def wider_heads(config: dict[str, Any], tensors: Tensors) -> None:
    in_layers("self_attn.v_proj.weight", "F8_E4M3", 256, 128)(config, tensors)
    in_layers("self_attn.v_proj.weight_scale_inv", "F32", 2, 1)(config, tensors)


def renamed_key(config: dict[str, Any], _: Tensors) -> None:
    config["num_experts"] = config.pop("num_local_experts")


# What is changed: the row (what, name, kept, found, written, tensors), and section, name and value in the new facts.
DIFFERENCES: dict[str, tuple[Change, tuple[Any, ...], tuple[str, str, Any]]] = {
    "a size that the headers say": (
        lambda config, _: config.pop("head_dim"),
        ("size", "head_dim", "the key", "no such key", "head_dim: 64", 0),
        ("sizes", "head_dim", {"key": "head_dim", "otherwise": 64}),
    ),
    "a size that is counted": (
        lambda config, _: config.pop("num_hidden_layers"),
        ("size", "num_hidden_layers", "the key", "no such key", "layers: 2", 0),
        ("sizes", "layers", {"key": "num_hidden_layers", "otherwise": 2}),
    ),
    "a size under another family's key": (
        renamed_key,
        ("size", "num_local_experts", "the key", "no such key", "experts: num_experts", 0),
        ("sizes", "experts", "num_experts"),
    ),
    "what the forward pass relies on": (
        lambda config, _: config.update(use_routing_bias=False),
        ("assert", "use_routing_bias", "True", "False", "False", 0),
        ("asserts", "use_routing_bias", False),
    ),
    "a missing tensor": (
        without("self_attn.q_norm.weight"),
        ("missing", "model.layers.*.self_attn.q_norm.weight", "BF16 [256]", "nothing", "taken out", 2),
        ("every_layer.tensors", "self_attn.q_norm.weight", None),
    ),
    "a router in bfloat16": (
        in_layers(f"{MOE}.gate.weight", "BF16", 4, 128),
        ("dtype", f"model.layers.*.{MOE}.gate.weight", "F32", "BF16", "dtype: BF16", 2),
        ("moe_layer.tensors", f"{MOE}.gate.weight", {"shape": ["experts", "hidden"], "dtype": "BF16"}),
    ),
    "another shape": (
        in_layers("self_attn.q_norm.weight", "BF16", 64),
        ("shape", "model.layers.*.self_attn.q_norm.weight", "[256]", "[64]", "shape: [64]", 2),
        ("every_layer.tensors", "self_attn.q_norm.weight", {"shape": [64], "dtype": "BF16"}),
    ),
    "another shape of an FP8 matrix, and so of its scales": (
        wider_heads,
        ("shape", "model.layers.*.self_attn.v_proj.weight", "[128, 128]", "[256, 128]", "shape: [256, 128]", 2),
        ("every_layer.linears", "self_attn.v_proj", [256, 128]),
    ),
    "scales in bfloat16": (
        scales("BF16"),
        ("scales", "*.weight_scale_inv", "F32", "BF16", "scale_dtype: BF16", 32),
        ("scale_dtype", "", "BF16"),
    ),
    "an unknown vector": (
        in_layers("self_attn.sinks", "BF16", 4),
        ("unknown", "model.layers.*.self_attn.sinks", "nothing", "BF16 [4]", "kept", 2),
        ("every_layer.tensors", "self_attn.sinks", {"shape": [4], "dtype": "BF16"}),
    ),
    "an unknown FP8 matrix": (
        fp8_linear,
        ("unknown", "model.layers.*.shared.up.weight", "nothing", "F8_E4M3 [192, 128]", "kept", 2),
        ("every_layer.linears", "shared.up", [192, 128]),
    ),
    "an unknown tensor of one layer": (
        lambda _, tensors: tensors.update({"model.layers.1.once": Spec("F32", (3,))}),
        ("unknown", "model.layers.*.once", "nothing", "F32 [3]", "kept", 1),
        ("outside", "model.layers.1.once", {"shape": [3], "dtype": "F32"}),
    ),
    "an unknown tensor outside the layers": (
        lambda _, tensors: tensors.update({"model.mtp.norm": Spec("BF16", (128,))}),
        ("unknown", "model.mtp.norm", "nothing", "BF16 [128]", "kept", 1),
        ("outside", "model.mtp.norm", {"shape": [128], "dtype": "BF16"}),
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_named_and_the_new_facts_fit(name: str, tmp_path: Path) -> None:
    change, row, (section, entry, value) = DIFFERENCES[name]
    config, tensors = checkpoint()
    change(config, tensors)
    fitted = fit_facts(config, tensors, "here")
    assert row in [tuple(vars(one).values()) for one in fitted.differences]
    assert len(fitted.differences) == (2 if name == "an unknown FP8 matrix" else 1)
    assert fitted.fits
    found = fitted.values
    for key in section.split("."):
        found = found[key]
    assert (found.get(entry) if entry else found) == value
    plan = planned(read_back(fitted, tmp_path), config, tensors)
    assert {action.source for action in plan.actions} == set(tensors)
    kept = architecture_for(tiny.config(), "x")
    if row[0] != "size" and row[0] != "assert" and row[0] != "dtype" and row[0] != "scales":
        with pytest.raises(CheckpointError):
            planned(kept, config, tensors)


def test_a_linear_module_that_is_missing_is_named_nowhere(tmp_path: Path) -> None:
    config, tensors = checkpoint()
    for part in ("weight", "weight_scale_inv"):
        without(f"self_attn.v_proj.{part}")(config, tensors)
    fitted = fit_facts(config, tensors, "here")
    assert fitted.fits
    facts = read_back(fitted, tmp_path)
    assert facts.smoothing == {"input_layernorm.weight": ["self_attn.q_proj", "self_attn.k_proj"]}
    assert facts.tensor_parallel is not None
    assert "v_proj" not in str(facts.tensor_parallel)


def test_a_size_is_written_as_the_expression_that_holds() -> None:
    config, tensors = checkpoint(head_dim=32)
    del config["head_dim"]
    fitted = fit_facts(config, tensors, "here")
    assert fitted.values["sizes"]["head_dim"] == {"key": "head_dim", "otherwise": "hidden / heads"}


def test_a_tied_head_is_the_embedding() -> None:
    config, tensors = checkpoint()
    config["tie_word_embeddings"] = True
    del tensors["lm_head.weight"]
    fitted = fit_facts(config, tensors, "here")
    assert [(one.what, one.written) for one in fitted.differences] == [
        ("assert", "True"),
        ("missing", "head: model.embed_tokens.weight"),
    ]
    assert fitted.values["head"] == "model.embed_tokens.weight"
    planned(Architecture.model_validate(fitted.values), config, tensors)


def test_a_plan_with_facts_of_ones_own_is_not_made_from_a_kept_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gives facts says that the kept ones are not this model's, so its own headers are needed."""
    config, tensors = checkpoint()
    (tmp_path / "facts.yaml").write_text(facts_text(fit_facts(config, tensors, "here"), "tiny"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("quantizers.planning.hub_headers.read_hub", lambda *_: (config, tensors, "abc"))
    job = prepare("minimax-m2.1-fp8-int4", offline_facts=True, facts_file=tmp_path / "facts.yaml")
    assert (job.basis, job.sizes["layers"]) == ("the headers of MiniMaxAI/MiniMax-M2.1 on the Hub, commit abc", 2)


def test_all_differences_come_at_once_and_unknown_tensors_are_named_as_possible_readers(tmp_path: Path) -> None:
    config, tensors = checkpoint()
    changes = [name for name in DIFFERENCES if name != "another shape"]  # of a tensor that another change removes
    for name in changes:
        DIFFERENCES[name][0](config, tensors)
    fitted = fit_facts(config, tensors, "here")
    found = {tuple(vars(one).values()) for one in fitted.differences}
    expected = {DIFFERENCES[name][1] for name in changes}
    assert {row[:5] for row in expected} <= {row[:5] for row in found}  # there are more scales by then
    suspects = ["self_attn.sinks", "shared.up", "model.layers.1.once"]
    assert fitted.suspects == suspects
    facts = read_back(fitted, tmp_path)
    assert facts.modules.without == suspects[:2]
    assert r".*shared\.up$" in facts.targets.fp8
    actions = {action.source: action.kind for action in planned(facts, config, tensors).actions}
    assert [actions[f"model.layers.0.{name}"] for name in ("self_attn.sinks", "shared.up.weight")] == ["keep", "keep"]
    assert facts.norm.readers == ["router", "experts", *suspects]
    assert actions["model.layers.0.post_attention_layernorm.weight"] == "keep"

    # Nothing is folded while one of them may read the norm; the user finds that none does, and says so.
    for readers in ([], *([suspect] for suspect in suspects)):
        values = fitted.values | {"norm": {**fitted.values["norm"], "readers": ["router", "experts", *readers]}}
        kinds = set(planned(Architecture.model_validate(values), config, tensors).counts())
        assert ({"fold", "compensate"} <= kinds) == (not readers)


def test_where_nothing_differs_the_facts_are_the_kept_ones(tmp_path: Path) -> None:
    config, tensors = checkpoint()
    fitted = fit_facts(config, tensors, "here")
    assert (fitted.differences, fitted.suspects) == ([], [])
    kept = architecture_for(config, "x")
    assert read_back(fitted, tmp_path) == kept.model_copy(update={"published": []})


@pytest.mark.parametrize("family", known())
def test_every_published_model_has_no_difference_from_its_facts(family: str) -> None:
    for one in load(known()[family], Architecture).published:
        model = published(one.models[0], layers=4, experts=16)
        assert fit_facts(model.config, model.tensors, "here").differences == []


def of_glm() -> tuple[dict[str, Any], Tensors]:
    """Layers 0 to 2 without experts, 3 with them, 4 predicts a further token."""
    model = published("zai-org/GLM-4.6-FP8", layers=4, experts=16)
    return model.config, model.tensors


def test_layers_that_predict_further_tokens_may_lack_what_is_optional_or_be_left_out() -> None:
    config, tensors = of_glm()
    lacking = {name: spec for name, spec in tensors.items() if name != "model.layers.4.shared_head.head.weight"}
    without_layer = {name: spec for name, spec in tensors.items() if not name.startswith("model.layers.4.")}
    assert len(without_layer) < len(lacking) < len(tensors)
    for there in (lacking, without_layer):
        assert fit_facts(config, there, "here").differences == []
    del lacking["model.layers.4.enorm.weight"]
    (difference,) = fit_facts(config, lacking, "here").differences
    assert (difference.what, difference.name, difference.written) == (
        "missing", "model.layers.*.enorm.weight", "taken out",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "section"),
    [([4], "mtp_layer"), ([3, 4], "moe_layer"), ([0, 1, 2], "dense_layer"), ([0, 1, 2, 3, 4], "every_layer")],
)
def test_an_unknown_tensor_belongs_to_the_kind_of_layer_that_has_it(
    layers: list[int], section: str, tmp_path: Path
) -> None:
    config, tensors = of_glm()
    tensors |= {f"model.layers.{layer}.gain": Spec("BF16", (4,)) for layer in layers}
    fitted = fit_facts(config, tensors, "here")
    assert [(one.name, one.written, one.tensors) for one in fitted.differences] == [
        ("model.layers.*.gain", "kept", len(layers))
    ]
    facts = read_back(fitted, tmp_path)
    assert "gain" in getattr(facts, section).tensors
    assert fitted.suspects == (["gain"] if section in ("moe_layer", "every_layer") else [])
    assert ("gain" in facts.modules.without) == (section != "mtp_layer")
    assert {action.source for action in planned(facts, config, tensors).actions} == set(tensors)


def test_a_tensor_that_config_json_denies_is_found(tmp_path: Path) -> None:
    config, tensors = of_glm()
    fitted = fit_facts(config | {"use_qk_norm": False}, tensors, "here")
    assert {one.name for one in fitted.differences} == {f"model.layers.*.self_attn.{x}_norm.weight" for x in "qk"}
    facts = read_back(fitted, tmp_path)
    assert facts.every_layer.tensors["self_attn.q_norm.weight"].when is None
    assert len(planned(facts, config | {"use_qk_norm": False}, tensors).actions) == len(tensors)


def test_layers_are_counted_without_those_that_predict_further_tokens() -> None:
    config, tensors = of_glm()
    del config["num_hidden_layers"]
    fitted = fit_facts(config, tensors, "here")
    assert fitted.values["sizes"]["layers"] == {"key": "num_hidden_layers", "otherwise": 4}


@pytest.mark.parametrize(
    ("change", "row"),
    [
        (without(f"{MOE}.gate.weight"), ("missing", f"{LAYER}.{MOE}.gate.weight", 2)),
        (without(f"{Q}_proj.weight_scale_inv"), ("missing", f"{LAYER}.{Q}_proj.weight_scale_inv", 2)),
        (lambda _, t: t.pop(f"model.layers.1.{Q}_norm.weight"), ("missing", f"{LAYER}.{Q}_norm.weight", 1)),
        (in_layers(f"{MOE}.experts.0.w1.weight", "BF16", 32, 128), ("shape", f"{LAYER}.{MOE}.experts.*.w1.weight", 2)),
        (in_layers("table", "I64", 4), ("unknown", f"{LAYER}.table", 2)),
        (lambda _, t: t.update({"mtp.weight": Spec("F8_E4M3", (4, 4))}), ("unknown", "mtp.weight", 1)),
        (scales("F16"), ("scales", "*.weight_scale_inv", 32)),
    ],
)  # fmt: skip
def test_what_facts_have_no_words_for_is_named_and_still_refused(
    change: Change, row: tuple[str, str, int], tmp_path: Path
) -> None:
    config, tensors = checkpoint()
    change(config, tensors)
    fitted = fit_facts(config, tensors, "here")
    assert row in [(one.what, one.name, one.tensors) for one in fitted.differences if one.written is None]
    assert not fitted.fits
    with pytest.raises(CheckpointError):
        planned(read_back(fitted, tmp_path), config, tensors)


def test_sizes_that_nothing_says_are_named_together() -> None:
    config, tensors = checkpoint()
    for key in ("num_experts_per_tok", "num_attention_heads", "head_dim", "num_key_value_heads"):
        del config[key]
    with pytest.raises(CheckpointError) as refused:
        fit_facts(config, tensors, "here")
    assert str(refused.value).startswith(
        "here: config.json has no num_experts_per_tok (chosen), num_attention_heads (heads), num_key_value_heads "
        "(kv_heads), head_dim (head_dim), and the headers do not say it; add it"
    )


def test_an_unknown_family_is_made_like_a_known_one(tmp_path: Path) -> None:
    config, tensors = checkpoint()
    config |= {"model_type": "mine", "architectures": ["MineForCausalLM"]}
    with pytest.raises(ArchitectureError, match=r"^here: model_type 'mine' is not known; .*--like minimax_m2 or"):
        fit_facts(config, tensors, "here")
    with pytest.raises(ArchitectureError, match=r"^--like x: no such family; give one of deepseek_v3"):
        fit_facts(config, tensors, "here", "x")
    facts = read_back(fit_facts(config, tensors, "here", "minimax_m2"), tmp_path)
    assert (facts.model_type, facts.model_class, facts.servers) == ("mine", "MineForCausalLM", {})
    assert planned(facts, config, tensors).folds


def odd_checkpoint(folder: Path) -> Path:
    """A recipe, and a checkpoint with a tensor more, a router in bfloat16, no head_dim and other scales."""
    config = tiny.config()
    tensors = tiny.tensors(config)
    del config["head_dim"]
    for name in tensors:
        if name.endswith((".gate.weight", "_scale_inv")):
            tensors[name] = tensors[name].bfloat16()
    tensors |= {f"model.layers.{n}.self_attn.sinks": torch.zeros(4) for n in (0, 1)}
    tiny.write(folder / "model", config, tensors)
    return tiny.write_recipe(folder)


def test_from_the_refusal_to_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, model = odd_checkpoint(tmp_path), tmp_path / "model"
    monkeypatch.chdir(tmp_path)
    assert quantize(monkeypatch, "plan", recipe) == 2
    refusal = capsys.readouterr().err
    assert refusal.count("\n") == 1
    assert refusal.endswith(
        f"; if this model is meant to be so, `quantize new {model} --facts` lists all differences and writes facts to "
        "start from\n"
    )
    assert quantize(monkeypatch, "new", model, "--facts") == 0
    out = capsys.readouterr().out
    for words in ("head_dim: 64", "dtype: BF16", "scale_dtype: BF16", "model.layers.*.self_attn.sinks"):
        assert words in out
    assert "listed as readers of post_attention_layernorm.weight, and AWQ folds nothing into it; remove those" in out
    assert "\n  self_attn.sinks\nwrote model-facts.yaml; next: name it in a recipe" in out
    comment = "# unknown: unless it reads post_attention_layernorm.weight, take it out of norm.readers"
    assert f"    {comment}\n    self_attn.sinks" in (tmp_path / "model-facts.yaml").read_text()
    assert quantize(monkeypatch, "plan", recipe, "--facts", "model-facts.yaml") == 0
    assert "model.layers.*.self_attn.sinks " in capsys.readouterr().out
    recipe.write_text(recipe.read_text().replace("model: model", "model: model\n  facts: model-facts.yaml"))
    assert quantize(monkeypatch, "plan", recipe) == 0
    (tmp_path / "model-facts.yaml").write_text("edited")
    assert quantize(monkeypatch, "new", model, "--facts") == 2
    assert "model-facts.yaml: exists; give another name" in capsys.readouterr().err
    assert quantize(monkeypatch, "new", model, "--like", "mixtral") == 2
    assert "--like goes with --facts" in capsys.readouterr().err


def test_what_differs_without_words_exits_3_and_what_does_not_differ_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny.config()
    tensors = tiny.tensors(config)
    monkeypatch.chdir(tmp_path)
    tiny.write(tmp_path / "same", config, tensors)
    assert quantize(monkeypatch, "new", "same", "--facts") == 0
    assert capsys.readouterr().out.startswith(
        "nothing differs from the built-in spec of minimax_m2\nwrote same-facts.yaml"
    )
    tiny.write(tmp_path / "odd", config, tensors | {"table": torch.zeros(3, dtype=torch.int64)})
    assert quantize(monkeypatch, "new", "odd", "--facts", "--json") == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["facts"], found["fits"]) == ("odd-facts.yaml", False)
    assert [(one["name"], one["written"]) for one in found["differences"]] == [("table", None)]


def test_of_the_hub_only_headers_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, tensors = checkpoint()
    monkeypatch.setattr("quantizers.planning.hub_headers.read_hub", lambda *_: (config, tensors, "commit"))
    monkeypatch.chdir(tmp_path)
    assert quantize(monkeypatch, "new", "Me/My-Model", "--facts") == 0
    assert (tmp_path / "my-model-facts.yaml").read_text().startswith("# Facts about Me/My-Model, made by")


def test_a_recipe_for_a_model_without_facts_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, `new` wrote one that every command then refused."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("odd", '{"model_type": "foo_moe", "num_experts": 3}'), ("none", "{}"), ("cut", '{"a": ')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("odd", "odd/config.json: model_type 'foo_moe': no facts for this architecture; give one of deepseek_v3, "),
        ("none", "none/config.json: model_type is missing; give a transformers checkpoint"),
        ("cut", "cut/config.json:1: not valid JSON; download this file again"),
        ("empty", "empty/config.json: cannot be read (No such file or directory); check the folder"),
    ):
        assert quantize(monkeypatch, "new", name) == 2
        refusal = capsys.readouterr().err
        assert refusal.startswith(f"quantize: {said}")
        assert refusal.count("\n") == 1
        assert ("--facts --like FAMILY` writes some" in refusal) == (name == "odd")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "empty", "none", "odd"]
    tiny.write(tmp_path / "known", tiny.config(), {})
    assert quantize(monkeypatch, "new", "known") == 0
