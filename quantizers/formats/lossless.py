"""The same numbers in another format: codes and scales from which every value of a matrix comes back.

    bf16         each value has eight significant bits
    fp8-block    in a block of 128 x 128 all values are E4M3 numbers times the same power of two
    nvfp4        in a group of 16 all values are E2M1 numbers times an E4M3 number; the matrix has a power of two
    mxfp4        in a group of 32 all values are E2M1 numbers times a power of two

Where several scales would do, the smallest is taken: of a scale that is twice as large every code can be doubled, if
the largest fits. Whether the values do come back is another question, which `first_difference` answers.

Legend: R rows (outputs), C columns (inputs), g group size, n = C / g groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .e8m0 import GROUP as MX_GROUP
from .e8m0 import NAN, numbers
from .format import PACKED, SCALE, RowFormat
from .fp8 import BLOCKS, Fp8
from .mxfp4 import Mxfp4
from .nvfp4 import (
    GLOBAL_SCALE,
    GROUP,
    LARGEST_E2M1,
    LARGEST_E4M3,
    Nvfp4,
    nearest_e2m1_,
    pack,
)
from .plain import BF16, Plain

if TYPE_CHECKING:
    from torch import Tensor

FINEST = LARGEST_E2M1, LARGEST_E2M1 - 2  # what the largest value of a group may be in E2M1, for the smallest scale
LARGEST_E2M1_POWER, E8M0_BIAS = 2, 127  # 4 is the largest power of two in E2M1
POWERS = -126, 126  # of two that float32 has, and their inverses too
DOUBLED = 3  # times that the scale of a group can be doubled at most: its code 4 is then ½


@dataclass(frozen=True)
class Target:
    """A format that experts can be converted to.

    Attributes:
        form: the stored format.
        short: its name without sizes; `words`: what it consists of, for the model card.
        tag: of the model card, besides that of the program; empty for none.
    """

    form: RowFormat
    short: str
    words: str
    tag: str = ""


TARGETS: Mapping[str, Target] = {
    "bf16": Target(BF16, "BF16", "bfloat16"),
    "fp8-block": Target(BLOCKS, "FP8", "FP8 (E4M3), one scale per block of 128 x 128, a power of two", "fp8"),
    "mxfp4": Target(Mxfp4(), "MXFP4", "MXFP4: FP4 (E2M1), one power of two per 32 weights", "mxfp4"),
    "nvfp4": Target(
        Nvfp4(), "NVFP4", "NVFP4: FP4 (E2M1), one FP8 scale per 16 weights, one power of two per matrix", "nvfp4"
    ),
}


def encoded(form: RowFormat, weights: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """The tensors of some matrices in a target's format, by the last part of their names, in the format's order.

    Args:
        weights: (R, C) float32 and finite. What the format has once for a whole matrix they share, as servers demand
            of gate and up.
    """
    if isinstance(form, Plain):
        return [{"weight": weight.bfloat16()} for weight in weights]
    if isinstance(form, Fp8):
        return [dict(zip(("weight", SCALE), form.quantized(weight), strict=True)) for weight in weights]
    if isinstance(form, Mxfp4):
        return list(map(_mxfp4, weights))
    assert isinstance(form, Nvfp4), "the last of TARGETS"
    return _nvfp4(form, weights)


class Difference(NamedTuple):
    """A value that a format does not hold."""

    row: int
    column: int
    wanted: float
    stored: float


def first_difference(form: RowFormat, parts: Mapping[str, Tensor], weight: Tensor) -> Difference | None:
    """The first value, row by row, that is not read back from tensors as it is in the weight (R, C) float32."""
    stored = form.unpack(list(parts.values()), weight.shape[1]).float()
    return difference(stored, weight)


def difference(stored: Tensor, weight: Tensor) -> Difference | None:
    """The first value, row by row, in which two matrices (R, C) float32 differ; 0 and -0 are equal, NaN is not."""
    equal = stored == weight
    if bool(equal.all()):
        return None
    row, column = divmod(int(equal.logical_not_().flatten().int().argmax()), weight.shape[1])
    return Difference(row, column, weight[row, column].item(), stored[row, column].item())


def holding(weights: Sequence[Tensor]) -> list[str]:
    """The names of the targets that hold every value of some matrices, which share what a format has once."""
    fitting = []
    for name, target in TARGETS.items():
        rows, columns = target.form.edges
        if any(weight.shape[0] % rows or weight.shape[1] % columns for weight in weights):
            continue
        made = encoded(target.form, weights)
        if not any(first_difference(target.form, *pair) for pair in zip(made, weights, strict=True)):
            fitting.append(name)
    return fitting


def _mxfp4(weight: Tensor) -> dict[str, Tensor]:
    """Codes, and the powers of two with which the largest value of a group is 4 or 6, or between."""
    import torch

    groups = weight.unflatten(1, (-1, MX_GROUP))
    _, exponent = torch.frexp(groups.abs().amax(-1))
    scale = (exponent - 1 - LARGEST_E2M1_POWER + E8M0_BIAS).clamp(0, NAN - 1).to(torch.uint8)
    codes = nearest_e2m1_(groups / numbers(scale).unsqueeze(-1)).mul_(2).to(torch.int8)
    return {PACKED: pack(codes.flatten(1)), SCALE: scale}


# NVFP4 ----------------------------------------------------------------------------------------------------------------


def _nvfp4(form: Nvfp4, weights: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Matrices with one global scale: the power of two that brings the largest scale of a group nearest to 448."""
    import torch

    groups = [weight.unflatten(1, (-1, GROUP)) for weight in weights]
    scales = [_finest(values) for values in groups]
    largest = torch.stack([scale.amax() for scale in scales]).amax()
    _, exponent = torch.frexp(torch.where(largest > 0, LARGEST_E4M3 / largest, 1.0))
    whole = torch.ldexp(torch.ones_like(largest), (exponent - 1).clamp(*POWERS))
    made = []
    for values, scale in zip(groups, scales, strict=True):
        scale[scale == 0] = 1 / whole
        for _ in range(DOUBLED):
            _double_small(values, scale, whole)
        codes = nearest_e2m1_(values / scale.unsqueeze(-1)).mul_(2).to(torch.int8)
        stored = (scale * whole).to(torch.float8_e4m3fn)
        made.append({PACKED: form.pack(codes.flatten(1)), SCALE: stored, GLOBAL_SCALE: whole.view(1).clone()})
    return made


