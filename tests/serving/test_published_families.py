"""Plans at full size, from the kept facts alone."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml
from planned import published, published_with

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.derive import KEYS
from quantizers.architectures.families import all_published, architecture_for, published_config
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.planning.gpus import parse_gpus
from quantizers.planning.job import prepare
from quantizers.serving import memory as serving_memory
from quantizers.serving.check import tensor_parallel
from quantizers.system.errors import ArchitectureError, CheckpointError, InputError
from quantizers.system.schema import load
from quantizers.system.shipped import shipped

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


def served(model: str, **changes: Any) -> serving_memory.Model:
    """With few experts, which decide nothing here but the weights' bytes, and other changes to config.json."""
    small = published(model, experts=16, **changes)
    plan = small.plan()
    return serving_memory.serving_model(plan, small.facts)


@pytest.mark.parametrize("model", SIZES)
def test_matrices_and_size_of_the_experts(model: str) -> None:
    """Of one layer with 16 experts, multiplied up to all."""
    whole = published(model, layers=4, experts=16)
    config = published_with(model)
    layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    experts = next(config[key] for key in KEYS["experts"] if key in config)
    matrices, gigabytes = SIZES[model]
    packed = [spec for a in whole.plan().actions if a.kind == "quantize" for spec in a.outputs.values()]
    scale = layers * experts / (len(whole.facts.moe_layers) * 16)
    assert sum(action.kind == "quantize" for action in whole.plan().actions) * scale == matrices
    weights = sum(spec.bytes for spec in packed if spec.dtype != "I64")  # without the two numbers of each shape
    assert weights * scale / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.slow
def test_the_source_of_deepseek_v3_is_as_large_as_published() -> None:
    """688.57 GB in 91,991 tensors, with its layer 61 (deepseek-ai/DeepSeek-V3, README_WEIGHTS.md and index)."""
    model = published("deepseek-ai/DeepSeek-V3")
    assert len(model.tensors) == 91_991
    assert sum(spec.bytes for spec in model.tensors.values()) / 1e9 == pytest.approx(688.57, abs=0.01)
    assert list(model.facts.mtp_layers) == [61]
    layer = model.plan().of_layer(61)
    assert {action.kind for action in layer} == {"keep", "rename"}
    experts = [action for action in layer if action.expert is not None and not action.is_scale]
    assert sum(math.prod(action.spec.shape) for action in experts) == pytest.approx(11.27e9, abs=1e7)


def test_a_tensor_that_a_key_of_the_config_decides_about() -> None:
    """GLM-4.5-Air has no norm of q and k; the same key missing means the same."""
    config = published_with("zai-org/GLM-4.5-Air-FP8", layers=2)
    assert "self_attn.q_norm.weight" not in architecture_for(config, "x").of_layer(1).tensors
    for change, there in (({}, False), ({"use_qk_norm": True}, True)):
        without = {key: value for key, value in config.items() if key != "use_qk_norm"} | change
        assert ("self_attn.q_norm.weight" in architecture_for(without, "x").of_layer(0).tensors) == there


def test_every_size_of_every_family_has_a_config_that_fits_its_facts() -> None:
    """Of each, few layers and experts: what a plan refuses does not depend on how many there are."""
    models = [model for _, one in all_published() for model in one.models]
    assert len(models) == len(set(models))
    for _, one in all_published():
        small = published(one.models[0], layers=4, experts=16)
        assert small.plan().folds == (small.facts.model_type in FOLDING)


def test_shipped_recipes_are_planned_offline() -> None:
    """All but those of models that are derived from files alone: they say so."""
    for path in sorted(shipped("recipes").glob("*.yaml")):
        text = path.read_text()
        model = yaml.safe_load(text)["source"]["model"]
        offline = model.startswith("..") or published_config(model) is not None
        assert offline or "derived from its class" in text, path.name
    job = prepare("mixtral-8x7b-instruct-int4", offline_facts=True)
    assert not job.plan.kept_forms
    assert "the built-in architecture spec of mistralai/Mixtral-8x7B-Instruct-v0.1" in job.basis


