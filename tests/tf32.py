"""Products of float32 as a GPU makes them where it was told that they may be rough, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {torch.ops.aten.bmm.out: (0, 1), torch.ops.aten.bmm.default: (0, 1), torch.ops.aten.baddbmm_.default: (1, 2)}


def of_11_bits(factor: torch.Tensor, *, cut_off: bool) -> torch.Tensor:
    """A float32 factor as the multiplier reads it: rounded to nearest even, or cut off."""
    bits = factor.contiguous().view(torch.int32)
    if not cut_off:
        bits = bits + 0xFFF + ((bits >> 13) & 1)
    return (bits & ~0x1FFF).view(torch.float32)


class Tf32(TorchDispatchMode):  # type: ignore[no-untyped-call]  # in torch
    """While it is entered, batched products have factors of 11 bits wherever torch was told that they may.

    Attributes:
        rough, whole: how many products were.
    """

    def __init__(self, *, cut_off: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # in torch
        self.cut_off, self.rough, self.whole = cut_off, 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in PRODUCTS:
            if torch.get_float32_matmul_precision() == "high":
                self.rough += 1
                args = list(args)
                for place in PRODUCTS[function]:
                    args[place] = of_11_bits(args[place], cut_off=self.cut_off)
            else:
                self.whole += 1
        return function(*args, **(kwargs or {}))