def _finest(values: Tensor) -> Tensor:
    """The smallest scale (R, n) with which all values (R, n, g) of a group are in E2M1; 0 for a group of zeros.

    Its largest value is then 6 or 4. The former where both would do, unless only the latter gives a scale of 4 bits.
    """
    import torch

    peak = values.abs().amax(-1)
    scale = torch.full_like(peak, torch.nan)
    for largest in FINEST:
        candidate = peak / largest
        fits = _is_e4m3_mantissa(candidate) & _fit(values, candidate)
        scale = torch.where(scale.isnan() & fits, candidate, scale)
    return torch.where(scale.isnan(), peak / LARGEST_E2M1, scale)


def _fit(values: Tensor, scale: Tensor) -> Tensor:
    """Whether all values (…, g) of a group are E2M1 numbers times its scale (…)."""
    relative = values / scale.unsqueeze(-1)
    return (nearest_e2m1_(relative.clone()) == relative).all(-1)


def _is_e4m3_mantissa(scale: Tensor) -> Tensor:
    """Whether numbers have four significant bits, as those of E4M3."""
    import torch

    sixteenths = torch.frexp(scale).mantissa * 16
    return sixteenths == sixteenths.round()


def _double_small(values: Tensor, scale: Tensor, whole: Tensor) -> None:
    """Double, in place, the scales that E4M3 does not hold, where codes can be halved."""
    import torch

    scaled = scale * whole
    small = scaled.to(torch.float8_e4m3fn).float() != scaled
    if bool(small.any()):
        doubled = 2 * scale[small]
        scale[small] = torch.where(_fit(values[small], doubled), doubled, scale[small])
