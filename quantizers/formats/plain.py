"""Weights that are not quantized: BF16, F16 or F32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import DTYPE_BYTES, FLOATING, Spec

from .format import Parts, RowFormat, StoredMatrix

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Plain(RowFormat):
    """Numbers of a dtype in safetensors' spelling, one of FLOATING."""

    dtype: str

    kind: ClassVar[str] = "plain"
    description: ClassVar[str] = "BF16"

    def __str__(self) -> str:
        return self.dtype

    @property
    def weight_bits(self) -> int:
        """Bits of its dtype."""
        return 8 * DTYPE_BYTES[self.dtype]

    def parts(self, shape: tuple[int, ...]) -> Parts:
        """The weight alone."""
        return (("weight", Spec(self.dtype, shape)),)

    def unpack(self, parts: Sequence[torch.Tensor], columns: int) -> torch.Tensor:
        """The numbers as they are."""
        return parts[0]

    @classmethod
    def stored(cls, checkpoint: Checkpoint, module: str) -> StoredMatrix | None:
        """A matrix of one of these dtypes."""
        info = checkpoint.tensors.get(f"{module}.weight")
        if info is None or info.dtype not in FLOATING or len(info.shape) != 2:
            return None
        return StoredMatrix(cls(info.dtype), ("weight",), (info.shape[0], info.shape[1]))


BF16 = Plain("BF16")
