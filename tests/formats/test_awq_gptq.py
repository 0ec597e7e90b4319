"""AutoAWQ's and GPTQ's matrices against their definition, and against the libraries that can unpack them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from awq_gptq import Kind, quantized
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quantizers.checkpoint.reader import open_folder
from quantizers.formats.awq_gptq import read_packing
from quantizers.formats.dequantization import read_weight
from quantizers.system.errors import CheckpointError

CPU = torch.device("cpu")
KINDS = {
    "AWQ": Kind("awq"),
    "AWQ, a group a column": Kind("awq", group=-1),
    "AWQ, symmetric": Kind("awq", symmetric=True),
    "GPTQ": Kind("gptq", symmetric=True),
    "GPTQ, asymmetric": Kind("gptq"),
    "GPTQ, asymmetric, second version": Kind("gptq", missing=0),
    "GPTQ, act-order": Kind("gptq", shuffled=True),
    "GPTQ, no g_idx": Kind("gptq", g_idx=False),
    "GPTQ, a group a column": Kind("gptq", group=-1, g_idx=False),
    "GPTQ, the last group cut": Kind("gptq", group=128, g_idx=False),
    "GPTQ, 8 bits": Kind("gptq", bits=8, symmetric=True),
    "GPTQ, 8 bits, asymmetric, act-order": Kind("gptq", bits=8, shuffled=True),
}


def matrix(rows: int = 40, columns: int = 192) -> torch.Tensor:
    """(R, C), with groups that reach from zero upwards and from zero downwards: zero points of 0 and of 15."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    weight[:4], weight[4:8] = weight[:4].abs(), -weight[4:8].abs()
    weight[:8, ::32] = 0
    return weight


