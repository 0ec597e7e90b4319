"""Plans at full size, from the kept facts alone."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import yaml

from eval.serving.check import tensor_parallel
from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import all_published, architecture_for, known, published_config
from quantizers.architectures.sizes import sizes_of
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.planning.assign_actions import expected_tensors, make_plan
from quantizers.planning.gpus import parse_gpus
from quantizers.planning.job import prepare
from quantizers.planning.serving_memory import (
    Model,
    fit,
    kv_bytes_per_token,
    notes,
    obstacles,
    serving_model,
    tensor_parallel_problem,
)
from quantizers.recipe.schema import Experts
from quantizers.system.errors import ArchitectureError, CheckpointError, InputError
from quantizers.system.package_data import shipped
from quantizers.system.schema import load

# Experts' matrices, and gigabytes of experts in INT4 with groups of 32, of one model of each size.
SIZES = {
    "MiniMaxAI/MiniMax-M2.1": (47_616, 126.4),
    "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8": (18_432, 16.3),
    "Qwen/Qwen3-235B-A22B-FP8": (36_096, 127.7),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8": (29_760, 263.3),
    "mistralai/Mixtral-8x7B-v0.1": (768, 25.4),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": (1_344, 76.1),
    "zai-org/GLM-4.6-FP8": (42_720, 189.0),
    "zai-org/GLM-4.5-Air-FP8": (17_280, 56.1),
    "zai-org/GLM-4.7-Flash": (8_832, 15.6),
    "deepseek-ai/DeepSeek-V3": (44_544, 367.8),
    "moonshotai/Kimi-K2-Instruct-0905": (69_120, 570.8),
}
FOLDING = ("minimax_m2", "mixtral", "qwen3_moe")


def planned(model: str) -> Any:
    found = published_config(model)
    assert found is not None
    facts, config = found
    sizes = sizes_of(facts, config, model)
    specs = expected_tensors(facts, sizes, config, model)
    return facts, sizes, config, make_plan(facts, sizes, specs, Experts(), model, (128, 128))


def served(model: str, **changes: Any) -> Model:
    """With few experts, which decide nothing here but the weights' bytes, and changes to the published config.json."""
    facts, config = published_config(model) or ({}, {})
    assert isinstance(facts, Architecture)
    small = config | {facts.sizes["experts"].key: 16} | changes
    sizes = sizes_of(facts, small, model)
    plan = make_plan(facts, sizes, expected_tensors(facts, sizes, small, model), Experts(), model, (128, 128))
    return serving_model(plan, facts, sizes, small, plan.fp8_form((128, 128)))


@pytest.mark.parametrize("model", SIZES)
def test_matrices_and_size_of_the_experts(model: str) -> None:
    _, _, _, plan = planned(model)
    matrices, gigabytes = SIZES[model]
    packed = [spec for a in plan.actions if a.kind == "quantize" for spec in a.outputs.values()]
    assert plan.counts()["quantize"] == matrices
    weights = sum(spec.bytes for spec in packed if spec.dtype != "I64")  # without the two numbers of each shape
    assert weights / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_the_source_of_deepseek_v3_is_as_large_as_published() -> None:
    """688.57 GB in 91,991 tensors, with its layer 61 (deepseek-ai/DeepSeek-V3, README_WEIGHTS.md and index)."""
    facts, config = published_config("deepseek-ai/DeepSeek-V3") or ({}, {})
    assert isinstance(facts, Architecture)
    sizes = sizes_of(facts, config, "x")
    tensors = expected_tensors(facts, sizes, config, "x")
    assert len(tensors) == 91_991
    assert sum(spec.bytes for spec in tensors.values()) / 1e9 == pytest.approx(688.57, abs=0.01)
    assert list(sizes.mtp) == [61]
    plan = make_plan(facts, sizes, tensors, Experts(), "x", (128, 128))
    layer = plan.of_layer(61)
    assert {action.kind for action in layer} == {"keep", "rename"}
    experts = [action for action in layer if action.expert is not None and not action.is_scale]
    assert sum(math.prod(action.spec.shape) for action in experts) == pytest.approx(11.27e9, abs=1e7)


def test_a_tensor_that_a_key_of_the_config_decides_about() -> None:
    """GLM-4.5-Air has no norm of q and k; the same key missing means the same."""
    facts, config = published_config("zai-org/GLM-4.5-Air-FP8") or ({}, {})
    assert isinstance(facts, Architecture)
    assert "self_attn.q_norm.weight" not in facts.tensors(dense=False)
    for change, there in (({}, False), ({"use_qk_norm": True}, True)):
        without = {key: value for key, value in config.items() if key != "use_qk_norm"} | change
        assert ("self_attn.q_norm.weight" in architecture_for(without, "x").tensors(dense=True)) == there


