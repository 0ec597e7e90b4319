"""Packed integers: INT2 to INT8 with a scale per group, in compressed-tensors' `pack-quantized` layout.

A row is a stream of bits, its integers one after another, each from its lowest bit on and plus 2^(bits-1), so that it
is not negative; an int32 holds 32 bits of that stream. On a little-endian machine these are the bytes in order, and
every few integers fill whole bytes: two one byte with 4 bits, eight three bytes with 3. So nothing here is wider than
8 bits. (compressed-tensors before 0.18 packed 3, 5 and 6 bits otherwise, 32 // bits integers to an int32.)

Legend: R rows (outputs), C columns (inputs), g group size, n = C / g groups, … any leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch


def pack(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers (…, R, C) int8 of 2 to 8 bits into int32 (…, R, C * bits / 32); C * bits is a multiple of 32."""
    half, few = 1 << (bits - 1), 8 // math.gcd(bits, 8)
    raw = (integers.contiguous().view(torch.uint8) + half) & (2 * half - 1)  # modulo 256, as int8 is
    raw = raw.view(*raw.shape[:-1], raw.shape[-1] // few, few)
    packed = raw.new_zeros(*raw.shape[:-1], few * bits // 8)
    for i, byte, shift in _places(bits):
        part = packed[..., byte]
        part |= raw[..., i] << shift if shift >= 0 else raw[..., i] >> -shift  # what exceeds 8 bits falls off
    return packed.flatten(-2).view(torch.int32)


def unpack(packed: torch.Tensor, bits: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Unpack int32 (…, R, C * bits / 32) to integers int8 of the given shape (…, R, C)."""
    half, few = 1 << (bits - 1), 8 // math.gcd(bits, 8)
    raw = packed.contiguous().view(torch.uint8)
    raw = raw.view(*raw.shape[:-1], shape[-1] // few, few * bits // 8)
    integers = raw.new_zeros(*raw.shape[:-1], few)
    for i, byte, shift in _places(bits):
        part = integers[..., i]
        part |= raw[..., byte] >> shift if shift >= 0 else raw[..., byte] << -shift
    return integers.bitwise_and_(2 * half - 1).sub_(half).view(torch.int8).view(shape)


def _places(bits: int) -> Iterator[tuple[int, int, int]]:
    """Of the integers that fill whole bytes: the integer, a byte that has some of its bits, and its shift there."""
    few = 8 // math.gcd(bits, 8)
    for i in range(few):
        first, last = i * bits // 8, ((i + 1) * bits - 1) // 8
        yield from ((i, byte, i * bits - byte * 8) for byte in range(first, last + 1))


def code_range(bits: int) -> tuple[int, int]:
    """Smallest and largest value of a symmetric signed integer of `bits` bits."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def grouped(weight: torch.Tensor, group: int) -> torch.Tensor:
    """View (…, R, C) as (…, R, n, g)."""
    return weight.view(*weight.shape[:-1], -1, group)


def dequantize(integers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """integer * scale in float32: (…, R, C) from integers (…, R, C), int8 or float32, and scales (…, R, n)."""
    view = grouped(integers, integers.shape[-1] // scale.shape[-1])
    return (view * scale.float().unsqueeze(-1)).flatten(-2)
