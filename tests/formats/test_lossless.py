"""Lossless conversion: the values that each format holds, by slow references, and what the library reads of them."""

from __future__ import annotations

import exact
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from low_bits import numbers
from torch import Tensor
from whole_models import fp8_by_the_library, nvfp4_by_the_library

from quantizers.formats.format import QuantizedFormat
from quantizers.formats.lossless import TARGETS, Difference, difference, encoded, first_difference, holding

ALL = list(TARGETS)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scheme_of(form: QuantizedFormat) -> QuantizationScheme:
    return QuantizationScheme.model_validate({"targets": ["Linear"]} | form.config_group())


def by_another_reader(name: str, parts: dict[str, Tensor]) -> Tensor:
    """The numbers of a target's tensors: compressed-tensors' own, or those of tests/low_bits.py."""
    form = TARGETS[name].form
    if name == "bf16":
        return parts["weight"].float()
    assert isinstance(form, QuantizedFormat)
    if name == "fp8-block":
        return fp8_by_the_library(parts["weight"], parts["weight_scale"], [128, 128])
    if name == "nvfp4":
        return nvfp4_by_the_library(parts, scheme_of(form))
    compressor = BaseCompressor.get_value_from_registry(form.config_group()["format"])
    library = compressor.decompress(dict(parts), scheme_of(form))["weight"]
    ours = numbers(parts)
    assert torch.equal(library.float(), ours)  # whose decompressor answers in bfloat16, which holds these
    return ours


@pytest.mark.parametrize("name", ALL)
def test_every_value_comes_back_by_another_reader(name: str) -> None:
    weights = [exact.matrix(256, 384, generator(seed)) for seed in (1, 2)]
    weights[0][:128, :128] = 0
    form = TARGETS[name].form
    for weight, parts in zip(weights, encoded(form, weights), strict=True):
        assert first_difference(form, parts, weight) is None
        assert torch.equal(by_another_reader(name, parts), weight)
        specs = {last: (spec.dtype, spec.shape) for last, spec in form.parts((256, 384))}
        assert {last: tuple(tensor.shape) for last, tensor in parts.items()} == {n: s for n, (_, s) in specs.items()}


def test_gate_and_up_share_the_scale_of_the_whole_matrix() -> None:
    small, large = exact.matrix(128, 128, generator(1), (-12, -10)), exact.matrix(128, 128, generator(2), (-3, -2))
    form = TARGETS["nvfp4"].form
    together, alone = encoded(form, [small, large]), encoded(form, [small])
    assert torch.equal(together[0]["weight_global_scale"], together[1]["weight_global_scale"])
    assert not torch.equal(together[0]["weight_global_scale"], alone[0]["weight_global_scale"])
    for parts, weight in zip(together, (small, large), strict=True):
        assert torch.equal(by_another_reader("nvfp4", parts), weight)


def fits_in_nvfp4(weight: Tensor) -> bool:
    """Slow reference: whether some power of two gives each group a scale in E4M3 with which its values are in E2M1."""
    scales = [s for s in torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist() if s > 0]
    values = {sign * value for value in exact.VALUES.tolist() for sign in (1, -1)}
    rows = [set(group.tolist()) for group in weight.double().view(-1, 16)]
    for power in range(-30, 31):
        held = [{value * scale * 2.0**power for value in values} for scale in scales]
        if all(any(group <= numbers for numbers in held) for group in rows):
            return True
    return False


@pytest.mark.parametrize(
    ("powers", "fits"),
    [((-9, 8), True), ((-9, 9), False), ((-3, 14), True), ((-28, -11), True)],
)
def test_nvfp4_holds_eighteen_powers_of_two(powers: tuple[int, int], fits: bool) -> None:
    """E4M3's powers of two from 2^-9 to 2^8, as the scales of groups that need both 6 and a half."""
    weight = torch.tensor([[0.5, 6.0] * 8] * 2)
    weight[0] *= 2.0 ** powers[0]
    weight[1] *= 2.0 ** powers[1]
    assert fits_in_nvfp4(weight) is fits
    assert ("nvfp4" in holding([weight])) is fits


@pytest.mark.parametrize(
    ("small", "fits"),
    [([0.5], False), ([0.5, 1.0, 3.0], False), ([1.0, 3.0], True), ([4.0], True), ([2.0, 6.0], True), ([0.25], False)],
)
def test_codes_are_halved_where_a_scale_is_too_small(small: list[float], fits: bool) -> None:
    """A group below the eighteen powers, of whose values some scales are larger than the smallest."""
    weight = torch.zeros(2, 16)
    weight[0] = torch.tensor([0.5, 6.0] * 8) * 2.0**8
    weight[1, : len(small)] = torch.tensor(small) * 2.0**-10
    assert fits_in_nvfp4(weight) is fits
    assert ("nvfp4" in holding([weight])) is fits


def test_a_scale_of_four_bits_is_found() -> None:
    """NVFP4's own scales have eight mantissas, and a group's largest value may be any of E2M1's."""
    codes = exact.VALUES[torch.randint(1, 8, (64, 16), generator=generator(3))]
    codes[:8] = exact.VALUES[1:, None].repeat(2, 16)[:8]
    scale = (torch.rand(64, 1, generator=generator(4)) * 400 + 8).to(torch.float8_e4m3fn).float() / 1024
    weight = codes * scale
    (parts,) = encoded(TARGETS["nvfp4"].form, [weight])
    assert torch.equal(by_another_reader("nvfp4", parts), weight)


@pytest.mark.parametrize(
    ("value", "held"),
    [
        (1.125, ["bf16", "fp8-block", "nvfp4"]),
        (1.0625, ["bf16"]),
        (1.001, []),
        (1.5, ALL),
        (1.5 * 2.0**-9, ["bf16", "mxfp4", "nvfp4"]),
    ],
)
def test_formats_that_hold_a_value_beside_another(value: float, held: list[str]) -> None:
    """Alone in its group, in a block with 256."""
    weight = torch.zeros(128, 128)
    weight[0, 0], weight[5, 64] = 256.0, value
    assert holding([weight]) == held


def test_a_block_of_fp8_holds_codes_that_are_subnormal() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()]
    weight = torch.zeros(128, 128)
    weight.view(-1)[: len(codes)] = codes * 2.0**-20
    (parts,) = encoded(TARGETS["fp8-block"].form, [weight])
    assert torch.equal(by_another_reader("fp8-block", parts), weight)
    weight[100, 7] = 2.0**-30
    (parts,) = encoded(TARGETS["fp8-block"].form, [weight])
    assert first_difference(TARGETS["fp8-block"].form, parts, weight) == Difference(100, 7, 2.0**-30, 0.0)


def test_the_first_difference_is_the_first_by_rows() -> None:
    weight = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    assert difference(torch.tensor([[1.0, -0.0], [3.0, 4.0]]), weight) is None
    assert difference(torch.tensor([[1.0, 0.0], [5.0, 6.0]]), weight) == Difference(1, 0, 3.0, 5.0)
    assert difference(torch.tensor([[1.0, torch.nan], [3.0, 4.0]]), weight) is not None