def test_every_size_of_every_family_has_a_config_that_fits_its_facts() -> None:
    """Of each, few layers and experts: what a plan refuses does not depend on how many there are."""
    for family, published in all_published():
        facts = family.of_model(published.config)
        small = published.config | {facts.sizes["layers"].key: 4, facts.sizes["experts"].key: 16}
        sizes = sizes_of(facts, small, "kept")
        specs = expected_tensors(facts, sizes, small, "kept")
        plan = make_plan(facts, sizes, specs, Experts(), "kept", (128, 128))
        assert plan.folds == (facts.model_type in FOLDING)
        assert len(published.models) == len(set(published.models))
    models = [model for _, published in all_published() for model in published.models]
    assert len(models) == len(set(models))


def test_shipped_recipes_are_planned_offline() -> None:
    for path in sorted(shipped("recipes").glob("*.yaml")):
        model = yaml.safe_load(path.read_text())["source"]["model"]
        assert model.startswith("..") or published_config(model) is not None, path.name
    job = prepare("mixtral-8x7b-instruct-int4", offline_facts=True)
    assert job.fp8 is None
    assert "the built-in architecture spec of mistralai/Mixtral-8x7B-Instruct-v0.1" in job.basis


@pytest.mark.parametrize(
    ("model", "fits"),
    [
        ("Qwen/Qwen3-30B-A3B-FP8", [1, 2, 4, 8]),  # the published FP8 experts do not run on 4 cards (vllm#25292)
        ("Qwen/Qwen3-235B-A22B-FP8", [1, 2, 4, 8, 16]),  # nor these on 8 (QwenLM/Qwen3#1485)
        ("mistralai/Mixtral-8x7B-v0.1", [1, 2, 4, 8, 16, 32]),
        ("zai-org/GLM-4.6-FP8", [1, 2, 4, 8, 16]),
        ("zai-org/GLM-4.5-Air-FP8", [1, 2, 4]),
        ("zai-org/GLM-4.7-Flash", [1, 2, 4]),
        ("deepseek-ai/DeepSeek-V3", [1, 2, 4, 8, 16]),
        ("moonshotai/Kimi-K2-Instruct", [1, 2, 4, 8, 16]),
        ("moonshotai/Kimi-K2-Instruct-0905", [1, 2, 4, 8, 16]),
    ],
)
def test_tensor_parallelism(model: str, fits: list[int]) -> None:
    serving = served(model)
    assert [n for n in (1, 2, 4, 8, 16, 32) if tensor_parallel_problem(serving, n) is None] == fits


@pytest.mark.parametrize(
    ("model", "ranks", "reason"),
    [
        ("zai-org/GLM-4.5-Air-FP8", 8, "the experts' width per rank, 176, is not a multiple of the group, 32"),
        ("zai-org/GLM-4.7-Flash", 8, "20 attention heads are not a multiple of 8"),
        (  # sglang#3345
            "deepseek-ai/DeepSeek-V3",
            32,
            "mlp.gate_proj's rows per rank, 576, are not a multiple of the FP8 block, 128",
        ),
        (
            "deepseek-ai/DeepSeek-V3",
            32,
            "mlp.shared_experts.down_proj's columns per rank, 64, are not a multiple of the FP8 block, 128",
        ),
    ],
)
def test_what_keeps_a_model_from_more_cards(model: str, ranks: int, reason: str) -> None:
    one = served(model)
    assert any(reason in found for found in obstacles(ranks, one.facts, one.sizes, one.groups, one.blocks))


def test_merged_modules_that_lie_whole_end_within_a_block_only_in_the_last() -> None:
    """kv_a of 576 rows after q_a of 1536: 4.5 blocks. With 1600 rows of q_a, kv_a would begin within a block."""
    assert tensor_parallel_problem(served("deepseek-ai/DeepSeek-V3"), 1) is None
    odd = served("deepseek-ai/DeepSeek-V3", q_lora_rank=1600)
    assert tensor_parallel_problem(odd, 8) == (
        "self_attn.q_a_proj's rows, 1600, are merged with others and not a multiple of the FP8 block, 128"
    )


@pytest.mark.parametrize(
    ("model", "one", "eight"),
    [
        ("deepseek-ai/DeepSeek-V3", 61 * 576 * 2, 61 * 576 * 2),  # every card needs what all heads are made of
        ("moonshotai/Kimi-K2-Instruct", 61 * 576 * 2, 61 * 576 * 2),
        ("zai-org/GLM-4.7-Flash", 47 * 576 * 2, 47 * 576 * 2),
        ("zai-org/GLM-4.6-FP8", 92 * 2 * 8 * 128 * 2, 92 * 2 * 128 * 2),
        ("zai-org/GLM-4.5-Air-FP8", 46 * 2 * 8 * 128 * 2, 46 * 2 * 128 * 2),
    ],
)
def test_bytes_of_a_cached_token(model: str, one: int, eight: int) -> None:
    serving = served(model)
    assert [kv_bytes_per_token(serving, "auto", ranks) for ranks in (1, 8)] == [one, eight]
    assert kv_bytes_per_token(serving, "auto", 16) == eight