def written(folder: Path, tensors: dict[str, torch.Tensor], section: dict[str, Any] | None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({f"model.m.{part}": tensor for part, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": section} if section else {}))
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_a_matrix_is_what_its_format_defines(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    tensors, numbers = quantized(matrix(), kind)
    found = read_weight(open_folder(written(tmp_path, tensors, kind.section())), "model.m", CPU)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    assert torch.equal(found, numbers)
    assert float((found - matrix()).norm() / matrix().norm()) < (0.01 if kind.bits == 8 else 0.25)


@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("GPTQ") and "cut" not in name])
def test_gptq_is_what_autoround_computes_with(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers compute in FP16. A zero point of 0 is left out: its first version reads it as 2^b."""
    # The import replaces these two for good, which other tests in this process would see.
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "default", None)
    monkeypatch.setattr(PreTrainedModel, "_init_weights", PreTrainedModel._init_weights)
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    kind = KINDS[name]
    weight = matrix()[8:]
    tensors, _ = quantized(weight, kind)
    library = qlinear_torch_zp if kind.missing else qlinear_torch
    layer = library.QuantLinear(kind.bits, kind.group, weight.shape[1], weight.shape[0], bias=False, g_idx=kind.g_idx)
    for part, tensor in tensors.items():
        setattr(layer, part, tensor)
    theirs = layer(torch.eye(weight.shape[1])).T
    ours = read_weight(open_folder(written(tmp_path, tensors, kind.section())), "model.m", CPU)
    torch.testing.assert_close(ours, theirs, rtol=2**-10, atol=0)


def test_exceptions_for_single_modules_are_honoured() -> None:
    gptq = Kind("gptq").section() | {
        "dynamic": {r"-:.*\.gate": {}, r"+:.*layers\.1\.": {"bits": 8}, r".*\.w2": {"group_size": 64}}
    }
    packing = read_packing(gptq, "x")
    found = [packing.of(f"model.layers.{name}") for name in ("0.q_proj", "1.gate", "1.w2", "0.w2")]
    assert found == [(4, 32), None, (8, 32), (4, 64)]
    rounded = {
        "quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:auto_gptq",
        "data_type": "int", "extra_config": {"a.b": {"bits": 16}, r".*\.w2$": {"bits": 8, "group_size": 32}, "c": {}},
    }  # fmt: skip
    packing = read_packing(rounded, "x")
    found = [packing.of(name) for name in ("a.b", "a.bc", "a.w2", "a.w2.x", "c", "cc")]
    assert found == [None, (4, 128), (8, 32), (4, 128), (4, 128), (4, 128)]
    assert (packing.layout, packing.zero_offset) == ("gptq", 1)
    assert read_packing(rounded | {"packing_format": "auto_round:gptqmodel"}, "x").zero_offset == 0
    assert read_packing(rounded | {"packing_format": "auto_round:auto_awq", "extra_config": {}}, "x").layout == "awq"


AWQ, GPTQ = Kind("awq").section(), Kind("gptq").section()


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (AWQ | {"version": "gemv"}, "version is 'gemv', another packing; only gemm"),
        (AWQ | {"bits": 8}, "bits is 8; only 4 is supported"),
        (AWQ | {"bits": None, "w_bit": 3}, "w_bit is 3; only 4"),
        (AWQ | {"group_size": 0}, "group_size is 0; only a positive number or -1"),
        (GPTQ | {"bits": 3}, "bits is 3; only 4 or 8"),
        (GPTQ | {"bits": True}, "bits is True; only 4 or 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', another packing"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is True; only the format gptq"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype is 'int16'; only int32"),
        (GPTQ | {"adapter": {"name": "lora"}}, "adapter is {'name': 'lora'}; only a checkpoint without one"),
        (GPTQ | {"dynamic": [1]}, "dynamic is [1]; an object is needed"),
        (GPTQ | {"dynamic": {"+:(": {}}}, "'(' is not a regular expression"),
        (GPTQ | {"dynamic": {"x": {"bits": 2}}}, "dynamic['x'] is {'bits': 2}; only 4 or 8 bits are supported"),
        (GPTQ | {"dynamic": {"x": {"lora": {"rank": 8}}}}, "dynamic['x'].lora is {'rank': 8}; only"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:llm_compressor"},
         "packing_format is 'auto_round:llm_compressor', another packing"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "mx_fp"}, "data_type is 'mx_fp'"),
    ],
)  # fmt: skip
def test_a_section_that_cannot_be_honoured_is_refused_by_its_key(section: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as failure:
        read_packing(section, "config.json: quantization_config")
    assert said in str(failure.value)
    assert "\n" not in str(failure.value)


def broken(change: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, section = quantized(matrix(), KINDS["GPTQ"])[0], KINDS["GPTQ"].section()
    if change == "another group size":
        section["group_size"] = 64
    elif change == "another number of bits":
        section["bits"] = 8
    elif change == "no zero points":
        del tensors["qzeros"]
    elif change == "out of order":
        tensors["g_idx"] = tensors["g_idx"].flip(0)
    elif change == "a group that is not there":
        tensors["g_idx"][0] = 6
    elif change == "left out":
        section["dynamic"] = {r"-:.*\.m": {}}
    elif change == "a weight too":
        tensors["weight"] = torch.ones(40, 192)
    elif change == "infinite scales":
        tensors["scales"][0, 0] = torch.inf
    return tensors, section


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("another group size", "quantization_config: 4 bits in groups of 64"),
        ("another number of bits", "quantization_config: 8 bits in groups of 32"),
        ("no zero points", "model.m.qzeros is missing (part of a quantized layer)"),
        ("out of order", "model.m.g_idx is out of order, but"),
        ("a group that is not there", "model.m.g_idx must give each of 192 inputs one of 6 groups"),
        ("left out", "quantization_config excludes this layer"),
        ("a weight too", "model.m.qweight and a plain weight are both present"),
        ("infinite scales", "model.m.weight or its scale holds a NaN or infinity"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as failure:
        read_weight(open_folder(written(tmp_path, *broken(change))), "model.m", CPU)
    assert said in str(failure.value)
