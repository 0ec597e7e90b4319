"""The config's groups match each name that a server asks, and no other: by `re` alone, without our rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import families
import pytest

from quantizers.architectures.families import architecture_for
from quantizers.architectures.sizes import sizes_of
from quantizers.formats.fp8 import ROWS, Fp8
from quantizers.planning.assign_actions import expected_tensors, make_plan
from quantizers.recipe.schema import Experts, Scheme
from stitch.write.config_files import output_config

LAYERS = 62  # with layers 2 and 6, 1 and 61, 6 and 62, 16 and 61
FORMS: dict[str, Fp8 | None] = {
    "glm4_moe": ROWS, "deepseek_v3": (128, 128), "kimi_k2": (128, 128), "glm4_moe_lite": None
}  # fmt: skip
GLM_ATTENTION = ("qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj")
MLA = (
    "fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa", "q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj"
)  # fmt: skip
MATRICES = ("gate_proj", "up_proj", "down_proj")
DENSE = (*MATRICES, "gate_up_proj")
SCHEMES = [Scheme(4, 32), Scheme(8, 32), Scheme(4, 64)]
ONE = [Scheme(4, 32)]


def section_of(family: str, schemes: list[Scheme]) -> tuple[dict[str, Any], dict[int, Scheme]]:
    """The quantization_config of a model of LAYERS layers, whose schemes take turns, and the scheme of each layer."""
    config = families.config(family, num_hidden_layers=LAYERS)
    facts = architecture_for(config, "x")
    sizes = sizes_of(facts, config, "x")
    fp8 = FORMS[family]
    plan = make_plan(facts, sizes, expected_tensors(facts, sizes, config, "x"), Experts(), "x", fp8)
    turns = {layer: schemes[layer % len(schemes)] for layer in plan.quantized_layers}
    plan = plan.with_schemes([turns.get(layer, schemes[0]) for layer in range(LAYERS)])
    return output_config(config, facts, plan, fp8)["quantization_config"], turns


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
def test_each_name_that_a_server_asks_is_in_the_group_that_it_is_stored_as(family: str, schemes: list[Scheme]) -> None:
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