def test_what_every_card_holds_of_deepseek() -> None:
    """q_a, kv_a, router and norms lie whole on each of 8 cards; all else is divided."""
    model = served("deepseek-ai/DeepSeek-V3")
    alone, together = (fit(model, parse_gpus(cards), 16).weights for cards in ("1x900GiB", "8x900GiB"))
    of_a = 1536 * 7168 + 12 * 56 * 4 + 576 * 7168 + 5 * 56 * 4  # FP8 with scales in float32
    norms = 2 * (7168 + 7168 + 1536 + 512)
    whole = 61 * (of_a + norms) + 58 * (2 * 16 * 7168 + 4 * 16)
    assert together == math.ceil((alone - whole) / 8 + whole)


def test_a_share_that_does_not_fill_marlin_s_tiles_is_noted() -> None:
    air = served("zai-org/GLM-4.5-Air-FP8")
    fits = [fit(air, parse_gpus("4x96GiB"), 16, tensor_parallel=ranks) for ranks in (1, 2, 4)]
    (note,) = notes(air, fits)
    assert note.startswith("vLLM 0.33 or newer for TP 4: 352 of an expert's width")
    assert notes(air, fits[:2]) == []


@pytest.mark.parametrize("key", ["kv_cache", "tensor_parallel"])
def test_facts_that_do_not_say_what_cards_hold_are_refused_for_cards_alone(key: str) -> None:
    facts, config = published_config("zai-org/GLM-4.7-Flash") or ({}, {})
    assert isinstance(facts, Architecture)
    config = config | {"n_routed_experts": 8}
    sizes, old = sizes_of(facts, config, "x"), facts.model_copy(update={key: None})
    plan = make_plan(old, sizes, expected_tensors(old, sizes, config, "x"), Experts(), "x", (128, 128))
    with pytest.raises(InputError, match=rf"^the facts of glm4_moe_lite have no {key}, so .*; add them as in") as why:
        serving_model(plan, old, sizes, config, None)
    assert tensor_parallel(1, old, sizes, []) == str(why.value)


def test_a_derived_size_is_that_of_a_given_one() -> None:
    facts, config = published_config("mistralai/Mixtral-8x22B-v0.1") or ({}, {})
    assert isinstance(facts, Architecture)
    assert "head_dim" not in config
    assert sizes_of(facts, config, "x") == sizes_of(facts, config | {"head_dim": 128}, "x")
    with pytest.raises(
        ArchitectureError, match=r"^x: has no head_dim, which is then hidden / heads, but 6144 is no mult"
    ):
        sizes_of(facts, config | {"num_attention_heads": 40}, "x")


def test_sums_of_products() -> None:
    facts, config = published_config("Qwen/Qwen3-30B-A3B-FP8") or ({}, {})
    assert isinstance(facts, Architecture)
    sizes = sizes_of(facts, config, "x")
    assert sizes.value("heads * head_dim + kv_heads * 64 + 7") == 32 * 128 + 4 * 64 + 7
    assert sizes.shape(["2 * width", "hidden / heads"]) == (1536, 64)
    assert math.prod(sizes.shape(["layers"])) == 48


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("sizes", "width"), {"key": "w", "otherwise": "depth * 2"}, "there is no size 'depth'"),
        (("every_layer", "linears", "self_attn.q_proj"), ["heads - 1", "hidden"], "no sum of products"),
        (("norm", "tensor"), "norm.weight", "norm.tensor: norm.weight is not among the tensors"),
        (("router", "served"), "F8", "router.served"),
        (("targets", "experts"), "experts(", "is not a regular expression"),
        (("servers", "vllm", "colour"), "red", "servers.vllm.colour"),
    ],
)
def test_facts_that_are_wrong_are_refused_with_their_key(
    place: tuple[str, ...], value: Any, message: str, tmp_path: Any
) -> None:
    body = yaml.safe_load(known()["qwen3_moe"].read_text())
    inner = body
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    file = tmp_path / "facts.yaml"
    file.write_text(yaml.safe_dump(body))
    with pytest.raises(ArchitectureError, match=message) as refused:
        load(file, Architecture, ArchitectureError)
    assert str(refused.value).startswith(str(file))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([9], "the numbers of the layers without experts are needed, from 0 to 2"),
        ("two", "the numbers of the layers without experts"),
        ([0, 1, 2], "leaves no layer with experts"),
    ],
)
def test_dense_layers(value: Any, message: str) -> None:
    facts, config = published_config("Qwen/Qwen3-30B-A3B-FP8") or ({}, {})
    assert isinstance(facts, Architecture)
    small = config | {"num_hidden_layers": 3}
    assert sizes_of(facts, small, "x").dense == frozenset()
    assert sizes_of(facts, small | {"mlp_only_layers": [1]}, "x").moe_layers == [0, 2]
    assert sizes_of(facts, small | {"mlp_only_layers": 2}, "x").moe_layers == [2]
    with pytest.raises(ArchitectureError, match=message):
        sizes_of(facts, small | {"mlp_only_layers": value}, "x")


