"""MXFP8, MXFP4, ModelOpt's NVFP4 and FP8 blocks with E8M0 scales, against their bits and the libraries' own readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from low_bits import BLOCKS, LAYOUTS, NUMBERS, POWERS, numbers

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for
from quantizers.checkpoint.loaded_tensors import load_tensors
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.formats import e8m0
from quantizers.formats.dequantization import read_weight, stored_matrix
from quantizers.formats.format import QuantizedFormat, StoredMatrix
from quantizers.formats.stored_matrices import quantized_matrices
from quantizers.formats.tensor_names import published_names
from quantizers.system.errors import CheckpointError

CPU = torch.device("cpu")
SHAPE = (160, 256)


def opened(folder: Path, parts: dict[str, torch.Tensor], **config: Any) -> Checkpoint:
    tensors = {f"m.{last}": part for last, part in parts.items()}
    return open_folder(tiny.write(folder / "checkpoint", tiny.config(**config), tensors))


def made(layout: str, where: str = "experts") -> dict[str, torch.Tensor]:
    """A matrix of some size in each group; with every byte among the codes of FP8."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(SHAPE, generator=generator) * torch.exp2(torch.randint(-20, 20, (160, 1), generator=generator))
    return getattr(LAYOUTS[layout], where)(weight)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_by_its_bits(layout: str, tmp_path: Path) -> None:
    for where in ("experts", "others"):
        parts = made(layout, where)
        weight = read_weight(opened(tmp_path / where, parts, **LAYOUTS[layout].config), "m", CPU)
        assert weight.dtype == torch.float32
        assert torch.equal(weight, numbers(parts))


def test_every_scale_times_every_code_is_exact() -> None:
    """E8M0's 255 powers of two, the denormal 2^-127 among them."""
    scale = torch.arange(256, dtype=torch.uint8)
    for stored in (scale, scale.view(torch.float8_e8m0fnu)):
        assert torch.equal(e8m0.numbers(stored)[:255].double(), POWERS[:255])
        assert bool(e8m0.numbers(stored)[255].isnan())
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    products = codes[:, None] * e8m0.numbers(scale)[None, :255]
    exact = NUMBERS[:, None] * POWERS[None, :255]
    fits = (exact.abs() < 2.0**128).logical_and(~exact.isnan())
    assert torch.equal(products[fits].double(), exact[fits])
    assert not bool(torch.isfinite(products[~fits]).any())