@pytest.mark.parametrize(
    ("model", "fits"),
    [
        ("Qwen/Qwen3-30B-A3B-FP8", [1, 2, 4, 8]),  # the published FP8 experts do not run on 4 GPUs (vllm#25292)
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
    serving = served(model, layers=4)
    assert [n for n in (1, 2, 4, 8, 16, 32) if serving_memory.tensor_parallel_problem(serving, n) is None] == fits


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
def test_what_keeps_a_model_from_more_gpus(model: str, ranks: int, reason: str) -> None:
    one = served(model, layers=4)
    assert any(reason in found for found in serving_memory.obstacles(ranks, one.facts, one.groups, one.blocks))


@pytest.mark.slow
def test_merged_modules_that_are_whole_end_within_a_block_only_in_the_last() -> None:
    """kv_a of 576 rows after q_a of 1536: 4.5 blocks. With 1600 rows of q_a, kv_a would begin within a block."""
    assert serving_memory.tensor_parallel_problem(served("deepseek-ai/DeepSeek-V3"), 1) is None
    odd = served("deepseek-ai/DeepSeek-V3", q_lora_rank=1600)
    assert serving_memory.tensor_parallel_problem(odd, 8) == (
        "self_attn.q_a_proj's rows, 1600, are merged with others and not a multiple of the FP8 block, 128"
    )


@pytest.mark.parametrize(
    ("model", "one", "eight"),
    [
        ("deepseek-ai/DeepSeek-V3", 61 * 576 * 2, 61 * 576 * 2),  # every GPU needs what all heads are made of
        pytest.param("moonshotai/Kimi-K2-Instruct", 61 * 576 * 2, 61 * 576 * 2, marks=pytest.mark.slow),
        ("zai-org/GLM-4.7-Flash", 47 * 576 * 2, 47 * 576 * 2),
        pytest.param("zai-org/GLM-4.6-FP8", 92 * 2 * 8 * 128 * 2, 92 * 2 * 128 * 2, marks=pytest.mark.slow),
        ("zai-org/GLM-4.5-Air-FP8", 46 * 2 * 8 * 128 * 2, 46 * 2 * 128 * 2),
    ],
)
def test_bytes_of_a_cached_token(model: str, one: int, eight: int) -> None:
    serving = served(model)
    assert [serving_memory.kv_bytes_per_token(serving, "auto", ranks) for ranks in (1, 8)] == [one, eight]
    assert serving_memory.kv_bytes_per_token(serving, "auto", 16) == eight


def test_what_every_gpu_holds_of_deepseek() -> None:
    """q_a, kv_a, router and norms are whole on each of 8 GPUs; all else is divided."""
    model = served("deepseek-ai/DeepSeek-V3")
    alone, together = (serving_memory.fit(model, parse_gpus(gpus), 16).weights for gpus in ("1x900GiB", "8x900GiB"))
    of_a = 1536 * 7168 + 12 * 56 * 4 + 576 * 7168 + 5 * 56 * 4  # FP8 with scales in float32
    norms = 2 * (7168 + 7168 + 1536 + 512)
    whole = 61 * (of_a + norms) + 58 * (2 * 16 * 7168 + 4 * 16)
    assert together == math.ceil((alone - whole) / 8 + whole)


def test_a_share_that_does_not_fill_marlin_s_tiles_is_noted() -> None:
    air = served("zai-org/GLM-4.5-Air-FP8")
    fits = [serving_memory.fit(air, parse_gpus("4x96GiB"), 16, tensor_parallel=ranks) for ranks in (1, 2, 4)]
    (note,) = serving_memory.notes(air, fits)
    assert note.startswith("vLLM 0.33 or newer for TP 4: 352 of an expert's width")
    assert serving_memory.notes(air, fits[:2]) == []


@pytest.mark.parametrize("key", ["kv_cache", "tensor_parallel"])
def test_facts_that_do_not_say_what_gpus_hold_are_refused_for_gpus_alone(key: str) -> None:
    model = published("zai-org/GLM-4.7-Flash", experts=8)
    old = replace(model, facts=model.facts.model_copy(update={key: None}))
    with pytest.raises(InputError, match=r"is not known here for glm4_moe_lite$") as why:
        serving_memory.serving_model(old.plan(), old.facts)
    assert tensor_parallel(1, old.facts, []) == str(why.value)


def test_a_size_that_config_json_leaves_out_is_that_of_the_class() -> None:
    config = published_with("mistralai/Mixtral-8x22B-v0.1", layers=1, experts=2)
    assert "head_dim" not in config
    linears = [architecture_for(one, "x").every_linear() for one in (config, config | {"head_dim": 128})]
    assert linears[0] == linears[1]
    with pytest.raises(ArchitectureError, match=r"^x: num_key_value_heads 9 does not divide num_attention_heads 48"):
        architecture_for(config | {"num_key_value_heads": 9}, "x")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("norm", "tensor"), "norm.weight", "norm.tensor: norm.weight is not among the tensors"),
        (("router", "served"), "F8", "router.served"),
        (("targets", "experts"), "experts(", "is not a regular expression"),
        (("unread",), ["vision_("], r"unread: 'vision_\(' is not a regular expression"),
        (("servers", "vllm", "colour"), "red", "servers.vllm.colour"),
    ],
)
def test_facts_that_are_wrong_are_refused_with_their_key(
    place: tuple[str, ...], value: Any, message: str, tmp_path: Any
) -> None:
    body = yaml.safe_load(published("Qwen/Qwen3-30B-A3B-FP8", layers=1, experts=8).facts.as_yaml())
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
    [("two", "cannot make Qwen3MoeForCausalLM of it"), ([0, 1, 2], "has no layers with ")],
)
def test_dense_layers(value: Any, message: str) -> None:
    config = published_with("Qwen/Qwen3-30B-A3B-FP8", layers=3, experts=8)
    assert architecture_for(config, "x").dense == frozenset()
    assert architecture_for(config | {"mlp_only_layers": [1]}, "x").moe_layers == [0, 2]
    with pytest.raises(ArchitectureError, match=message):
        architecture_for(config | {"mlp_only_layers": value}, "x")


