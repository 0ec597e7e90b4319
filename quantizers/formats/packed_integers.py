"""Packed integers: INT4 and INT8 with a scale per group, in compressed-tensors' `pack-quantized` layout.

An int32 holds 32 / bits neighbouring integers of a row, the first in its lowest bits, each plus 2^(bits-1) so that it
is not negative. On a little-endian machine a row is therefore its bytes in order: one integer a byte with 8 bits, two
with 4, the even column in the low half. So nothing here is wider than 8 bits, and no value is looked at.

Legend: R rows (outputs), C columns (inputs), g group size, n = C / g groups, … any leading dimensions.
"""

from __future__ import annotations

import torch

# Adding 2^(bits-1) modulo 2^bits flips the sign bit: of a byte's one integer, or of both its halves.
SIGN_BITS = {4: 0x88, 8: 0x80}


def pack(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers (…, R, C) int8 of 4 or 8 bits into int32 (…, R, C * bits / 32); C * bits is a multiple of 32."""
    raw = integers.contiguous().view(torch.uint8)
    if bits == 8:
        return (raw ^ SIGN_BITS[bits]).view(torch.int32)
    packed = raw[..., 1::2] << 4
    packed |= raw[..., ::2] & 0xF
    packed ^= SIGN_BITS[bits]
    return packed.view(torch.int32)


def unpack(packed: torch.Tensor, bits: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Unpack int32 (…, R, C * bits / 32) to integers int8 of the given shape (…, R, C)."""
    raw = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return (raw ^ SIGN_BITS[bits]).view(torch.int8)
    integers = torch.empty(shape, dtype=torch.uint8, device=packed.device)
    integers[..., ::2] = raw & 0xF
    integers[..., 1::2] = raw >> 4
    integers -= 8  # modulo 256, which is what the bits of a negative int8 are
    return integers.view(torch.int8)


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
