"""Checkpoints that are refused by their config.json: unsupported formats, and sources that already have 4 bits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from awq_gptq import Kind
from commands import Command
from hub_stand_in import HubStandIn, reached
from low_bits import MINIMAX, QUARK
from safetensors.torch import save_file

from quantizers.checkpoint.reader import Checkpoint
from quantizers.formats.unsupported import refuse_four_bits, refuse_swapped_arguments, refuse_unsupported
from quantizers.planning.job import prepare
from quantizers.system.errors import CheckpointError

SECTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "EXL3": ({"quant_method": "exl3", "bits": 4.0}, "is 'exl3', which is not supported; evaluate it with exllamav3's"),
    "EXL2": ({"quant_method": "exl2", "bits": 4.0}, "evaluate it with exllamav2's test_inference.py"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "save model.dequantize() with"),
    "HQQ": ({"quant_method": "hqq"}, "evaluate it with the program that made it; here give the checkpoint that it"),
    "ModelOpt's blocks": (
        {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"},
        "quant_algo is 'FP8_PB_WO', and only FP8, FP8_PER_CHANNEL_PER_TOKEN, MIXED_PRECISION, MXFP8, NVFP4,",
    ),
    "Quark's FP8": (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}},
        "Quark's global_quant_config.weight is no MXFP4 (dtype fp4, group_size 32, scale_format e8m0)",
    ),
    "compressed-tensors' sparse format": (
        {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}},
        "format 'marlin-24' is not one of",
    ),
    "rotated activations": (
        {"quant_method": "compressed-tensors", "config_groups": {}, "transform_config": {"config_groups": {}}},
        "transform_config rotates activations",
    ),
    "sparse weights": (
        {"quant_method": "compressed-tensors", "config_groups": {}, "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config has format 'sparse-24-bitmask'",
    ),
    "AutoRound's own": (
        Kind("gptq").section() | {"quant_method": "auto-round", "packing_format": "auto_round:nv_fp4"},
        "packing_format is 'auto_round:nv_fp4', another packing; only",
    ),
    "no name": ({"quant_method": 4}, "quant_method is 4, which is not supported"),
    "a list": ({"quant_method": ["gptq"]}, "quant_method is ['gptq'], which is not supported"),
    "a list of formats": ({"quant_method": "fp8", "format": ["dense"]}, "format ['dense'] is not one of dense, float-"),
}  # fmt: skip


def refused(command: Command) -> str:
    (line,) = command.err.splitlines()
    assert command.out == ""
    return line


@pytest.mark.parametrize("name", SECTIONS)
def test_a_format_that_is_not_read_is_refused_with_a_remedy(name: str) -> None:
    section, said = SECTIONS[name]
    with pytest.raises(CheckpointError) as failure:
        refuse_unsupported(tiny.config(quantization_config=section), "here/config.json")
    assert str(failure.value).startswith("here/config.json: quantization_config")
    assert said in str(failure.value)
    assert "\n" not in str(failure.value)


def test_every_command_that_takes_a_candidate_refuses_it(tmp_path: Path, command: Command) -> None:
    section, said = SECTIONS["EXL3"]
    source = tiny.make(tmp_path / "source")
    other = tiny.make(tmp_path / "other", quantization_config=section)
    for words in (
        ("eval", source, other, "--data", "held-out", "--device", "cpu"),
        ("coverage", "--model", other, "--data", "embedded", "--device", "cpu"),
        ("verify", other, "--source", source, "--device", "cpu"),
    ):
        assert command(*words) == 2
        line = refused(command)
        assert f"{other}/config.json: quantization_config" in line
        assert said in line


def test_gguf_is_refused_as_file_folder_and_id(tmp_path: Path, command: Command) -> None:
    source, folder = tiny.make(tmp_path / "source"), tmp_path / "llama"
    folder.mkdir()
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    file = folder / "model-Q4_K_M.gguf"
    for given, named in ((file, file), (folder, file), ("someone/Model-GGUF", "someone/Model-GGUF")):
        assert command("eval", source, given, "--data", "held-out") == 2
        expected = (
            f"{named}: GGUF is not supported; evaluate it with llama.cpp's llama-perplexity --kl-divergence; here give "
            "the checkpoint that it was made from"
        )
        assert expected in refused(command)
    for given in (file, folder):
        assert command("verify", given, "--source", source) == 2
        assert f"{file}: GGUF is not supported" in refused(command)
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")  # both: the checkpoint is what counts
    (folder / "config.json").write_text("{}")
    assert command("eval", source, folder, "--data", "held-out") == 2
    assert "GGUF" not in refused(command)


def test_mlx_and_words_without_a_section_are_refused(tmp_path: Path, command: Command) -> None:
    source = tiny.make(tmp_path / "source")
    mlx = tiny.make(tmp_path / "mlx", quantization={"group_size": 64, "bits": 4}, quantization_config=None)
    assert command("eval", source, mlx, "--data", "held-out") == 2
    assert "mlx/config.json: quantization is MLX's, which is not supported; evaluate it with mlx-lm" in refused(command)
    config = tiny.config(quantization_config=None)
    words = {"model.layers.0.self_attn.q_proj.qweight": torch.zeros(16, 8, dtype=torch.int32)}
    old = tiny.write(tmp_path / "old", config, tiny.tensors(config) | words)
    assert command("eval", source, old, "--data", "held-out") == 2
    line = refused(command)
    assert "old/config.json: does not declare the AutoAWQ or GPTQ integers in the files" in line
    assert "quantize_config.json, and add its quant_method" in line
    assert json.loads((old / "config.json").read_text())["quantization_config"] is None


OF_OTHERS = [Kind("awq").section(), Kind("gptq", bits=8).section(), MINIMAX, QUARK]


@pytest.mark.parametrize("section", OF_OTHERS, ids=lambda section: section["quant_method"])
def test_verify_points_to_eval_for_other_programs_files(
    section: dict[str, Any], tmp_path: Path, command: Command
) -> None:
    source = tiny.make(tmp_path / "source")
    other = tiny.make(tmp_path / "other", quantization_config=section)
    assert command("verify", other, "--source", source, "--device", "cpu") == 2
    line = refused(command)
    method = section["quant_method"]
    assert f"{other}/config.json: quantization_config.quant_method is '{method}'; `verify` checks" in line
    assert line.endswith(f"measure this one with `quantize eval {source} {other} --data held-out`")


# A source that already has weights of 4 bits or fewer -------------------------------------------------------------


def packed(bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }


BLOCK = {"num_bits": 8, "type": "float", "strategy": "block"}
GROUP = "quantization_config.config_groups.group_0.weights.num_bits"
FOUR_BITS: dict[str, tuple[dict[str, Any], str]] = {
    "gpt-oss": (
        {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
        "quantization_config.quant_method is 'mxfp4'",
    ),
    "Kimi-K2-Thinking": ({"model_type": "kimi_k2", "quantization_config": packed(4)}, f"{GROUP} is 4"),
    "Kimi-K2.5": (
        {"model_type": "kimi_k25", "text_config": {"quantization_config": packed(4)}},
        f"text_config.{GROUP} is 4",
    ),
    "DeepSeek-V4": (
        {"model_type": "deepseek_v4", "expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}},
        "expert_dtype is 'fp4'",
    ),
    "in the section": ({"quantization_config": {"expert_dtype": "float4_e2m1fn_x2"}}, "expert_dtype is 'float4_e2m1"),
    "GPTQ": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config.bits is 4"),
    "AWQ": ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config.bits is 4"),
    "NVFP4": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        "quantization_config.quant_algo is 'NVFP4'",
    ),
    "bitsandbytes": ({"quantization_config": {"load_in_4bit": True}}, "quantization_config.load_in_4bit is True"),
}
# Those that are read, and so may be accepted.
READ = ("gpt-oss", "Kimi-K2-Thinking", "Kimi-K2.5", "DeepSeek-V4", "in the section", "NVFP4", "bitsandbytes")
NOT_FOUR_BITS: list[dict[str, Any]] = [
    tiny.config(),
    {},
    {"quantization_config": None, "text_config": None},
    {"quantization_config": packed(8)},
    {"quantization_config": {"quant_method": "gptq", "bits": 8}},
    {"quantization_config": {"quant_method": "fp8", "fmt": "float8_e4m3fn", "bits": True, "config_groups": [4]}},
    {"quantization_config": [4], "text_config": "fp4", "torch_dtype": "bfloat16", "kv_cache_dtype": "fp4"},
    {"quantization_config": {"config_groups": {"x": {"weights": None}, "y": 4}}, "expert_dtype": "fp8"},
]


@pytest.mark.parametrize("name", FOUR_BITS)
def test_a_model_in_four_bits_is_refused_by_file_and_key(name: str) -> None:
    config, said = FOUR_BITS[name]
    with pytest.raises(CheckpointError) as refused:
        refuse_four_bits(config, "here/config.json")
    line = str(refused.value)
    assert line.startswith("here/config.json: ")
    assert said in line
    assert (
        "already has weights of 4 bits or fewer, so there is nothing to quantize; give the model's FP8 or BF16" in line
    )
    assert ("source.accept_quantized: true" in line) == (name in READ)


def test_any_other_config_is_left_to_the_checks_that_follow() -> None:
    for config in NOT_FOUR_BITS:
        refuse_four_bits(config, "here/config.json")


WITHOUT_SENSE: dict[str, tuple[Any, str]] = {
    "a list": (["x"], r"quantization_config is \['x'\]; an object is needed"),
    "weights": (packed(8) | {"config_groups": {"g": {"weights": [1]}}}, r"g: weights are \[1\], symmetric"),
    "bits": (
        packed(8) | {"config_groups": {"g": {"weights": {"type": "int", "strategy": "group"}}}},
        "g: weights are int",
    ),
    "a block": (
        packed(8) | {"config_groups": {"g": {"weights": BLOCK | {"block_structure": "128x128"}}}},
        "block_structure is '128x128'; two positive",
    ),
    "a second block": (
        packed(8)
        | {"config_groups": {n: {"weights": BLOCK | {"block_structure": b}} for n, b in (("g", [8, 8]), ("h", [8]))}},
        "h: weights are float8 block",
    ),
}


@pytest.mark.parametrize("name", WITHOUT_SENSE)
def test_a_section_without_sense_is_named_in_a_line(name: str, tmp_path: Path, command: Command) -> None:
    section, said = WITHOUT_SENSE[name]
    tiny.make(tmp_path / "model", quantization_config=section)
    recipe = tmp_path / "r.yaml"
    recipe.write_text("source: {model: model}\ncalibration: embedded\n")
    assert command("plan", recipe) == 2
    assert re.search(said, refused(command))


def test_a_name_with_a_line_break_stays_in_one_line() -> None:
    section = packed(4)
    section["config_groups"]["a\nb"] = section["config_groups"].pop("group_0")
    with pytest.raises(CheckpointError, match=r"^[^\n]*$"):
        refuse_four_bits({"quantization_config": section}, "here/config.json")


def test_every_command_that_takes_a_source_says_so_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Before the architecture, which is not known, and before the shards, whose dtypes may not be."""
    source = "{dataset: a/b, columns: [text], shape: text, samples: 5, category: c}"
    (tmp_path / "set.yaml").write_text(f"name: x\nsequence_length: 16\nsources: [{source}]\n")
    (tmp_path / "r.yaml").write_text("source: {model: model}\ncalibration: set.yaml\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(FOUR_BITS["gpt-oss"][0]))
    monkeypatch.chdir(tmp_path)
    said = "config.json: quantization_config.quant_method is 'mxfp4': this model already has weights of 4 bits"
    for _ in range(2):
        for words in (("run", "r.yaml", "--output", "out"), ("plan", "r.yaml"), ("new", "model", "n.yaml")):
            assert command(*words) == 2
            assert said in refused(command)
        (tmp_path / "model" / "model.safetensors").write_bytes(b"not a shard at all")
    assert not (tmp_path / "n.yaml").exists()


def test_a_model_on_the_hub_is_refused_before_its_headers_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.dumps(FOUR_BITS["DeepSeek-V4"][0]).encode()
    (tmp_path / "r.yaml").write_text("source: {model: me/model}\ncalibration: embedded\n")
    with HubStandIn(repositories={"me/model": {"main": {"config.json": config, "model.safetensors": b"x"}}}) as hub:
        reached(hub, tmp_path / "home", monkeypatch)
        with pytest.raises(CheckpointError, match=r"^me/model: config.json: expert_dtype is 'fp4': this model already"):
            prepare(str(tmp_path / "r.yaml"), offline_facts=True)
        assert not [asked for asked in hub.asked if asked.endswith(".safetensors")]


# Source and candidate in the wrong order ------------------------------------------------------------

FP8 = tiny.config()["quantization_config"]
QUANTIZED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "4 bits": (packed(4), {}, f"its config.json says {GROUP} is 4"),
    "GPTQ in 8 bits": (Kind("gptq", bits=8).section(), {}, "its config.json says quant_method: gptq"),
    "this program's": (FP8, {"seal": "x", "settings": {}}, "its report.json says that this program made it"),
}
NOT_QUANTIZED: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "FP8": (FP8, {}),
    "BF16": (None, {}),
    "FP8 with a report of another program": (FP8, {"accuracy": 1}),
}


