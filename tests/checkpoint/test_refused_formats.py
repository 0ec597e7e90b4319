"""Formats of other tools that are not read: each command refuses them with one line that says what to do instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from awq_gptq import Kind
from commands import quantize
from safetensors.torch import save_file

SECTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "EXL3": ({"quant_method": "exl3", "bits": 4.0}, "is 'exl3', which is not read here; evaluate it with exllamav3's"),
    "EXL2": ({"quant_method": "exl2", "bits": 4.0}, "evaluate it with exllamav2's test_inference.py"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "what model.dequantize() returns with"),
    "HQQ": ({"quant_method": "hqq"}, "evaluate it with the program that made it; here give the checkpoint that it"),
    "NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method is 'modelopt', which is not"),
    "MXFP4": ({"quant_method": "mxfp4"}, "quant_method is 'mxfp4', which is not read here"),
    "compressed-tensors' NVFP4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}},
        "format 'nvfp4-pack-quantized' is none of",
    ),
    "AutoRound's own": (
        Kind("gptq").section() | {"quant_method": "auto-round", "packing_format": "auto_round:nv_fp4"},
        "packing_format is 'auto_round:nv_fp4', which fills its words in another way; only",
    ),
    "no name": ({"quant_method": 4}, "quant_method is 4, which is not read here"),
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
            f"{named}: GGUF is not read here; evaluate it with llama.cpp's llama-perplexity --kl-divergence; here give "
            "the checkpoint that it was made from"
        )
        assert expected in refused(capsys)
    for given in (file, folder):
        assert quantize(monkeypatch, "verify", given, "--source", source) == 2
        assert f"{file}: GGUF is not read here" in refused(capsys)
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
    assert "mlx/config.json: quantization is MLX's, which is not read here; evaluate it with mlx-lm" in refused(capsys)
    config = tiny.config(quantization_config=None)
    words = {"model.layers.0.self_attn.q_proj.qweight": torch.zeros(16, 8, dtype=torch.int32)}
    old = tiny.write(tmp_path / "old", config, tiny.tensors(config) | words)
    assert quantize(monkeypatch, "eval", source, old, "--data", "held-out") == 2
    line = refused(capsys)
    assert "old/config.json: says nothing of the integers of AutoAWQ or GPTQ that are stored" in line
    assert "quantize_config.json, and add its quant_method" in line
    assert json.loads((old / "config.json").read_text())["quantization_config"] is None
