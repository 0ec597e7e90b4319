"""The plan: one action for every tensor, MiniMax-M2's names and numbers, and sizes to the byte."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from commands import Command
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from planned import Model, published, published_with, tiny_model
from safetensors.torch import save_file

import quantizers
from quantizers.architectures.families import architecture_for, published_config
from quantizers.checkpoint.reader import open_folder
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.cli.plan import dense_words, plan_table, remarks, weights_table
from quantizers.planning.job import Job
from quantizers.planning.plan import METADATA, Plan, file_size, index_json
from quantizers.recipe.read import read_recipe, source_location
from quantizers.system.errors import ArchitectureError, CheckpointError, InputError, RecipeError
from quantizers.system.strict_yaml import dump

SAME = ...  # written under the source's name, in its dtype and shape
EXPERT = "block_sparse_moe.experts.255."

# Layer 61 of MiniMax-M2.1 outside the experts, and its last expert: dtype, shape, action, outputs.
GOLDEN: dict[str, tuple[str, list[int], str, Any]] = {
    "input_layernorm.weight": ("BF16", [3072], "keep", SAME),
    "post_attention_layernorm.weight": ("BF16", [3072], "fold", SAME),
    "self_attn.q_norm.weight": ("BF16", [6144], "keep", SAME),
    "self_attn.k_norm.weight": ("BF16", [1024], "keep", SAME),
    "self_attn.q_proj.weight": ("F8_E4M3", [6144, 3072], "keep", SAME),
    "self_attn.k_proj.weight": ("F8_E4M3", [1024, 3072], "keep", SAME),
    "self_attn.v_proj.weight": ("F8_E4M3", [1024, 3072], "keep", SAME),
    "self_attn.o_proj.weight": ("F8_E4M3", [3072, 6144], "keep", SAME),
    "self_attn.q_proj.weight_scale_inv": (
        "F32", [48, 24], "rename", {"self_attn.q_proj.weight_scale": ("F32", [48, 24])}
    ),
    "self_attn.k_proj.weight_scale_inv": (
        "F32", [8, 24], "rename", {"self_attn.k_proj.weight_scale": ("F32", [8, 24])}
    ),
    "self_attn.v_proj.weight_scale_inv": (
        "F32", [8, 24], "rename", {"self_attn.v_proj.weight_scale": ("F32", [8, 24])}
    ),
    "self_attn.o_proj.weight_scale_inv": (
        "F32", [24, 48], "rename", {"self_attn.o_proj.weight_scale": ("F32", [24, 48])}
    ),
    "block_sparse_moe.gate.weight": ("F32", [256, 3072], "compensate", SAME),
    "block_sparse_moe.e_score_correction_bias": ("F32", [256], "keep", SAME),
    EXPERT + "w1.weight": ("F8_E4M3", [1536, 3072], "quantize", {
        EXPERT + "w1.weight_packed": ("I32", [1536, 384]),
        EXPERT + "w1.weight_scale": ("BF16", [1536, 96]),
        EXPERT + "w1.weight_shape": ("I64", [2]),
    }),
    EXPERT + "w3.weight": ("F8_E4M3", [1536, 3072], "quantize", {
        EXPERT + "w3.weight_packed": ("I32", [1536, 384]),
        EXPERT + "w3.weight_scale": ("BF16", [1536, 96]),
        EXPERT + "w3.weight_shape": ("I64", [2]),
    }),
    EXPERT + "w2.weight": ("F8_E4M3", [3072, 1536], "quantize", {
        EXPERT + "w2.weight_packed": ("I32", [3072, 192]),
        EXPERT + "w2.weight_scale": ("BF16", [3072, 48]),
        EXPERT + "w2.weight_shape": ("I64", [2]),
    }),
    EXPERT + "w1.weight_scale_inv": ("F32", [12, 24], "drop", {}),
    EXPERT + "w3.weight_scale_inv": ("F32", [12, 24], "drop", {}),
    EXPERT + "w2.weight_scale_inv": ("F32", [24, 12], "drop", {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def minimax() -> Model:
    """All 96,107 tensors of MiniMax-M2.1, from the built-in facts."""
    return published("MiniMaxAI/MiniMax-M2.1")


@pytest.fixture(scope="module")
def plan(published_job: Job) -> Plan:
    return published_job.plan


# MiniMax-M2.1.


def test_a_layer_of_the_published_model(plan: Plan) -> None:
    prefix = "model.layers.61."
    seen = {
        action.source.removeprefix(prefix): (
            action.spec.dtype,
            list(action.spec.shape),
            action.kind,
            {name.removeprefix(prefix): (spec.dtype, list(spec.shape)) for name, spec in action.outputs.items()},
        )
        for action in plan.of_layer(61)
        if ".experts." not in action.source or action.expert == 255
    }
    assert seen == {
        name: (dtype, shape, kind, {name: (dtype, shape)} if outputs is SAME else outputs)
        for name, (dtype, shape, kind, outputs) in GOLDEN.items()
    }


def test_what_lies_outside_the_layers_is_kept(plan: Plan) -> None:
    table = Spec("BF16", (200064, 3072))
    assert {action.source: (action.kind, dict(action.outputs)) for action in plan.of_layer(None)} == {
        "model.embed_tokens.weight": ("keep", {"model.embed_tokens.weight": table}),
        "model.norm.weight": ("keep", {"model.norm.weight": Spec("BF16", (3072,))}),
        "lm_head.weight": ("keep", {"lm_head.weight": table}),
    }


def test_every_tensor_has_exactly_one_action(plan: Plan, minimax: Model) -> None:
    assert Counter(action.source for action in plan.actions) == dict.fromkeys(minimax.tensors, 1)
    assert {action.source: action.spec for action in plan.actions} == minimax.tensors
    written = Counter(name for action in plan.actions for name in action.outputs)
    assert set(written.values()) == {1}


def test_the_index_names_every_output_and_its_shard() -> None:
    shards = tiny_model().plan().shards()
    weight_map = json.loads(index_json(tiny_model().plan()))["weight_map"]
    assert weight_map == {name: file for file, tensors in shards.items() for name in tensors}


def test_counts_of_the_published_model(plan: Plan) -> None:
    assert Counter(action.kind for action in plan.actions) == {
        "quantize": 47_616,
        "drop": 47_616,
        "keep": 62 * (4 + 4) + 3,
        "rename": 62 * 4,
        "fold": 62,
        "compensate": 62,
    }


@pytest.mark.parametrize("version", ["M2", "M2.1", "M2.5", "M2.7"])
def test_facts_are_built_in_for_every_version(version: str, minimax: Model) -> None:
    recipe, path = read_recipe(f"minimax-{version.lower()}-fp8-int4")
    assert source_location(recipe, path) == f"MiniMaxAI/MiniMax-{version}"
    assert published_config(f"MiniMaxAI/MiniMax-{version}") == minimax.config


@pytest.mark.slow
def test_the_shipped_plan_works_without_network(
    plan: Plan, minimax: Model, monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a plan from kept facts asks the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert command("plan", "minimax-m2.1-fp8-int4", "--json") == 0
    assert not command.err
    numbers = json.loads(command.out)
    assert numbers["basis"].startswith("the built-in architecture spec of MiniMaxAI/MiniMax-M2.1 ")
    matrices = 62 * 256 * 3
    assert numbers["quantized_matrices"] == matrices == 47_616
    assert numbers["kept_attention_tensors"] == 62 * 10
    assert numbers["expert_bytes"] == matrices * (1536 * 3072 // 2 + 1536 * 96 * 2 + 16)
    assert round(numbers["expert_bytes"] / 1e8) == 1264
    assert round(numbers["output_bytes"] / 1e8) == 1318
    assert numbers["source_bytes"] == sum(spec.bytes for spec in minimax.tensors.values())
    assert round(numbers["source_bytes"] / 1e9) == 230
    assert list(numbers["shards"]) == [f"model-{n:05d}-of-00063.safetensors" for n in range(1, 64)]
    assert numbers["output_bytes"] == sum(numbers["shards"].values()) + numbers["index_bytes"]
    assert numbers["index_bytes"] == len(index_json(plan))


# Other settings and other sources.


@pytest.mark.parametrize(
    ("bits", "group", "packed", "scale"),
    [(4, 32, (1536, 384), (1536, 96)), (4, 128, (1536, 384), (1536, 24)), (8, 64, (1536, 768), (1536, 48))],
)
def test_bits_and_groups(bits: int, group: int, packed: tuple[int, int], scale: tuple[int, int]) -> None:
    shard = published("MiniMaxAI/MiniMax-M2.1", layers=1, experts=8).plan(bits=bits, group_size=group).shard(0)
    module = "model.layers.0.block_sparse_moe.experts.0.w1"
    assert shard[f"{module}.weight_packed"] == Spec("I32", packed)
    assert shard[f"{module}.weight_scale"] == Spec("BF16", scale)


def test_without_awq_nothing_is_folded() -> None:
    counts = Counter(action.kind for action in tiny_model().plan(awq=False).actions)
    assert {"fold", "compensate"}.isdisjoint(counts)
    assert sum(counts.values()) == len(tiny_model().tensors)


def test_a_bfloat16_source_has_no_scales_to_rename_or_drop() -> None:
    plain = {
        name: Spec("BF16", spec.shape) if spec.dtype == "F8_E4M3" else spec
        for name, spec in tiny_model().tensors.items()
        if not name.endswith("_scale_inv")
    }
    counts = Counter(action.kind for action in tiny_model().plan(plain).actions)
    assert {"rename", "drop"}.isdisjoint(counts)
    assert counts["quantize"] == 2 * 4 * 3


def test_a_bfloat16_router_becomes_float32_where_it_is_compensated() -> None:
    model, router = tiny_model(), "model.layers.0.block_sparse_moe.gate.weight"
    half = model.tensors | {router: Spec("BF16", model.tensors[router].shape)}
    assert model.plan(half).shard(0)[router].dtype == "F32"
    assert model.plan(half, awq=False).shard(0)[router].dtype == "BF16"


def test_a_checkpoint_on_disk_is_planned_as_expected(tmp_path: Path) -> None:
    source = open_folder(tiny.make(tmp_path / "model"))
    assert {name: Spec(info.dtype, info.shape) for name, info in source.tensors.items()} == tiny_model().tensors


def test_scales_round_up_to_whole_blocks() -> None:
    """160 columns are two blocks of 128."""
    tensors = tiny_model(hidden_size=160).tensors
    assert tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"] == Spec("F32", (2, 2))
    assert tensors["model.layers.0.block_sparse_moe.experts.0.w2.weight_scale_inv"] == Spec("F32", (2, 1))
    tiny_model(hidden_size=160).plan()


# What is refused.


ONE_LAYER = tiny_model(num_hidden_layers=1, num_local_experts=2)


@pytest.mark.parametrize("name", sorted(ONE_LAYER.tensors))
def test_every_tensor_must_be_there_in_its_shape(name: str) -> None:
    tensors, spec = ONE_LAYER.tensors, ONE_LAYER.tensors[name]
    for changed, message in (
        (None, "is missing; the checkpoint is incomplete, download it again$"),
        (Spec(spec.dtype, (*spec.shape, 1)), r"has shape \[.*\], config.json says \[.*; .* download both again$"),
        (Spec("I64", spec.shape), "is I64; .* is needed; give the published checkpoint$"),
    ):
        others = {other: one for other, one in tensors.items() if other != name}
        with pytest.raises(CheckpointError, match=rf"^here: {name} {message}"):
            ONE_LAYER.plan(others | ({name: changed} if changed else {}))


@pytest.mark.parametrize(
    "name",
    [
        "x",
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.block_sparse_moe.experts.4.w1.weight",
        "model.mtp.0",
    ],
)
def test_a_tensor_without_facts_is_refused(name: str) -> None:
    model = tiny_model()
    more = model.tensors | {name: Spec("BF16", (1,))}
    with pytest.raises(CheckpointError, match=f"^here: {name} is not among the facts of minimax_m2; .* refused"):
        model.plan(more)
    with pytest.raises(CheckpointError, match=r"\(and 1 more\) is not among"):
        model.plan(more | {"y": Spec("BF16", (1,))})


def test_a_group_that_does_not_divide() -> None:
    with pytest.raises(
        RecipeError, match=r"group_size 128 does not divide intermediate_size 64; give experts\.group_size: 64"
    ):
        tiny_model().plan(group_size=128)


def test_what_has_no_facts() -> None:
    assert published_config("MiniMaxAI/MiniMax-M3") is None
    with pytest.raises(ArchitectureError, match=r"'llama': not a mixture-of-experts"):
        architecture_for({"model_type": "llama"}, "config.json")


# Sizes to the byte.

LIBRARY = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
SPECS = st.builds(Spec, st.sampled_from(sorted(LIBRARY)), st.lists(st.integers(0, 12), max_size=3).map(tuple))
NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=6) | st.sampled_from(["a.weight", "b.weight_scale"])


@settings(
    derandomize=True, deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(specs=st.dictionaries(NAMES.filter(lambda name: name != "__metadata__"), SPECS, max_size=12))
@example(specs={"a": Spec("I32", (2,)), "b": Spec("F32", (1000,)), "c": Spec("I32", (1,)), "d": Spec("F32", (1,))})
@example(specs={})
def test_a_files_size_is_known_before_it_is_written(tmp_path: Path, specs: dict[str, Spec]) -> None:
    tensors = {name: torch.zeros(spec.shape, dtype=LIBRARY[spec.dtype]) for name, spec in specs.items()}
    save_file(tensors, tmp_path / "x.safetensors", metadata=METADATA)
    assert file_size(specs) == (tmp_path / "x.safetensors").stat().st_size


def test_a_plan_from_a_lone_config(tmp_path: Path, command: Command) -> None:
    model = tiny.make(tmp_path / "model")
    source = "{dataset: a/b, columns: [text], shape: text, samples: 5, category: c}"
    (tmp_path / "set.yaml").write_text(f"name: x\nsequence_length: 16\nsources: [{source}]\n")
    (tmp_path / "r.yaml").write_text("source: {model: model}\ncalibration: set.yaml\n")

    def numbers() -> dict[str, Any]:
        assert command("plan", tmp_path / "r.yaml", "--json") == 0
        body: dict[str, Any] = json.loads(command.out)
        return body

    whole = numbers()
    assert whole["basis"] == f"the headers of {model}"
    config = (model / "config.json").read_text()
    shutil.rmtree(model)
    model.mkdir()
    (model / "config.json").write_text(config)
    lone = numbers()
    assert lone["basis"] == f"{model / 'config.json'} alone, without shards"
    assert lone["source_ways"][0] == whole["source_ways"][0]
    assert [ways["source_ways"][1]["source"] for ways in (lone, whole)] == [None, whole["source_ways"][1]["download"]]
    of_headers = ("basis", "source_ways")
    assert {key: value for key, value in lone.items() if key not in of_headers} == {
        key: value for key, value in whole.items() if key not in of_headers
    }


def test_of_a_model_type_without_server_facts_the_weights_are_counted(tmp_path: Path) -> None:
    recipe = "qwen3-30b-a3b-instruct-2507-fp8-int4"
    config = published_with("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", layers=12)
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = quantizers.plan(recipe, source=tmp_path).figures
    facts = yaml.safe_load(architecture_for(config, "x").as_yaml())
    for key in ("servers", "targets", "kv_cache", "tensor_parallel", "smoothing", "published"):
        del facts[key]
    (tmp_path / "facts.yaml").write_text(dump(facts))

    def planned(**options: Any) -> dict[str, Any]:
        return quantizers.plan(recipe, source=tmp_path, facts=tmp_path / "facts.yaml", **options).figures

    assert planned()["output_bytes"] == whole["output_bytes"]
    given = planned(vram=["2x2GiB", "1x80GiB"])
    small, large = given["weights"]
    assert whole["output_bytes"] * 0.99 < small["weights"] == large["weights"] < whole["output_bytes"]
    assert small["left"] < 0 < large["left"]
    assert "too few" in weights_table(given)
    assert "how servers divide it among GPUs and what they cache of a token is not known here" in weights_table(given)
    with pytest.raises(InputError, match=r"^--context, --kv and --tp: .*; leave them out$"):
        planned(vram=["2x2GiB"], context=4096)
    with pytest.raises(InputError, match=r"^--ram: .*; leave it out$"):
        planned(vram=["2x2GiB"], ram=64 * 10**9)


def test_a_plan_says_what_few_bits_and_signed_scales_cost_among_servers() -> None:
    def limits(**experts: Any) -> list[str]:
        settings = {f"experts.{key}": value for key, value in experts.items()}
        found = quantizers.plan("tiny-minimax-m2-fp8-int4", settings=settings).figures
        assert set(found["limits"]) <= set(remarks(found))
        return [line.partition(":")[0] for line in found["limits"]]

    signed = "group scales may be negative; `experts.scales_sign"
    assert [line[: len(signed)] for line in limits()] == [signed]
    assert limits(scales_sign="positive") == []
    assert limits(scales_sign="positive", bits=2) == ["vLLM 0.32+, vLLM 0.14-0.31", "SGLang"]
    assert limits(scales_sign="positive", bits=3) == ["vLLM 0.32+, vLLM 0.14-0.31", "SGLang", "transformers"]


def test_before_a_run_chose_within_a_budget_all_of_it_is_planned_for() -> None:
    """The disk for the output, and the reading to measure; without a budget there is neither."""
    settings = {"experts.bits": None, "experts.group_size": None, "experts.budget": "3.3MB"}
    found = quantizers.plan("tiny-minimax-m2-fp8-int4", settings=settings, disk=10**6).figures
    assert found["output_bytes"] < found["needs"]["output"] == 3_300_000
    assert found["needs"]["measuring"] == pytest.approx(found["source_bytes"] / 10**6)
    printed = plan_table(found)
    assert f"sizes of {found['schemes']['planned']} in every layer: a run chooses, and may fill 3.3 MB" in printed
    assert "besides, to measure for the budget: under a minute to read the source once more" in printed
    without = quantizers.plan("tiny-minimax-m2-fp8-int4", gpus=2).figures
    assert without["needs"]["measuring"] is None
    assert not any(words in plan_table(without) for words in ("may fill", "to measure"))
    assert " of host memory for each of 2 processes." in plan_table(without)


def test_what_is_special_about_a_model_is_said_in_the_plan() -> None:
    """No server, and layers without experts; neither is mentioned where it is not so."""
    assert remarks({"servers": ["sglang", "vllm"]}) == []
    (line,) = remarks({"servers": ["sglang"]})
    assert line.startswith("No release of vLLM")
    (line,) = remarks({"servers": []})
    assert "none was checked" in line
    assert dense_words({"dense_layers": []}) == ""
    assert dense_words({"dense_layers": [0, 1]}) == "2 of them without experts, the others with "