def written(folder: Path, section: dict[str, Any] | None, report: dict[str, Any]) -> Checkpoint:
    tiny.make(folder, quantization_config=section)
    if report:
        (folder / "report.json").write_text(json.dumps(report))
    return Checkpoint(folder, str(folder), json.loads((folder / "config.json").read_text()), {})


def test_swapped_arguments_are_refused_by_every_command(tmp_path: Path, command: Command) -> None:
    section, report, sign = QUANTIZED["this program's"]
    quantized, source = tmp_path / "quantized", tmp_path / "source"
    written(quantized, section, report)
    written(source, FP8, {})
    for words, remedy in (
        (("eval", quantized, source, "--data", "held-out"), f"give {source} first, and {quantized} after it"),
        (("verify", source, "--source", quantized), f"quantize verify {quantized} --source {source}"),
        (("stitch", "--source", quantized, "--experts", source, "--output", tmp_path / "out"),
         f"--source {source} --experts {quantized}"),
    ):  # fmt: skip
        assert command(*words, "--device", "cpu") == 2
        (line,) = command.err.splitlines()
        assert f"{quantized}: is given as the source, but {sign}, and {source} shows no such sign; they are " in line
        assert line.endswith(f"wrong way round: {remedy}")
    assert not (tmp_path / "out").exists()


def test_only_the_clear_case_is_refused(tmp_path: Path) -> None:
    quantized = [written(tmp_path / name, *QUANTIZED[name][:2]) for name in QUANTIZED]
    plain = [written(tmp_path / name, *NOT_QUANTIZED[name]) for name in NOT_QUANTIZED]
    for source in (*quantized, *plain):
        for candidate in (*quantized, *plain):
            if source in plain or candidate in quantized:
                refuse_swapped_arguments(source, candidate, "")
            else:
                said = re.escape(QUANTIZED[source.folder.name][2])
                with pytest.raises(CheckpointError, match=rf"{said}, and .*: give the other$"):
                    refuse_swapped_arguments(source, candidate, "give the other")