@pytest.mark.parametrize(
    ("name", "ending", "other"),
    [
        ("Qwen/Qwen3-30B-A3B-FP8", ".weight_scale_inv", "F32"),
        ("zai-org/GLM-4.6-FP8", ".weight_scale", "F32"),
        ("deepseek-ai/DeepSeek-V3", "e_score_correction_bias", "BF16"),
        ("zai-org/GLM-4.6-FP8", "mlp.gate.weight", "F32"),
    ],
)
def test_what_is_not_verified_is_taken_in_either_form(name: str, ending: str, other: Any) -> None:
    model = published(name, layers=5, experts=16)
    tensors = model.tensors
    changed = {n: Spec(other, s.shape) if n.endswith(ending) else s for n, s in tensors.items()}
    assert changed != tensors
    plan = model.plan(changed)
    kept = {a.source: spec for a in plan.actions for spec in a.outputs.values() if a.source.endswith(ending)}
    assert kept
    assert {spec.dtype for spec in kept.values()} == {other}


def test_glm_46_lacks_two_matrices_of_the_layer_that_predicts_further_tokens() -> None:
    """embed_tokens and shared_head.head (vllm#25993); one of them in FP8 is refused by name."""
    model = published("zai-org/GLM-4.6-FP8", layers=5, experts=16)
    tensors = model.tensors
    names = [f"model.layers.5.{name}.weight" for name in ("embed_tokens", "shared_head.head")]
    without = {name: spec for name, spec in tensors.items() if name not in names}
    assert len(without) == len(tensors) - 2
    assert model.plan(without).mtp == (5,)
    head = {names[1]: Spec("F8_E4M3", tensors[names[1]].shape)}
    with pytest.raises(CheckpointError, match=rf"^here: {re.escape(names[1])} is F8_E4M3; BF16 or F16 or F32"):
        model.plan(tensors | head)


def test_computed_buffers_of_kimi_are_carried_along() -> None:
    model = published("moonshotai/Kimi-K2-Instruct", layers=5, experts=16)
    buffers = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": Spec("F32", (32,)) for n in range(5)}
    plan = model.plan(model.tensors | buffers)
    assert {a.source for a in plan.actions if a.kind == "carry"} == buffers.keys()
    assert not plan.mtp


def test_more_layers_than_the_config_speaks_of_are_refused() -> None:
    model = published("deepseek-ai/DeepSeek-V3", layers=5, experts=16)
    tensors = model.tensors
    more = {name.replace("model.layers.5.", "model.layers.6."): spec for name, spec in tensors.items()}
    with pytest.raises(CheckpointError, match=r"model\.layers\.6\..* is not among the facts of deepseek_v3"):
        model.plan(tensors | more)
