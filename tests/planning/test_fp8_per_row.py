"""FP8 with a scale per row, in plans, in what serves them, and in what engines are told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
from families import PER_ROW

from eval.serving.check import STORED, ServingCheck, check
from eval.serving.engines import ATTENTION
from quantizers.architectures.families import architecture_for
from quantizers.architectures.sizes import sizes_of
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.formats.fp8 import ROWS, Fp8
from quantizers.planning.assign_actions import expected_tensors, make_plan
from quantizers.planning.device_memory import device_memory
from quantizers.planning.fit_facts import fit_facts
from quantizers.planning.plan import Plan
from quantizers.planning.serving_memory import serving_model, tensor_parallel_problem
from quantizers.recipe.schema import Experts
from quantizers.system.errors import CheckpointError
from stitch.write.config_files import output_config

BLOCK = (128, 128)
ATTENTION_SCALE = "model.layers.1.self_attn.o_proj.weight_scale"
EXPERT_SCALE = "model.layers.0.block_sparse_moe.experts.3.w2.weight_scale"
CONFIG = tiny.config(quantization_config=PER_ROW)
FACTS = architecture_for(CONFIG, "config.json")
SIZES = sizes_of(FACTS, CONFIG, "config.json")
TENSORS = expected_tensors(FACTS, SIZES, CONFIG, "config.json")


def planned(tensors: dict[str, Spec]) -> Plan:
    return make_plan(FACTS, SIZES, tensors, Experts(), "here", BLOCK)


def test_a_config_alone_gives_the_tensors_with_a_scale_for_each_row() -> None:
    heads = 4 * 64
    assert TENSORS["model.layers.0.self_attn.q_proj.weight"] == Spec("F8_E4M3", (heads, 128))
    assert TENSORS["model.layers.0.self_attn.q_proj.weight_scale"] == Spec("F32", (heads, 1))
    assert TENSORS[EXPERT_SCALE] == Spec("F32", (128, 1))
    assert not [name for name in TENSORS if name.endswith("_inv")]


def test_a_kept_scale_keeps_its_name_and_an_experts_is_dropped() -> None:
    plan = planned(TENSORS)
    actions = {action.source: action for action in plan.actions}
    assert actions[ATTENTION_SCALE].kind == "keep"
    assert actions[ATTENTION_SCALE].outputs == {ATTENTION_SCALE: TENSORS[ATTENTION_SCALE]}
    assert actions[EXPERT_SCALE].kind == "drop"
    assert "rename" not in plan.counts()
    assert plan.fp8_form(BLOCK) == ROWS


def test_a_bfloat16_scale_is_kept_as_it_is() -> None:
    half = {name: Spec("BF16", s.shape) if name.endswith("_scale") else s for name, s in TENSORS.items()}
    assert planned(half).shard(1)[ATTENTION_SCALE] == Spec("BF16", (128, 1))


@pytest.mark.parametrize("name", [ATTENTION_SCALE, EXPERT_SCALE])
def test_both_forms_in_one_checkpoint_are_refused_by_name(name: str) -> None:
    mixed = {n: s for n, s in TENSORS.items() if n != name} | {f"{name}_inv": Spec("F32", (1, 1))}
    with pytest.raises(CheckpointError, match=rf"^here: {name}_inv is a scale per block of FP8, but other .* per row"):
        planned(mixed)


@pytest.mark.parametrize("shape", [(128,), (1, 1), (128, 2)])
def test_a_scale_of_another_shape_is_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match=rf"^here: {EXPERT_SCALE} has shape .*, config.json says \[128, 1\]"):
        planned(TENSORS | {EXPERT_SCALE: Spec("F32", shape)})


@pytest.mark.parametrize("change", [{"strategy": "tensor"}, {"type": "int"}, {"num_bits": 4}])
def test_a_config_alone_with_other_weights_of_compressed_tensors_is_refused(change: dict[str, Any]) -> None:
    section = copy.deepcopy(PER_ROW)
    section["config_groups"]["group_0"]["weights"] |= change
    for wrong in (section, section | {"config_groups": {}}, section | {"config_groups": [1]}):
        with pytest.raises(
            CheckpointError, match=r"^config.json: quantization_config.config_groups: .* strategy channel"
        ):
            expected_tensors(FACTS, SIZES, CONFIG | {"quantization_config": wrong}, "config.json")


def test_facts_made_to_fit_such_a_checkpoint_differ_in_nothing() -> None:
    assert fit_facts(CONFIG, TENSORS, "config.json").differences == []


def test_rows_divide_among_cards_where_blocks_do_not() -> None:
    plan = planned(TENSORS)
    assert FACTS.model_type == "minimax_m2"
    forms: list[Fp8] = [ROWS, BLOCK]
    rows, blocks = (serving_model(plan, FACTS, SIZES, CONFIG, form) for form in forms)
    assert tensor_parallel_problem(rows, 2) is None
    assert (
        tensor_parallel_problem(blocks, 2)
        == "self_attn.k_proj's rows per rank, 64, are not a multiple of the FP8 block, 128"
    )


def test_scales_take_no_memory_of_their_own_as_weights() -> None:
    in_blocks = expected_tensors(FACTS, SIZES, tiny.config(), "config.json")
    needed = [device_memory(planned(tensors), SIZES, 64, False, None) for tensors in (TENSORS, in_blocks)]
    assert needed[0] == needed[1]


def consumers(form: Fp8, tensors: dict[str, Spec]) -> ServingCheck:
    """How engines read an output with these tensors whose config says this form."""
    plan = planned(tensors)
    written = {name: spec for action in plan.actions for name, spec in action.outputs.items()}
    return check(output_config(CONFIG, FACTS, plan, form), written, FACTS, SIZES)


def test_engines_find_the_form_that_the_config_says() -> None:
    found = consumers(ROWS, TENSORS)
    assert found.findings == []
    assert {rows[ATTENTION] for rows in found.schemes.values()} == {"FP8 per channel"}
    assert found.tensor_parallel[2] == "ok"


def test_engines_that_are_told_the_other_form_are_an_error() -> None:
    told_blocks = consumers(BLOCK, TENSORS)
    told_rows = consumers(ROWS, expected_tensors(FACTS, SIZES, tiny.config(), "config.json"))
    for found, says, holds in (
        (told_blocks, "FP8 block 128x128", "FP8 per channel"),
        (told_rows, "FP8 per channel", "FP8 block 128x128"),
    ):
        assert found.schemes[STORED][ATTENTION] == holds
        assert any(f"takes the scheme FP{says[2:]}" in str(f) and f"stored as {holds}" in str(f) for f in found.errors)
