"""Checkpoints that are refused by their config.json: unsupported formats, and sources that already have 4 bits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from awq_gptq import Kind
from commands import quantize
from safetensors.torch import save_file

from quantizers.formats.unsupported import refuse_four_bits
from quantizers.planning.hub_headers import read_hub
from quantizers.system.errors import CheckpointError

SECTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "EXL3": ({"quant_method": "exl3", "bits": 4.0}, "is 'exl3', which is not supported; evaluate it with exllamav3's"),
    "EXL2": ({"quant_method": "exl2", "bits": 4.0}, "evaluate it with exllamav2's test_inference.py"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "save model.dequantize() with"),
    "HQQ": ({"quant_method": "hqq"}, "evaluate it with the program that made it; here give the checkpoint that it"),
    "NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method is 'modelopt', which is not"),
    "MXFP4": ({"quant_method": "mxfp4"}, "quant_method is 'mxfp4', which is not supported"),
    "compressed-tensors' NVFP4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}},
        "format 'nvfp4-pack-quantized' is not one of",
    ),
    "AutoRound's own": (
        Kind("gptq").section() | {"quant_method": "auto-round", "packing_format": "auto_round:nv_fp4"},
        "packing_format is 'auto_round:nv_fp4', another packing; only",
    ),
    "no name": ({"quant_method": 4}, "quant_method is 4, which is not supported"),
}  # fmt: skip


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert shown.out == ""
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("name", SECTIONS)
def test_a_format_that_is_not_read_is_refused_with_a_remedy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section, said = SECTIONS[name]
    source = tiny.make(tmp_path / "source")
    other = tiny.make(tmp_path / "other", quantization_config=section)
    for words in (
        ("eval", source, other, "--data", "held-out", "--device", "cpu"),
        ("coverage", "--model", other, "--data", "embedded", "--device", "cpu"),
        ("verify", other, "--source", source, "--device", "cpu"),
    ):
        assert quantize(monkeypatch, *words) == 2
        line = refused(capsys)
        assert f"{other}/config.json: quantization_config" in line
        assert said in line


def test_gguf_is_refused_as_file_folder_and_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, folder = tiny.make(tmp_path / "source"), tmp_path / "llama"
    folder.mkdir()
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    file = folder / "model-Q4_K_M.gguf"
    for given, named in ((file, file), (folder, file), ("someone/Model-GGUF", "someone/Model-GGUF")):
        assert quantize(monkeypatch, "eval", source, given, "--data", "held-out") == 2
        expected = (
            f"{named}: GGUF is not supported; evaluate it with llama.cpp's llama-perplexity --kl-divergence; here give "
            "the checkpoint that it was made from"
        )
        assert expected in refused(capsys)
    for given in (file, folder):
        assert quantize(monkeypatch, "verify", given, "--source", source) == 2
        assert f"{file}: GGUF is not supported" in refused(capsys)
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")  # both: the checkpoint is what counts
    (folder / "config.json").write_text("{}")
    assert quantize(monkeypatch, "eval", source, folder, "--data", "held-out") == 2
    assert "GGUF" not in refused(capsys)


def test_mlx_and_words_without_a_section_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny.make(tmp_path / "source")
    mlx = tiny.make(tmp_path / "mlx", quantization={"group_size": 64, "bits": 4}, quantization_config=None)
    assert quantize(monkeypatch, "eval", source, mlx, "--data", "held-out") == 2
    assert "mlx/config.json: quantization is MLX's, which is not supported; evaluate it with mlx-lm" in refused(capsys)
    config = tiny.config(quantization_config=None)
    words = {"model.layers.0.self_attn.q_proj.qweight": torch.zeros(16, 8, dtype=torch.int32)}
    old = tiny.write(tmp_path / "old", config, tiny.tensors(config) | words)
    assert quantize(monkeypatch, "eval", source, old, "--data", "held-out") == 2
    line = refused(capsys)
    assert "old/config.json: does not declare the AutoAWQ or GPTQ integers in the files" in line
    assert "quantize_config.json, and add its quant_method" in line
    assert json.loads((old / "config.json").read_text())["quantization_config"] is None


@pytest.mark.parametrize("kind", [Kind("awq"), Kind("gptq", bits=8)])
def test_verify_points_to_eval_for_autoawq_and_gptq(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny.make(tmp_path / "source")
    other = tiny.make(tmp_path / "other", quantization_config=kind.section())
    assert quantize(monkeypatch, "verify", other, "--source", source, "--device", "cpu") == 2
    line = refused(capsys)
    assert f"{other}/config.json: quantization_config.quant_method is '{kind.layout}'; `verify` checks" in line
    assert line.endswith(f"measure this one with `quantize eval {source} {other} --data SET`")


# A source that already has 4-bit weights -------------------------------------------------------------


def packed(bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }


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
    assert line.endswith(
        "already has 4-bit weights, so there is nothing to quantize; give the model's FP8 or BF16 release"
    )


@pytest.mark.parametrize("config", NOT_FOUR_BITS, ids=range(len(NOT_FOUR_BITS)))
def test_any_other_config_is_left_to_the_checks_that_follow(config: dict[str, Any]) -> None:
    refuse_four_bits(config, "here/config.json")


def test_a_name_with_a_line_break_stays_in_one_line() -> None:
    section = packed(4)
    section["config_groups"]["a\nb"] = section["config_groups"].pop("group_0")
    with pytest.raises(CheckpointError, match=r"^[^\n]*$"):
        refuse_four_bits({"quantization_config": section}, "here/config.json")


@pytest.mark.parametrize("shard", [b"", b"not a shard at all"], ids=["config alone", "with an unreadable shard"])
@pytest.mark.parametrize(
    "words", [("run", "r.yaml", "--output", "out"), ("plan", "r.yaml"), ("new", "model", "n.yaml")]
)
def test_every_command_that_takes_a_source_says_so_first(
    words: tuple[str, ...],
    shard: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before the architecture, which is not known, and before the shards, whose dtypes may not be."""
    source = "{dataset: a/b, columns: [text], shape: text, samples: 5, category: c}"
    (tmp_path / "set.yaml").write_text(f"name: x\nsequence_length: 16\nsources: [{source}]\n")
    (tmp_path / "r.yaml").write_text("source: {model: model}\ncalibration: set.yaml\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(FOUR_BITS["gpt-oss"][0]))
    if shard:
        (tmp_path / "model" / "model.safetensors").write_bytes(shard)
    monkeypatch.chdir(tmp_path)
    assert quantize(monkeypatch, *words) == 2
    assert "config.json: quantization_config.quant_method is 'mxfp4': this model already has 4-bit weights" in refused(
        capsys
    )
    assert not (tmp_path / "n.yaml").exists()


def test_a_model_on_the_hub_is_refused_before_its_headers_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FOUR_BITS["DeepSeek-V4"][0]))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(sha="c0ffee"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(tmp_path / "config.json"))
    with pytest.raises(CheckpointError, match=r"^me/model: config.json: expert_dtype is 'fp4': this model already"):
        read_hub("me/model", "main")