def library(name: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """A weight by compressed-tensors' decompressor of a format, in bfloat16."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    group = LAYOUTS[name].config["quantization_config"]["config_groups"]["group_0"]
    scheme = QuantizationScheme.model_validate(group)
    return BaseCompressor.get_value_from_registry(scheme.format).decompress(parts, scheme)["weight"]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name.endswith("compressed-tensors")])
def test_weights_are_what_compressed_tensors_decompresses(name: str, tmp_path: Path) -> None:
    """All its numbers are bfloat16 exactly."""
    parts = made(name)
    weight = read_weight(opened(tmp_path, parts, **LAYOUTS[name].config), "m", CPU)
    assert torch.equal(weight, library(name, parts).float())


@pytest.mark.parametrize("layout", ["MXFP8 of MiniMax", "E8M0 blocks", "MXFP4 of DeepSeek"])
def test_weights_are_what_transformers_dequantizes(layout: str, tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    for where in ("experts", "others"):
        parts = {last: part[: 128 if last == "weight" else None] for last, part in made(layout, where).items()}
        codes, scale = parts.values()
        parts[[*parts][1]] = scale = scale[:1] if scale.shape[1] == 2 else scale[:128]  # whole blocks alone
        weight = read_weight(opened(tmp_path / where, parts, **LAYOUTS[layout].config), "m", CPU)
        assert torch.equal(weight, Fp8Dequantize(None)._dequantize_one(codes, scale, output_dtype=torch.float32))


def test_modelopts_nvfp4_is_near_compressed_tensors_nvfp4(tmp_path: Path) -> None:
    """compressed-tensors' converter inverts the scale of the matrix, and an inverse is rounded."""
    from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter

    parts = made("NVFP4 of ModelOpt")
    converted = ModelOptNvfp4Converter(targets=["re:.*"]).process({f"m.{last}": t for last, t in parts.items()})
    renamed = {name.removeprefix("m."): t.reshape(1) if not t.dim() else t for name, t in converted.items()}
    ours = read_weight(opened(tmp_path / "ours", parts), "m", CPU)
    theirs = read_weight(opened(tmp_path / "theirs", renamed), "m", CPU)
    torch.testing.assert_close(ours, theirs, rtol=3e-7, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_read_apart(layout: str, tmp_path: Path) -> None:
    """As the experts of a layer are, a band of rows at a time."""
    parts = made(layout, "others")
    checkpoint = opened(tmp_path, parts, **LAYOUTS[layout].config)
    matrix = stored_matrix(checkpoint, "m")
    assert isinstance(matrix, StoredMatrix)
    tensors = [checkpoint.tensor(f"m.{last}") for last in matrix.parts]
    bands = [matrix.numbers(matrix.band(tensors, first, last)) for first, last in ((0, 128), (128, 160))]
    assert torch.equal(torch.cat(bands), numbers(parts))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_headers_alone_say_how_a_matrix_is_stored(layout: str, tmp_path: Path) -> None:
    """For a plan: every tensor of the module, and for what compressed-tensors knows the bytes and its config group."""
    parts = made(layout)
    checkpoint = opened(tmp_path, parts, **LAYOUTS[layout].config)
    headers = {name: Spec(info.dtype, info.shape) for name, info in checkpoint.tensors.items()}
    stored = quantized_matrices(headers, checkpoint.config, "here").get("m")
    if stored is None:  # FP8 in blocks
        assert layout == "E8M0 blocks"
        return
    assert {*stored.parts} == {*parts}
    assert stored.shape == SHAPE
    sizes = [checkpoint.tensors[f"m.{last}"].size for last in stored.parts]
    specs = [spec for _, spec in stored.form.parts(SHAPE)]
    assert [spec.bytes for spec in specs] == sizes
    if isinstance(stored.form, QuantizedFormat):
        group = stored.form.config_group()
        assert type(stored.form).of_config_group(group["weights"], group["input_activations"]) is not None


# All experts of a layer in one tensor ------------------------------------------------------------------


def fused_experts(folder: Path, **change: torch.Tensor | None) -> tuple[Checkpoint, Architecture]:
    """A layer of a family's experts as gpt-oss stores them, transposed by its class, gate and up in turns."""
    config = families.config("qwen3_moe", num_hidden_layers=1, quantization_config={"quant_method": "mxfp4"})
    facts = architecture_for(config, "config.json")
    turns = facts.modules.model_copy(update={"transposed": True, "interleaved": True})
    facts = facts.model_copy(update={"modules": turns})
    generator, (count, width, hidden) = torch.Generator().manual_seed(3), (8, 192, 256)
    tensors: dict[str, torch.Tensor] = {}
    for name, rows, columns in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        shape = (count, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator).to(torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(100, 140, shape, generator=generator).to(torch.uint8)
    tensors = {name: t for name, t in (tensors | change).items() if t is not None}
    tensors = {f"model.layers.0.mlp.experts.{name}": t for name, t in tensors.items()}
    return open_folder(tiny.write(folder / "model", config, tensors)), facts


def test_experts_of_gpt_oss_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    checkpoint, facts = fused_experts(tmp_path)
    split = published_names(checkpoint, facts)
    loaded = load_tensors(split, [name for name in split.tensors if ".experts.3." in name])
    raw = {name.rpartition(".")[2]: checkpoint.tensor(name) for name in checkpoint.tensors}
    for parameter, matrices in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        blocks, scales = (raw[f"{parameter}_{last}"] for last in ("blocks", "scales"))
        theirs = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # (E, C, R)
        for number, matrix in enumerate(matrices):
            wanted = theirs[3][:, number :: len(matrices)].mT
            for files in (split, loaded, loaded.to(CPU)):
                assert torch.equal(read_weight(files, f"model.layers.0.mlp.experts.3.{matrix}", CPU), wanted)


WRONG_EXPERTS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "no scales": ({"gate_up_proj_scales": None}, "experts.0.gate_proj.weight: U8 [192, 128] without weight_scale is"),
    "no blocks": ({"down_proj_blocks": None}, "experts.0.down_proj.weight is missing"),
    "scales of other groups": (
        {"down_proj_scales": torch.zeros(8, 256, 3, dtype=torch.uint8)}, "only U8 [8, 256, 6] in a layer with experts",
    ),
    "blocks of bytes alone": (
        {"down_proj_blocks": torch.zeros(8, 256, 96, dtype=torch.uint8)}, "only U8 [8, 256, 6, 16] in a layer with",
    ),
    "a NaN": (
        {"down_proj_scales": torch.full((8, 256, 6), 255, dtype=torch.uint8)}, "down_proj.weight_scale holds a NaN",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_EXPERTS)
def test_broken_experts_of_gpt_oss_are_one_line(name: str, tmp_path: Path) -> None:
    change, said = WRONG_EXPERTS[name]

    def read() -> None:
        split = published_names(*fused_experts(tmp_path, **change))
        for matrix in ("gate_proj", "down_proj"):
            read_weight(split, f"model.layers.0.mlp.experts.0.{matrix}", CPU)

    with pytest.raises(CheckpointError) as caught:
        read()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# Broken ----------------------------------------------------------------------------------------------


def byte(*shape: int, value: int = 120) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.uint8)


def fp8(*shape: int, value: float = 1.0) -> torch.Tensor:
    return torch.full(shape, value).to(torch.float8_e4m3fn)


E8M0 = torch.float8_e8m0fnu
BROKEN: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "a NaN in MXFP8's scale": (
        {"weight": fp8(4, 64), "weight_scale": byte(4, 2, value=255)}, "m.weight_scale holds a NaN (E8M0's byte 255)",
    ),
    "a NaN in MXFP4's scale": (
        {"weight": byte(4, 32).view(torch.int8), "scale": byte(4, 2, value=255).view(E8M0)}, "m.scale holds a NaN",
    ),
    "a NaN in a block's scale": (
        {"weight": fp8(4, 64), "weight_scale_inv": byte(1, 1, value=255)}, "m.weight_scale_inv holds a NaN",
    ),
    "a product that overflows": (
        {"weight": fp8(4, 64, value=4.0), "weight_scale": byte(4, 2, value=254)},
        "m.weight or its scale holds a NaN or inf",
    ),
    "MXFP8 of 48 columns": ({"weight": fp8(4, 48), "weight_scale": byte(4, 1)}, "MXFP8 needs one for every 32 of its"),
    "MXFP8 of 48 columns in 2": ({"weight": fp8(4, 48), "weight_scale": byte(4, 2)}, "MXFP8 needs one for every 32"),
    "MXFP8 with scales of 16": ({"weight": fp8(4, 64), "weight_scale_inv": byte(4, 4)}, "blocks of [128, 128] needs"),
    "MXFP8 with scales of other rows": ({"weight": fp8(4, 64), "weight_scale": byte(3, 2)}, "has shape [3, 2]"),
    "MXFP8 without scales": ({"weight": fp8(4, 64)}, "is FP8 but has no weight_scale_inv"),
    "a scale in integers": ({"weight": fp8(4, 64), "scale": torch.ones(1, 1, dtype=torch.int32)}, "m.scale is I32"),
    "MXFP4 of an odd half": ({"weight_packed": byte(4, 20), "weight_scale": byte(4, 1)}, "no MXFP4 weight"),
    "MXFP4 with scales of 16": ({"weight_packed": byte(4, 32), "weight_scale": byte(4, 4)}, "no MXFP4 weight"),
    "MXFP4 with a scale of the matrix": (
        {"weight_packed": byte(4, 32), "weight_scale": byte(4, 2), "weight_global_scale": torch.ones(1)},
        "no MXFP4 weight",
    ),
    "MXFP4 without scales": ({"weight_packed": byte(4, 32)}, "m.weight_scale is missing"),
    "DeepSeek's MXFP4 without scales": ({"weight": byte(4, 32).view(torch.int8)}, "without weight_scale is no weight"),
    "MXFP4 of one dimension": ({"weight_packed": byte(128), "weight_scale": byte(8)}, "no MXFP4 weight"),
    "NVFP4 without the scale of the matrix": (
        {"weight": byte(4, 32), "weight_scale": fp8(4, 4)}, "m.weight_scale_2 is missing",
    ),
    "NVFP4 without scales of groups": (
        {"weight": byte(4, 32), "weight_scale_2": torch.tensor(1.0)}, "m.weight_scale is missing",
    ),
    "NVFP4 with a scale per row": (
        {"weight": byte(4, 32), "weight_scale": fp8(4, 4), "weight_scale_2": torch.ones(4)}, "are no NVFP4 weight",
    ),
    "NVFP4 in groups of 32": (
        {"weight": byte(4, 32), "weight_scale": fp8(4, 2), "weight_scale_2": torch.tensor(1.0)}, "are no NVFP4 weight",
    ),
    "NVFP4 with an infinite scale": (
        {"weight": byte(4, 32), "weight_scale": fp8(4, 4), "weight_scale_2": torch.tensor(float("inf"))},
        "m.weight or its scale holds a NaN or inf",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_weight_is_one_line_that_names_the_tensor(name: str, tmp_path: Path) -> None:
    parts, said = BROKEN[name]
    with pytest.raises(CheckpointError) as caught:
        read_weight(opened(tmp_path, parts, quantization_config=BLOCKS), "m", CPU)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
