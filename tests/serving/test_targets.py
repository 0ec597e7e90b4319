"""The config's groups match each name that a server asks, and no other: by `re` alone, without our rules.

Where the facts of a family have no targets, those that are made from all names do the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, cast

import families
import pytest

from quantizers.architectures.families import architecture_for
from quantizers.architectures.matrices import Matrix
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.formats.fp8 import BLOCKS, ROWS, Fp8
from quantizers.formats.packed_integers import Integers
from quantizers.planning.assign_actions import expected_tensors, make_plan
from quantizers.planning.plan import Action, Kind, Plan
from quantizers.recipe.schema import Experts
from quantizers.serving.engines import SERVERS, model_modules, read_rules, server_lookups, transformers_lookups
from quantizers.stitch.write.config_files import output_config, quantization_config

LAYERS = 62  # with layers 2 and 6, 1 and 61, 6 and 62, 16 and 61
FORMS: dict[str, Fp8 | None] = {
    "glm4_moe": ROWS, "deepseek_v3": BLOCKS, "kimi_k2": BLOCKS, "glm4_moe_lite": None
}  # fmt: skip
GLM_ATTENTION = ("qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj")
MLA = (
    "fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa", "q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj"
)  # fmt: skip
MATRICES = ("gate_proj", "up_proj", "down_proj")
DENSE = (*MATRICES, "gate_up_proj")
SCHEMES = [Integers(4, 32), Integers(8, 32), Integers(4, 64)]
ONE = [Integers(4, 32)]


def section_of(family: str, schemes: list[Integers]) -> tuple[dict[str, Any], dict[int, Integers]]:
    """The quantization_config of a model of LAYERS layers, whose schemes take turns, and the scheme of each layer."""
    config = families.config(family, num_hidden_layers=LAYERS)
    facts = architecture_for(config, "x")
    plan = make_plan(facts, expected_tensors(facts, config, "x"), Experts(), "x", (128, 128))
    turns = {layer: schemes[layer % len(schemes)] for layer in plan.expert_forms}
    plan = plan.with_schemes([turns.get(layer, schemes[0]) for layer in range(LAYERS)])
    return output_config(config, facts, plan)["quantization_config"], turns


def hits(section: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """All groups with a target that matches a name; none if `ignore` covers it."""
    if any(re.match(entry[3:], name) if entry.startswith("re:") else entry == name for entry in section["ignore"]):
        return []
    groups = section["config_groups"].values()
    return [group for group in groups if any(re.match(target.removeprefix("re:"), name) for target in group["targets"])]


def kept(family: str) -> Iterator[str]:
    """What the main layers have in FP8, and what the layer after them has under vLLM's and SGLang's names."""
    attention = GLM_ATTENTION if family == "glm4_moe" else MLA
    for prefix in (*(f"model.layers.{layer}" for layer in (0, 1, 6, 61)), *beyond(family)):
        yield from (f"{prefix}.self_attn.{name}" for name in attention)
        yield from (f"{prefix}.mlp.{part}{name}" for part in ("", "shared_experts.") for name in DENSE)


def beyond(family: str) -> tuple[str, ...]:
    return () if family == "kimi_k2" else (f"model.layers.{LAYERS}", "model.decoder")


@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("schemes", [ONE, SCHEMES], ids=["one scheme", "a scheme for each layer"])
def test_each_name_that_a_server_asks_is_in_the_group_that_it_is_stored_as(
    family: str, schemes: list[Integers]
) -> None:
    section, turns = section_of(family, schemes)
    assert set(turns) == set(range(1, LAYERS))
    for layer, scheme in turns.items():
        for matrix in MATRICES:
            (group,) = hits(section, f"model.layers.{layer}.mlp.experts.0.{matrix}")
            found = [group["weights"][key] for key in ("type", "num_bits", "group_size")]
            assert found == ["int", scheme.bits, scheme.group_size]
    fp8 = [f"{prefix}.mlp.experts.0.{matrix}" for prefix in beyond(family) for matrix in MATRICES] + [*kept(family)]
    for name in fp8:
        groups = hits(section, name)
        if FORMS[family] is None:
            assert groups == [], name
        else:
            (group,) = groups
            assert (group["weights"]["type"], group["weights"]["num_bits"]) == ("float", 8), name


def test_transformers_finds_the_routed_experts_group_first() -> None:
    """Its integrations/compressed_tensors.py takes the first group that names experts, whichever it means."""
    from compressed_tensors.quantization import QuantizationConfig
    from transformers.integrations.compressed_tensors import get_experts_scheme

    for family in FORMS:
        section, _ = section_of(family, ONE)
        parsed = QuantizationConfig.model_validate(section)
        assert get_experts_scheme(parsed).weights.num_bits == 4


# Targets made from the names of all modules -----------------------------------------------------------------------


@pytest.mark.parametrize("family", families.CONFIGS)
@pytest.mark.parametrize("schemes", [ONE, SCHEMES], ids=["one scheme", "a scheme for each layer"])
def test_made_targets_give_each_module_the_scheme_of_written_ones(family: str, schemes: list[Integers]) -> None:
    """As each server asks, under its own names, and as compressed-tensors matches the published ones."""
    from compressed_tensors.utils import match_name

    config = families.config(family)
    facts = architecture_for(config, "x")
    plan = make_plan(facts, expected_tensors(facts, config, "x"), Experts(), "x", (128, 128))
    plan = plan.with_schemes([schemes[layer % len(schemes)] for layer in range(plan.layers)])
    answers = []
    for known in (facts, facts.model_copy(update={"targets": None})):
        rules = read_rules(output_config(config, known, plan)["quantization_config"])
        modules = model_modules(facts)
        asked = [(one.asked, one.scheme, one.refused) for engine in SERVERS for one in
                 server_lookups(engine, facts, rules, modules)]  # fmt: skip
        asked += [(one.asked, one.scheme, one.refused) for one in transformers_lookups(facts, rules, modules)]
        for name in (module.name for module in modules):
            ignored = any(match_name(name, entry) for entry in rules.ignore)
            first = next((one for target, one in rules.targets.items() if match_name(name, target)), None)
            asked.append((name, None if ignored else first, None))
        answers.append(asked)
    assert answers[0] == answers[1]
    assert not any(refused for _, _, refused in answers[1])


IN_FP8, PLAIN = "F8_E4M3", "BF16"
LINEAR_LAYERS, WHOLE_LAYERS = (0, 1), (2, 3)  # of linear attention, and of attention
# By the published name of a module, or a kind of it: its dtype, and whether it lies in a layer.
PUBLISHED = {
    "model.language_model.embed_tokens": PLAIN,
    "lm_head": PLAIN,
    "model.visual.patch_embed.proj": PLAIN,
    "model.visual.blocks.0.attn.qkv": PLAIN,
    "model.visual.blocks.1.mlp.o_proj": PLAIN,
    "mtp.fc": PLAIN,
    "mtp.layers.0.self_attn.q_proj": IN_FP8,
    "mtp.layers.0.mlp.gate": PLAIN,
    "mtp.layers.0.mlp.shared_expert.up_proj": IN_FP8,
    **{f"mtp.layers.0.mlp.experts.{n}.{matrix}": IN_FP8 for n in (0, 1) for matrix in MATRICES},
}  # fmt: skip
EVERY_LAYER = {"mlp.gate": PLAIN, "mlp.shared_expert_gate": PLAIN} | {
    f"mlp.shared_expert.{matrix}": IN_FP8 for matrix in MATRICES
}
LINEAR = {f"linear_attn.in_proj_{part}": IN_FP8 if part in ("qkv", "z") else PLAIN for part in ("qkv", "z", "b", "a")}
WHOLE = {f"self_attn.{part}_proj": IN_FP8 for part in "qkvo"}


def plan_of(kept: dict[str, str], layers: int = 4) -> Plan:
    """A plan of layers with two experts, INT4, in which these modules pass through."""
    prefix, actions = "model.language_model.layers.", []
    for layer in range(layers):
        for expert, matrix in ((n, m) for n in (0, 1) for m in MATRICES):
            name = f"{prefix}{layer}.mlp.experts.{expert}.{matrix}"
            packed = Integers(4, 32).specs(name, (64, 64))
            of = layer, expert, cast(Matrix, matrix.removesuffix("_proj"))
            actions.append(Action(f"{name}.weight", Spec(PLAIN, (64, 64)), "quantize", packed, *of))
    for name, dtype in kept.items():
        start, _, rest = name.partition(prefix)
        layer_or_none = int(rest.partition(".")[0]) if rest and not start else None
        spec, kind = Spec(dtype, (64, 64)), "keep" if layer_or_none is not None else "carry"
        form = BLOCKS if dtype == IN_FP8 else None
        outputs = {f"{name}.weight": spec}
        actions.append(Action(f"{name}.weight", spec, cast(Kind, kind), outputs, layer_or_none, written=form))
    return Plan(tuple(actions), layers, Experts(), (Integers(4, 32),) * layers)


def made_section(kept: dict[str, str]) -> dict[str, Any]:
    facts = architecture_for(families.config("qwen3_moe"), "x").model_copy(
        update={"targets": None, "layer_prefix": "model.language_model.layers.{layer}.", "servers": {}}
    )
    return quantization_config(facts, plan_of(kept))


def in_layers(modules: dict[str, str], layers: Iterable[int]) -> dict[str, str]:
    return {f"model.language_model.layers.{n}.{name}": dtype for n in layers for name, dtype in modules.items()}


def scheme_in(section: dict[str, Any], name: str) -> str:
    """The type of the first group that a name is in, `plain` if it is ignored, `unknown` if nothing names it."""
    if any(re.match(entry[3:], name) for entry in section["ignore"]):
        return "plain"
    return next((group["weights"]["type"] for group in hits(section, name)), "unknown")


def test_targets_for_layers_of_several_kinds_a_vision_tower_and_further_tokens() -> None:
    """Under published names, and under those of vLLM, with other prefixes and fused modules."""
    kept = PUBLISHED | in_layers(EVERY_LAYER, range(4)) | in_layers(LINEAR, LINEAR_LAYERS)
    kept |= in_layers(WHOLE, WHOLE_LAYERS)
    section = made_section(kept)
    expected = {name: {IN_FP8: "float", PLAIN: "plain"}[dtype] for name, dtype in kept.items()}
    expected |= {f"model.language_model.layers.{n}.mlp.experts.1.{m}": "int" for n in range(4) for m in MATRICES}
    renamed = {name.replace("model.language_model.", "language_model.model."): one for name, one in expected.items()}
    served = {name.removeprefix("model."): one for name, one in expected.items() if ".visual." in name}
    layer = "language_model.model.layers"
    served |= {
        f"{layer}.0.linear_attn.in_proj_qkvz": "float", f"{layer}.0.linear_attn.in_proj_ba": "plain",
        f"{layer}.2.self_attn.qkv_proj": "float", f"{layer}.3.mlp.shared_expert.gate_up_proj": "float",
        f"{layer}.3.feed_forward.shared_expert.up_proj": "float",
        "visual.blocks.0.mlp.linear_fc1": "plain", "language_model.lm_head": "plain",
    }  # fmt: skip
    for name, scheme in (expected | renamed | served).items():
        assert scheme_in(section, name) == scheme, name
    routed = next(group for group in section["config_groups"].values() if group["weights"]["type"] == "int")
    assert not re.match(routed["targets"][0][3:], "mtp.layers.0.mlp.experts.0.up_proj")


@pytest.mark.parametrize("tower", [PLAIN, IN_FP8])
def test_a_module_may_be_fp8_in_some_layers_only(tower: str) -> None:
    """Also beside a module of the same name elsewhere, of either scheme."""
    kept = {f"mtp.layers.{n}.self_attn.o_proj": tower for n in (0, 2)} | {"lm_head": PLAIN}
    kept |= in_layers({"self_attn.o_proj": IN_FP8}, (0, 2)) | in_layers({"self_attn.o_proj": PLAIN}, (1, 3))
    section = made_section(kept)
    for name, dtype in kept.items():
        for asked in (name, name.replace("model.language_model", "language_model.model")):
            assert scheme_in(section, asked) == {IN_FP8: "float", PLAIN: "plain"}[dtype], asked
    shared_with_the_model = "mtp.embed_tokens"  # a server may build it there
    assert scheme_in(section, shared_with_the_model) == {IN_FP8: "unknown", PLAIN: "plain"}[tower]
