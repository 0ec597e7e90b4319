"""Packed integers: INT2 to INT8 with a scale per group, in compressed-tensors' `pack-quantized` layout.

A row is a stream of bits, its integers one after another, each from its lowest bit on and plus 2^(bits-1), so that it
is not negative; an int32 holds 32 bits of that stream. On a little-endian machine these are the bytes in order, and
every few integers fill whole bytes: two one byte with 4 bits, eight three bytes with 3. So nothing here is wider than
8 bits. (compressed-tensors before 0.18 packed 3, 5 and 6 bits otherwise, 32 // bits integers to an int32.)

Legend: R rows (outputs), C columns (inputs), g group size, n = C / g groups, … any leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import Spec, TensorInfo
from quantizers.system.errors import CheckpointError

from .format import (
    BITS,
    GROUP_SIZE,
    INTEGERS,
    PACKED,
    SCALE,
    ExpertFormat,
    Grid,
    Parts,
    StoredMatrix,
    arguments,
    weight_schemes,
)

if TYPE_CHECKING:
    import torch

SHAPE = "weight_shape"
ZERO_POINT = "weight_zero_point"
GROUP_INDEX = "weight_g_idx"
SIZES, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)  # vLLM's Humming takes all of them, Marlin 4 and 8 bits
WHOLE = (PACKED, SCALE, SHAPE)  # the parts of a matrix of symmetric integers


@dataclass(frozen=True)
class Integers(ExpertFormat):
    """Symmetric integers of `bits` bits, with one bfloat16 scale for every `group_size` weights of a row."""

    bits: int
    group_size: int

    name: ClassVar[str] = INTEGERS
    kind: ClassVar[str] = "packed"
    description: ClassVar[str] = "packed integers"
    keys: ClassVar[frozenset[str]] = frozenset({BITS, GROUP_SIZE, "scales_sign", "budget"})
    activations: ClassVar[int] = 16

    @classmethod
    def of_keys(cls, keys: Mapping[str, Any]) -> Self:
        """The format with these bits and group size."""
        return cls(keys[BITS], keys[GROUP_SIZE])

    def __str__(self) -> str:
        return f"INT{self.bits} group {self.group_size}"

    @property
    def short(self) -> str:
        """Such as `INT4`."""
        return f"INT{self.bits}"

    @property
    def words(self) -> tuple[str, ...]:
        """Such as `INT4` and `groups of 32`."""
        return self.short, f"groups of {self.group_size}"

    @property
    def in_words(self) -> str:
        """Description of the storage format, for the model card."""
        return f"{self.short}, symmetric, one bfloat16 scale per {self.group_size} weights"

    @property
    def as_dict(self) -> dict[str, int | str]:
        """Bits and group size alone."""
        return {BITS: self.bits, GROUP_SIZE: self.group_size}

    @property
    def grid(self) -> Grid:
        """The bits of its integers."""
        return self.bits

    @property
    def coarse_scales(self) -> bool:
        """With 8 bits bfloat16's scales are off by 4 to 39 % of the codes' error."""
        return self.bits == 8

    @property
    def bits_per_weight(self) -> float:
        """Bits of a packed weight and its share of the scale: 4.5 for INT4 in groups of 32."""
        return self.bits + 16 / self.group_size

    def parts(self, shape: tuple[int, ...]) -> Parts:
        """Packed integers, scales, and R and C as numbers."""
        rows, columns = shape
        return (
            (PACKED, Spec("I32", (rows, math.ceil(columns * self.bits / 32)))),
            (SCALE, Spec("BF16", (rows, columns // self.group_size))),
            (SHAPE, Spec("I64", (2,))),
        )

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """The packed integers int32 (…, R, C · bits / 32)."""
        return pack(codes, self.bits)

    def unpack(self, parts: Sequence[torch.Tensor], columns: int) -> torch.Tensor:
        """The numbers (r, C) float32 of some rows."""
        packed, scale = parts
        return dequantize(unpack(packed, self.bits, (len(packed), columns)), scale)

    def config_group(self) -> dict[str, Any]:
        """Weights alone, in groups."""
        weights = arguments(self.bits, "int", "group", group_size=self.group_size)
        return {"format": "pack-quantized", "weights": weights, "input_activations": None}

    @classmethod
    def of_config_group(cls, weights: Mapping[str, Any], inputs: Any) -> Self | None:
        """The integers in groups that a config group declares, without quantized activations."""
        bits, group = weights.get("num_bits"), weights.get("group_size")
        if (weights.get("type"), weights.get("strategy")) != ("int", "group") or inputs:
            return None
        return cls(bits, group) if type(bits) is int and type(group) is int and group > 0 else None

    @classmethod
    def stored(cls, checkpoint: Checkpoint, module: str) -> StoredMatrix | None:
        """A matrix of packed integers; None for one with zero points, too."""
        if f"{module}.{PACKED}" not in checkpoint.tensors:
            return None
        infos, shape, bits = packed_parts(checkpoint, module)
        return (
            None if len(infos) > 2 else StoredMatrix(cls(bits, shape[1] // infos[1].shape[1]), (PACKED, SCALE), shape)
        )

    @classmethod
    def of_headers(cls, headers: Checkpoint, module: str) -> StoredMatrix | None:
        """As `stored`, without data: a config group declares bits and group size, and these give the columns."""
        packed, scale, shape = (headers.tensors.get(f"{module}.{last}") for last in WHOLE)
        others = any(f"{module}.{last}" in headers.tensors for last in (ZERO_POINT, GROUP_INDEX))
        if packed is None or scale is None or packed.dtype != "I32" or others:
            return None
        forms = [cls.of_config_group(weights, None) for weights in weight_schemes(headers.config)]
        for form in filter(None, forms) if len(packed.shape) == len(scale.shape) == 2 else ():
            columns = scale.shape[1] * form.group_size
            if packed.shape == (scale.shape[0], math.ceil(columns * form.bits / 32)):
                return StoredMatrix(form, WHOLE if shape else WHOLE[:2], (packed.shape[0], columns))
        return None

    @classmethod
    def of_experts(cls, checkpoint: Checkpoint, modules: Sequence[str]) -> Self | None:
        """The integers of some experts; a CheckpointError if they are no symmetric ones of a known size."""
        known = (*WHOLE, ZERO_POINT, GROUP_INDEX)
        stored = {m: {part for part in known if f"{m}.{part}" in checkpoint.tensors} for m in modules}
        module = next((m for m in modules if stored[m] == set(WHOLE)), modules[0])
        where = f"{checkpoint.folder}: {module}"
        for part in (ZERO_POINT, GROUP_INDEX):
            if part in stored[module]:
                raise CheckpointError(f"{where}.{part}", "asymmetric or reordered integers are not supported")
        if f"{module}.qweight" in checkpoint.tensors:
            raise CheckpointError(
                f"{where}.qweight",
                "experts of AutoAWQ or GPTQ cannot be stitched",
                "give symmetric ones in compressed-tensors' pack-quantized, as llm-compressor saves them",
            )
        packed = checkpoint.require(f"{module}.{PACKED}", "its experts must be packed integers")
        scale = checkpoint.require(f"{module}.{SCALE}", "the scales of packed integers")
        shape = checkpoint.tensor(checkpoint.require(f"{module}.{SHAPE}", "the shape of packed integers").name).tolist()
        if len(packed.shape) != 2 or len(scale.shape) != 2 or len(shape) != 2 or not scale.shape[1] or not shape[1]:
            raise CheckpointError(
                where, f"packed {list(packed.shape)} and scale {list(scale.shape)} do not fit each other"
            )
        bits, group = packed.shape[1] * 32 // shape[1], shape[1] // scale.shape[1]
        if bits not in SIZES or group not in GROUPS:
            raise CheckpointError(
                where,
                f"INT{bits} in groups of {group}",
                "2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128 are needed",
            )
        return cls(bits, group)


# What a budget chooses from, in ascending order of size.
CANDIDATES = tuple(Integers(bits, group) for bits in (2, 3, 4, 8) for group in reversed(GROUPS))


def packed_parts(checkpoint: Checkpoint, module: str) -> tuple[list[TensorInfo], tuple[int, int], int]:
    """The header entries of packed integers, scales and zero points if there are any; R and C; bits.

    Raises:
        CheckpointError: they do not belong together, or cannot be read.
    """
    names = (PACKED, SCALE, SHAPE)
    packed, scale, stated = (checkpoint.require(f"{module}.{name}", "part of a packed weight") for name in names)
    zero, index = (checkpoint.tensors.get(f"{module}.{part}") for part in (ZERO_POINT, GROUP_INDEX))
    symmetric = all(weights.get("symmetric", True) for weights in weight_schemes(checkpoint.config))
    unread = index or (zero if symmetric else None)
    if unread is not None:
        raise CheckpointError(
            f"{packed.file}: {unread.name}",
            "only groups in order of columns can be read, and zero points that config.json declares (symmetric: false)",
        )
    two = math.prod(stated.shape) == 2
    rows, columns = (int(n) for n in checkpoint.tensor(stated.name).flatten().tolist()) if two else (0, 0)
    bits, groups = packed.shape[-1] * 32 // columns if packed.shape and columns > 0 else 0, (0, *scale.shape)[-1]
    parts = [packed, scale] if zero is None else [packed, scale, zero]
    shapes = [(rows, columns * bits // 32), (rows, groups), (math.ceil(rows * bits / 32), groups)][: len(parts)]
    whole = 2 <= bits <= 8 and groups > 0 and columns % groups == columns * bits % 32 == 0
    integers = all(info.dtype == "I32" for info in parts if info is not scale)
    if not whole or not integers or [info.shape for info in parts] != shapes:
        stored = ", ".join(f"{info.name.rpartition('.')[2]} {info.dtype} {list(info.shape)}" for info in parts)
        raise CheckpointError(
            f"{packed.file}: {module}", f"{stored} and {SHAPE} {[rows, columns]} do not belong together"
        )
    return parts, (rows, columns), bits


# Bits -----------------------------------------------------------------------------------------------------------------


def pack(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers (…, R, C) int8 of 2 to 8 bits into int32 (…, R, C * bits / 32); C * bits is a multiple of 32."""
    import torch

    half = 1 << (bits - 1)
    raw = (integers.contiguous().view(torch.uint8) + half).bitwise_and_(2 * half - 1)  # modulo 256, as int8 is
    if 8 % bits:
        return _pack_across_bytes(raw, bits)
    while bits < 8:  # two bytes become one of twice the bits, the first in the lower half
        pairs = raw.view(torch.int16)
        raw, bits = (pairs >> (8 - bits)).bitwise_or_(pairs).to(torch.uint8), 2 * bits
    return raw.view(torch.int32)


