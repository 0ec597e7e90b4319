"""Stored tensors as numbers, against compressed-tensors' decompressors and loops over single elements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from low_bits import e4m3

from quantizers.architectures.families import architecture_for
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.formats.dequantization import read_weight
from quantizers.formats.fp8 import declared_block
from quantizers.model.layer_weights import layer_weights
from quantizers.system.errors import CheckpointError

CPU = torch.device("cpu")


def stored(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Checkpoint:
    """A checkpoint of just these tensors, in two shards."""
    return open_folder(tiny.write(folder / "checkpoint", tiny.config(**config), tensors))


def fp8_bytes(seed: int, *shape: int) -> torch.Tensor:
    """Random bytes without the two that are NaN."""
    codes = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    codes[(codes & 127) == 127] = 1
    return codes


@pytest.mark.parametrize(
    ("shape", "block", "suffix"),
    [
        ((256, 128), (128, 128), "weight_scale_inv"),
        ((130, 257), (128, 128), "weight_scale_inv"),
        ((5, 7), (128, 128), "weight_scale"),
        ((64, 96), (32, 64), "weight_scale"),
        ((9, 9), (1, 4), "weight_scale_inv"),
    ],
)
def test_fp8_by_its_bits(shape: tuple[int, int], block: tuple[int, int], suffix: str, tmp_path: Path) -> None:
    """Oracle: e4m3 decoded from its bits times its block's scale, rounded to float32 once; every byte occurs."""
    codes = fp8_bytes(1, *shape)
    values = [c for c in range(256) if c & 127 != 127]
    codes.view(-1)[: len(values)] = torch.tensor(values, dtype=torch.uint8)[: codes.numel()]
    rows, columns = (-(-n // b) for n, b in zip(shape, block, strict=True))
    scale = torch.rand(rows, columns, generator=torch.Generator().manual_seed(2)) * 1e-3
    quantization = {"quant_method": "fp8", "weight_block_size": list(block)}
    tensors = {"m.weight": codes.view(torch.float8_e4m3fn), f"m.{suffix}": scale}
    weight = read_weight(stored(tmp_path, tensors, quantization_config=quantization), "m", CPU)
    numbers = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)[codes.long()]
    in_row, in_column = (torch.arange(n) // b for n, b in zip(shape, block, strict=True))
    assert weight.dtype == torch.float32
    assert torch.equal(weight, (numbers * scale.double()[in_row][:, in_column]).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_with_a_scale_per_row(dtype: torch.dtype, tmp_path: Path) -> None:
    codes = torch.randn(96, 160, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scale = torch.rand(96, 1, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = read_weight(stored(tmp_path, {"m.weight": codes, "m.weight_scale": scale}), "m", CPU)
    assert torch.equal(weight, torch.stack([row.float() * s.float() for row, s in zip(codes, scale, strict=True)]))


@pytest.mark.parametrize(
    ("config", "block"),
    [
        ({}, (128, 128)),
        ({"quantization_config": {"weight_block_size": None}}, (128, 128)),
        ({"quantization_config": {"weight_block_size": [64, 32]}}, (64, 32)),
    ],
)
def test_block_sizes(config: dict[str, Any], block: tuple[int, int]) -> None:
    assert declared_block(config, "config.json") == block


@pytest.mark.parametrize("declared", [[0, 1], [1], [-1, 1], [True, 1], [1.0, 1], "ab", {"a": 1}])
def test_wrong_block_sizes(declared: object) -> None:
    with pytest.raises(CheckpointError, match=r"config.json: quantization_config.weight_block_size is .* are needed"):
        declared_block({"quantization_config": {"weight_block_size": declared}}, "config.json")
    with pytest.raises(CheckpointError, match=r"^config.json: quantization_config is .*; an object is needed$"):
        declared_block({"quantization_config": [declared]}, "config.json")


def packed_tensors(bits: int, rows: int = 6, columns: int = 128, group: int = 32) -> dict[str, torch.Tensor]:
    """A weight as compressed-tensors' own compressor writes it."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    generator = torch.Generator().manual_seed(bits)
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (rows, columns), generator=generator).to(torch.int8)
    return {
        "m.weight_packed": pack_to_int32(codes, bits),
        "m.weight_scale": torch.rand(rows, columns // group, generator=generator).add(0.01).bfloat16(),
        "m.weight_shape": torch.tensor([rows, columns]),
    }


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_are_what_compressed_tensors_decompresses(bits: int, group: int, tmp_path: Path) -> None:
    """Oracle: the library's PackedQuantizationCompressor."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    tensors = packed_tensors(bits, group=group)
    weight = read_weight(stored(tmp_path, tensors), "m", CPU)
    arguments = QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy="group", group_size=group)
    state = {name.removeprefix("m."): tensor for name, tensor in tensors.items()}
    state["weight_scale"] = state["weight_scale"].float()
    library = PackedQuantizationCompressor.decompress(state, QuantizationScheme(targets=["Linear"], weights=arguments))[
        "weight"
    ]
    assert weight.dtype == torch.float32
    assert torch.equal(weight, library)


def poisoned(dtype: torch.dtype, value: float) -> torch.Tensor:
    weight = torch.ones(128, 128)
    weight[3, 4] = value
    return weight.to(dtype)


FP8 = torch.float8_e4m3fn
ONE = torch.ones(1, 1)
BROKEN = {
    "weight missing": {"n.weight": torch.ones(2, 2)},
    "scale missing": {"m.weight": poisoned(FP8, 1)},
    "scale of another shape": {"m.weight": poisoned(FP8, 1), "m.weight_scale_inv": torch.ones(2, 1)},
    "scale without blocks": {"m.weight": poisoned(FP8, 1), "m.weight_scale_inv": torch.ones(())},
    "NaN in FP8": {"m.weight": poisoned(FP8, float("nan")), "m.weight_scale_inv": ONE},
    "NaN in a scale": {"m.weight": poisoned(FP8, 1), "m.weight_scale_inv": ONE * float("nan")},
    "infinite scale": {"m.weight": poisoned(FP8, 1), "m.weight_scale_inv": ONE * float("inf")},
    "product that overflows": {"m.weight": poisoned(FP8, 448), "m.weight_scale_inv": ONE * 1e37},
    "NaN in a plain weight": {"m.weight": poisoned(torch.bfloat16, float("nan"))},
    "infinity in a plain weight": {"m.weight": poisoned(torch.float32, float("inf"))},
    "integers": {"m.weight": torch.ones(4, 4, dtype=torch.int8)},
    "another FP8": {"m.weight": poisoned(torch.float8_e5m2, 1)},
    "FP8 of one dimension": {"m.weight": torch.ones(128).to(FP8), "m.weight_scale_inv": ONE},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_weight_is_a_checkpoint_error(name: str, tmp_path: Path) -> None:
    """One line that names the module; never another exception, and never wrong numbers."""
    with pytest.raises(CheckpointError) as caught:
        read_weight(stored(tmp_path, BROKEN[name]), "m", CPU)
    assert "\n" not in str(caught.value)
    assert "m." in str(caught.value)


BROKEN_PACKED: dict[str, dict[str, torch.Tensor | None]] = {
    "no scale": {"weight_scale": None},
    "no shape": {"weight_shape": None},
    "shape of other rows": {"weight_shape": torch.tensor([7, 128])},
    "shape of other columns": {"weight_shape": torch.tensor([6, 100])},
    "shape of zero columns": {"weight_shape": torch.tensor([6, 0])},
    "shape that means 1 bit": {"weight_shape": torch.tensor([6, 512])},
    "shape of three numbers": {"weight_shape": torch.tensor([6, 128, 1])},
    "scale of other rows": {"weight_scale": torch.ones(5, 4).bfloat16()},
    "groups that do not divide": {"weight_scale": torch.ones(6, 5).bfloat16()},
    "scale of one dimension": {"weight_scale": torch.ones(6).bfloat16()},
    "NaN in a scale": {"weight_scale": torch.full((6, 4), float("nan")).bfloat16()},
    "words of one dimension": {"weight_packed": torch.zeros(96, dtype=torch.int32)},
    "words of another dtype": {"weight_packed": torch.zeros(6, 16, dtype=torch.int64)},
    "zero points": {"weight_zero_point": torch.zeros(1, 4, dtype=torch.int32)},
    "groups in another order": {"weight_g_idx": torch.zeros(128, dtype=torch.int32)},
}


@pytest.mark.parametrize("name", BROKEN_PACKED)
def test_a_broken_packed_weight_is_a_checkpoint_error(name: str, tmp_path: Path) -> None:
    """As above, for packed weights."""
    tensors = packed_tensors(4)
    for suffix, tensor in BROKEN_PACKED[name].items():
        tensors.pop(f"m.{suffix}", None)
        if tensor is not None:
            tensors[f"m.{suffix}"] = tensor
    with pytest.raises(CheckpointError) as caught:
        read_weight(stored(tmp_path, tensors), "m", CPU)
    assert "\n" not in str(caught.value)


BROKEN_NVFP4: dict[str, dict[str, torch.Tensor | None]] = {
    "no scale": {"weight_scale": None},
    "no scale of the matrix": {"weight_global_scale": None},
    "MXFP4's scales": {"weight_scale": torch.ones(6, 4, dtype=torch.uint8)},
    "scales of another dtype": {"weight_scale": torch.ones(6, 8).bfloat16()},
    "groups of 32": {"weight_scale": torch.ones(6, 4).to(torch.float8_e4m3fn)},
    "scale of other rows": {"weight_scale": torch.ones(5, 8).to(torch.float8_e4m3fn)},
    "a scale for each row": {"weight_global_scale": torch.ones(6)},
    "codes of one dimension": {"weight_packed": torch.zeros(384, dtype=torch.uint8)},
    "a matrix divided by zero": {"weight_global_scale": torch.zeros(1)},
}


@pytest.mark.parametrize("name", BROKEN_NVFP4)
def test_a_broken_nvfp4_weight_is_a_checkpoint_error(name: str, tmp_path: Path) -> None:
    tensors = {
        "m.weight_packed": torch.full((6, 64), 0x31, dtype=torch.uint8),
        "m.weight_scale": torch.full((6, 8), 2.0).to(torch.float8_e4m3fn),
        "m.weight_global_scale": torch.full((1,), 4.0),
    }
    whole = read_weight(stored(tmp_path / "whole", tensors), "m", CPU)
    assert torch.equal(whole, torch.tensor([0.25, 0.75]).repeat(6, 64))  # the even column in the low half of a byte
    for suffix, tensor in BROKEN_NVFP4[name].items():
        tensors.pop(f"m.{suffix}")
        if tensor is not None:
            tensors[f"m.{suffix}"] = tensor
    with pytest.raises(CheckpointError) as caught:
        read_weight(stored(tmp_path, tensors), "m", CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["post_attention_layernorm.weight", "block_sparse_moe.gate.weight"])
def test_a_layer_with_a_nan_is_refused(name: str, tmp_path: Path) -> None:
    """The message names the tensor."""
    config = tiny.config()
    source = tiny.tensors(config)
    source[f"model.layers.0.{name}"].view(-1)[5] = float("nan")
    checkpoint = open_folder(tiny.write(tmp_path / "model", config, source))
    facts = architecture_for(checkpoint.config, "config.json")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        layer_weights(checkpoint, facts, 0, CPU, torch.float32)
    assert layer_weights(checkpoint, facts, 1, CPU, torch.float32)
