"""FP8 with a scale per row, in plans, in what serves them, and in what engines are told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from families import PER_ROW
from planned import BLOCK, Model, tiny_model

from quantizers.checkpoint.safetensors_header import Spec
from quantizers.formats.fp8 import ROWS, Fp8, Fp8Blocks
from quantizers.planning.device_memory import device_memory
from quantizers.serving.check import STORED, check
from quantizers.serving.engines import ATTENTION
from quantizers.serving.findings import ServingCheck
from quantizers.serving.memory import serving_model, tensor_parallel_problem
from quantizers.stitch.write.config_files import output_config
from quantizers.system.errors import CheckpointError

ATTENTION_SCALE = "model.layers.1.self_attn.o_proj.weight_scale"
EXPERT_SCALE = "model.layers.0.block_sparse_moe.experts.3.w2.weight_scale"
BLOCKS = Fp8Blocks(*BLOCK)
SECTION = copy.deepcopy(PER_ROW)
SECTION["config_groups"]["group_0"]["targets"] = ["Linear"]
MODEL, IN_BLOCKS = tiny_model(quantization_config=SECTION), tiny_model()
TENSORS = MODEL.tensors


def test_a_config_alone_gives_the_tensors_with_a_scale_for_each_row() -> None:
    heads = 4 * 64
    assert TENSORS["model.layers.0.self_attn.q_proj.weight"] == Spec("F8_E4M3", (heads, 128))
    assert TENSORS["model.layers.0.self_attn.q_proj.weight_scale"] == Spec("F32", (heads, 1))
    assert TENSORS[EXPERT_SCALE] == Spec("F32", (128, 1))
    assert not [name for name in TENSORS if name.endswith("_inv")]


def test_blocks_of_compressed_tensors_are_planned_as_those_of_fp8_but_for_the_scales_name() -> None:
    section = copy.deepcopy(SECTION)
    section["config_groups"]["group_0"]["weights"] |= {"strategy": "block", "block_structure": [128, 128]}
    model = tiny_model(quantization_config=section)
    assert model.tensors == {name.replace("_scale_inv", "_scale"): spec for name, spec in IN_BLOCKS.tensors.items()}
    plan, other = model.plan(), IN_BLOCKS.plan()
    assert plan.shards() == other.shards()
    assert plan.kept_forms == other.kept_forms == [BLOCKS]
    assert output_config(model.config, model.facts, plan) == output_config(IN_BLOCKS.config, IN_BLOCKS.facts, other)


def test_a_kept_scale_keeps_its_name_and_an_experts_is_dropped() -> None:
    plan = MODEL.plan()
    actions = {action.source: action for action in plan.actions}
    assert actions[ATTENTION_SCALE].kind == "keep"
    assert actions[ATTENTION_SCALE].outputs == {ATTENTION_SCALE: TENSORS[ATTENTION_SCALE]}
    assert actions[EXPERT_SCALE].kind == "drop"
    assert all(action.kind != "rename" for action in plan.actions)
    assert plan.kept_forms == [ROWS]


def test_a_bfloat16_scale_is_kept_as_it_is() -> None:
    half = {name: Spec("BF16", s.shape) if name.endswith("_scale") else s for name, s in TENSORS.items()}
    assert MODEL.plan(half).shard(1)[ATTENTION_SCALE] == Spec("BF16", (128, 1))


@pytest.mark.parametrize("name", [ATTENTION_SCALE, EXPERT_SCALE])
def test_both_forms_in_one_checkpoint_are_refused_by_name(name: str) -> None:
    mixed = {n: s for n, s in TENSORS.items() if n != name} | {f"{name}_inv": Spec("F32", (1, 1))}
    with pytest.raises(CheckpointError, match=rf"^here: {name}_inv is a scale per block of FP8, but other .* per row"):
        MODEL.plan(mixed)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (Spec("F32", (128,)), r"is a scale per row without a second dimension"),
        (Spec("F32", (1, 1)), r"is a scale for the whole matrix; of FP8 only scales of rows or blocks"),
        (Spec("F32", (128, 2)), r"is a scale for 32 columns of each row"),
        (Spec("F8_E8M0", (128, 1)), r"is a scale in E8M0, powers of two in a byte"),
    ],
)
def test_a_scale_of_another_form_is_refused_by_what_it_is(spec: Spec, said: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^here: {EXPERT_SCALE} {said}"):
        MODEL.plan(TENSORS | {EXPERT_SCALE: spec})


@pytest.mark.parametrize("change", [{"strategy": "tensor"}, {"type": "int"}, {"num_bits": 4}])
def test_a_config_alone_with_other_weights_of_compressed_tensors_is_refused(change: dict[str, Any]) -> None:
    section = copy.deepcopy(PER_ROW)
    section["config_groups"]["group_0"]["weights"] |= change
    for wrong in (section, section | {"config_groups": {}}, section | {"config_groups": [1]}):
        with pytest.raises(
            CheckpointError,
            match=r"^config.json: quantization_config.config_groups: group_0: .* no so",
        ):
            tiny_model(quantization_config=wrong)


def test_rows_divide_among_cards_where_blocks_do_not() -> None:
    rows, blocks = (serving_model(model.plan(), model.facts) for model in (MODEL, IN_BLOCKS))
    assert tensor_parallel_problem(rows, 2) is None
    assert (
        tensor_parallel_problem(blocks, 2)
        == "self_attn.k_proj's rows per rank, 64, are not a multiple of the FP8 block, 128"
    )


def test_scales_take_no_memory_of_their_own_as_weights() -> None:
    needed = [device_memory(model.plan(), model.facts, 64, False, None) for model in (MODEL, IN_BLOCKS)]
    assert needed[0] == needed[1]


def read_by_servers(form: Fp8, model: Model) -> ServingCheck:
    """How servers read an output with the model's tensors whose config says this form."""
    declared = MODEL if form == ROWS else IN_BLOCKS
    written = {name: spec for action in model.plan().actions for name, spec in action.outputs.items()}
    return check(output_config(declared.config, declared.facts, declared.plan()), written, MODEL.facts)