def _pack_across_bytes(raw: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack bytes (…, R, C) of so many bits, some of which lie in two bytes then."""
    import torch

    few = 8 // math.gcd(bits, 8)
    raw = raw.view(*raw.shape[:-1], raw.shape[-1] // few, few)
    packed = raw.new_zeros(*raw.shape[:-1], few * bits // 8)
    for i, byte, shift in _places(bits):
        packed_byte = packed[..., byte]
        packed_byte |= raw[..., i] << shift if shift >= 0 else raw[..., i] >> -shift  # what exceeds 8 bits falls off
    return packed.flatten(-2).view(torch.int32)


def unpack(packed: torch.Tensor, bits: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Unpack int32 (…, R, C * bits / 32) to integers int8 of the given shape (…, R, C)."""
    import torch

    half, width = 1 << (bits - 1), 8
    raw = packed.contiguous().view(torch.uint8)
    if 8 % bits:
        return _unpack_across_bytes(raw, bits, shape).sub_(half).view(torch.int8).view(shape)
    while width > bits:  # the reverse of `pack`
        width //= 2
        pairs = raw.to(torch.int16)
        raw = pairs.bitwise_or_(pairs << (8 - width)).bitwise_and_(0x101 * ((1 << width) - 1)).view(torch.uint8)
    return raw.sub(half).view(torch.int8).view(shape)


def _unpack_across_bytes(raw: torch.Tensor, bits: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Unpack bytes to bytes with so many bits each, some of which lie in two."""
    few = 8 // math.gcd(bits, 8)
    raw = raw.view(*raw.shape[:-1], shape[-1] // few, few * bits // 8)
    integers = raw.new_zeros(*raw.shape[:-1], few)
    for i, byte, shift in _places(bits):
        integer = integers[..., i]
        integer |= raw[..., byte] >> shift if shift >= 0 else raw[..., byte] << -shift
    return integers.bitwise_and_((1 << bits) - 1)


def _places(bits: int) -> Iterator[tuple[int, int, int]]:
    """Locate the bits of the fewest integers that fill whole bytes.

    Yields:
        The integer, a byte that has some of its bits, and its shift in that byte.
    """
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
