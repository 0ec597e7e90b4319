"""How the experts of one layer are stored: bits and group size (the number of weights that share a scale).

Layers may differ, but the three matrices of a layer's experts may not: a server loads them as one fused module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

SCALE_BITS = 16  # bfloat16
BITS, GROUPS = (4, 8), (32, 64, 128)  # supported by vLLM's Marlin MoE kernels without zero points


@dataclass(frozen=True, order=True)
class Scheme:
    """Symmetric integers of `bits` bits, one bfloat16 scale for every `group_size` weights."""

    bits: int
    group_size: int

    @property
    def bits_per_weight(self) -> float:
        """Bits of a packed weight and its share of the scale: 4.5 for INT4 in groups of 32."""
        return self.bits + SCALE_BITS / self.group_size

    def __str__(self) -> str:
        return f"INT{self.bits} group {self.group_size}"


ALL = tuple(Scheme(bits, group) for bits in BITS for group in reversed(GROUPS))  # in ascending order of size


def counted(schemes: Iterable[Scheme]) -> str:
    """`INT4 group 64` if all layers have the same scheme, else `INT4 group 32 (3 layers), INT4 group 64 (1 layer)`."""
    counts = Counter(schemes)
    if len(counts) == 1:
        return str(next(iter(counts)))
    return ", ".join(f"{s} ({n} layer{'s' if n > 1 else ''})" for s, n in sorted(counts.items()))