def test_servers_find_the_form_that_the_config_says() -> None:
    found = read_by_servers(ROWS, MODEL)
    assert found.findings == []
    assert {rows[ATTENTION] for rows in found.schemes.values()} == {"FP8 per channel"}
    assert found.tensor_parallel[2] == "ok"
    section = output_config(MODEL.config, MODEL.facts, MODEL.plan())["quantization_config"]
    assert section["config_groups"]["attention_fp8_channel"] == {
        "targets": [r"re:.*self_attn\.(q|k|v|o|qkv)_proj$"],
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        "input_activations": PER_ROW["config_groups"]["group_0"]["input_activations"],
    }


def test_servers_that_are_told_the_other_form_are_an_error() -> None:
    told_blocks, told_rows = read_by_servers(BLOCKS, MODEL), read_by_servers(ROWS, IN_BLOCKS)
    for found, says, holds in (
        (told_blocks, "FP8 block 128x128", "FP8 per channel"),
        (told_rows, "FP8 per channel", "FP8 block 128x128"),
    ):
        assert found.schemes[STORED][ATTENTION] == holds
        assert any(f"takes the scheme FP{says[2:]}" in str(f) and f"stored as {holds}" in str(f) for f in found.errors)


def test_blocks_whose_scales_are_stored_in_two_ways_are_in_one_config_group() -> None:
    in_bytes = {
        name: Spec("F8_E8M0", spec.shape)
        for name, spec in IN_BLOCKS.tensors.items()
        if name.startswith("model.layers.1.self_attn.") and name.endswith("_scale_inv")
    }
    plan = IN_BLOCKS.plan(IN_BLOCKS.tensors | in_bytes)
    assert plan.kept_forms == [BLOCKS, Fp8Blocks(*BLOCK, scales="F8_E8M0")]
    config = output_config(IN_BLOCKS.config, IN_BLOCKS.facts, plan)
    assert len(config["quantization_config"]["config_groups"]) == 2  # with that of the experts
    written = {name: spec for action in plan.actions for name, spec in action.outputs.items()}
    read = check(config, written, IN_BLOCKS.facts)
    assert {rows[ATTENTION] for rows in read.schemes.values()} == {"FP8 block 128x128"}
    assert read.errors == []