def test_scales_of_either_dtype_are_planned() -> None:
    found = published_config("Qwen/Qwen3-30B-A3B-FP8")
    assert found is not None
    facts, config = found
    small = config | {"num_hidden_layers": 1, "num_experts": 8}
    sizes = sizes_of(facts, small, "x")
    specs = expected_tensors(facts, sizes, small, "x")
    other = {n: Spec("F32", s.shape) if n.endswith("_scale_inv") else s for n, s in specs.items()}
    for tensors, dtype in ((specs, "BF16"), (other, "F32")):
        plan = make_plan(facts, sizes, tensors, Experts(), "x", (128, 128))
        renamed = [a for a in plan.actions if a.kind == "rename"]
        assert {a.spec.dtype for a in renamed} == {dtype}
        assert all(spec == a.spec for a in renamed for spec in a.outputs.values())


def small(model: str, layers: int = 5) -> tuple[Architecture, Any, dict[str, Spec]]:
    """Facts, sizes and tensors of a published model with few layers and experts."""
    found = published_config(model)
    assert found is not None
    facts, config = found
    config = config | {"num_hidden_layers": layers, "n_routed_experts": 16}
    sizes = sizes_of(facts, config, "x")
    return facts, sizes, expected_tensors(facts, sizes, config, "x")


@pytest.mark.parametrize(
    ("model", "ending", "other"),
    [
        ("zai-org/GLM-4.6-FP8", ".weight_scale", "F32"),
        ("deepseek-ai/DeepSeek-V3", "e_score_correction_bias", "BF16"),
        ("zai-org/GLM-4.6-FP8", "mlp.gate.weight", "F32"),
    ],
)
def test_what_is_not_verified_is_taken_in_either_form(model: str, ending: str, other: Any) -> None:
    facts, sizes, tensors = small(model)
    changed = {n: Spec(other, s.shape) if n.endswith(ending) else s for n, s in tensors.items()}
    assert changed != tensors
    plan = make_plan(facts, sizes, changed, Experts(), "x", (128, 128))
    kept = {a.source: spec for a in plan.actions for spec in a.outputs.values() if a.source.endswith(ending)}
    assert kept
    assert {spec.dtype for spec in kept.values()} == {other}


def test_glm_46_lacks_two_matrices_of_the_layer_that_predicts_further_tokens() -> None:
    """embed_tokens and shared_head.head (vllm#25993); one of them in FP8 is refused by name."""
    facts, sizes, tensors = small("zai-org/GLM-4.6-FP8")
    names = [f"model.layers.5.{name}.weight" for name in ("embed_tokens", "shared_head.head")]
    without = {name: spec for name, spec in tensors.items() if name not in names}
    assert len(without) == len(tensors) - 2
    assert make_plan(facts, sizes, without, Experts(), "x", (128, 128)).mtp == (5,)
    head = {names[1]: Spec("F8_E4M3", tensors[names[1]].shape)}
    with pytest.raises(CheckpointError, match=rf"^x: {re.escape(names[1])} is F8_E4M3; BF16 or F16 or F32 is needed"):
        make_plan(facts, sizes, tensors | head, Experts(), "x", (128, 128))


def test_computed_buffers_of_kimi_are_carried_along() -> None:
    facts, sizes, tensors = small("moonshotai/Kimi-K2-Instruct")
    buffers = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": Spec("F32", (32,)) for n in range(5)}
    plan = make_plan(facts, sizes, tensors | buffers, Experts(), "x", (128, 128))
    assert {a.source for a in plan.actions if a.kind == "carry"} == buffers.keys()
    assert not plan.mtp


def test_more_layers_than_the_config_speaks_of_are_refused() -> None:
    facts, sizes, tensors = small("deepseek-ai/DeepSeek-V3")
    more = {name.replace("model.layers.5.", "model.layers.6."): spec for name, spec in tensors.items()}
    with pytest.raises(CheckpointError, match=r"model\.layers\.6\..* is not among the facts of deepseek_v3"):
        make_plan(facts, sizes, tensors | more, Experts(), "x", (128, 128))
