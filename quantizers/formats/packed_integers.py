"""Codes as 32-bit words, and back, in the layout of compressed-tensors' `pack-quantized` format.

A word holds 32 / bits neighbouring codes of a row, the first in its lowest bits, each plus 2^(bits-1) so that it is
not negative. On a machine that stores the lowest byte first, a row of words is therefore the row's bytes in order:
one code a byte with 8 bits, two with 4, the even column in the low half. So nothing here is wider than 8 bits, nothing
is scattered, and no value is looked at: all experts of a matrix are packed by the same few operations as one.

Legend: R rows, C columns, … any leading dimensions.
"""

from __future__ import annotations

import sys

import torch

# Adding 2^(bits-1) modulo 2^bits flips the sign bit: of a byte's one code, or of both its halves.
SIGN_BITS = {4: 0x88, 8: 0x80}


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes (…, R, C) int8 as words (…, R, C * bits / 32) int32.

    Args:
        codes: each in [-2^(bits-1), 2^(bits-1) - 1].
        bits: 4 or 8.

    Raises:
        ValueError: another width, or a row that does not fill its words.
    """
    _require_whole_words(codes.shape[-1], bits)
    raw = codes.contiguous().view(torch.uint8)
    if bits == 8:
        return (raw ^ SIGN_BITS[bits]).view(torch.int32)
    packed = raw[..., 1::2] << 4
    packed |= raw[..., ::2] & 0xF
    packed ^= SIGN_BITS[bits]
    return packed.view(torch.int32)


def unpack(packed: torch.Tensor, bits: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Words (…, R, C * bits / 32) int32 as codes int8 of the given shape (…, R, C).

    Raises:
        ValueError: as `pack`, or the shape is another than that of the words.
    """
    _require_whole_words(shape[-1], bits)
    if tuple(packed.shape) != (*shape[:-1], shape[-1] * bits // 32):
        raise ValueError(f"words {list(packed.shape)} do not hold codes {list(shape)} of {bits} bits")
    raw = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return (raw ^ SIGN_BITS[bits]).view(torch.int8)
    codes = torch.empty(shape, dtype=torch.uint8, device=packed.device)
    codes[..., ::2] = raw & 0xF
    codes[..., 1::2] = raw >> 4
    codes -= 8  # modulo 256, which is what the bits of a negative int8 are
    return codes.view(torch.int8)


def _require_whole_words(columns: int, bits: int) -> None:
    if bits not in SIGN_BITS:
        raise ValueError(f"codes of {bits} bits cannot be packed, only of {' or '.join(map(str, SIGN_BITS))}")
    if columns % (32 // bits):
        raise ValueError(f"rows of {columns} codes of {bits} bits do not fill words of 32 bits")
    if sys.byteorder != "little":
        raise ValueError("words can only be packed on a machine that stores the lowest byte first")


def code_range(bits: int) -> tuple[int, int]:
    """Smallest and largest code of a symmetric signed integer of `bits` bits."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def grouped(weight: torch.Tensor, group: int) -> torch.Tensor:
    """View (…, R, C) as (…, R, n, g)."""
    return weight.view(*weight.shape[:-1], -1, group)


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """code * scale in float32: (…, R, C) from codes (…, R, C), int8 or float32, and scales (…, R, n)."""
    view = grouped(codes, codes.shape[-1] // scale.shape[-1])
    return (view * scale.float().unsqueeze(-1)).flatten(-2)
