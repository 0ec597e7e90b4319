"""Packed integers: compressed-tensors packs and unpacks the same, matrix by matrix."""

from __future__ import annotations

import math

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given
from hypothesis import strategies as st

from quantizers.formats.packed_integers import pack, unpack

WIDTHS = (2, 3, 4, 5, 6, 8)


def codes_of(shape: tuple[int, ...], bits: int, seed: int = 0) -> torch.Tensor:
    half = 2 ** (bits - 1)
    return torch.randint(-half, half, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)


@given(
    leading=st.lists(st.integers(0, 3), max_size=3),
    rows=st.integers(1, 5),
    words=st.integers(1, 9),
    bits=st.sampled_from(WIDTHS),
    seed=st.integers(0, 99),
)
def test_any_number_of_matrices_is_packed_and_unpacked_as_the_library_does(
    leading: list[int], rows: int, words: int, bits: int, seed: int
) -> None:
    words *= bits // math.gcd(bits, 32)  # an odd number of words is whole with some bits only
    codes = codes_of((*leading, rows, words * 32 // bits), bits, seed)
    packed = pack(codes, bits)
    assert packed.shape == (*leading, rows, words)
    assert packed.dtype == torch.int32
    for own, found in zip(codes.view(-1, rows, codes.shape[-1]), packed.view(-1, rows, words), strict=True):
        assert torch.equal(found, pack_to_int32(own, bits))
        assert torch.equal(unpack(found, bits, tuple(own.shape)), unpack_from_int32(found, bits, own.shape))
    assert torch.equal(unpack(packed, bits, tuple(codes.shape)), codes)


@pytest.mark.on_device
@pytest.mark.parametrize("bits", WIDTHS)
def test_memory_in_another_order_makes_no_difference(bits: int, device: torch.device) -> None:
    codes = codes_of((64, 6, 2), bits).to(device).mT.transpose(0, 2)
    assert not codes.is_contiguous()
    packed = pack(codes, bits)
    assert torch.equal(packed.cpu(), pack(codes.cpu().contiguous(), bits))
    strided = packed.repeat_interleave(2, 0)[::2]
    assert torch.equal(unpack(strided, bits, tuple(codes.shape)), codes)
