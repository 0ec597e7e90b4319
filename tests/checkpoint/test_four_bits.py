"""A model that already has 4-bit weights is no source: one line says so, before anything else is found wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny

from quantizers.checkpoint.four_bits import refuse_four_bits
from quantizers.checkpoint.hub_headers import read_hub
from quantizers.cli import main as cli
from quantizers.system.errors import CheckpointError


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
    monkeypatch.setattr("sys.argv", ["quantize", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1), err
    assert "config.json: quantization_config.quant_method is 'mxfp4': this model already has 4-bit weights" in err
    assert not (tmp_path / "n.yaml").exists()


def test_a_model_on_the_hub_is_refused_before_its_headers_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FOUR_BITS["DeepSeek-V4"][0]))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(sha="c0ffee"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(tmp_path / "config.json"))
    with pytest.raises(CheckpointError, match=r"^me/model: config.json: expert_dtype is 'fp4': this model already"):
        read_hub("me/model", "main")
