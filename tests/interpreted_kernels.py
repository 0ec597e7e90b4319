"""Kernels in Triton's interpreter, for tests/solve/test_kernels.py.

Run as a program of its own, since Triton decides when it is first imported whether to interpret:

    TRITON_INTERPRET=1 python tests/interpreted_kernels.py compare     results that differ from torch's
    TRITON_INTERPRET=1 python tests/interpreted_kernels.py wrong run …   `quantize` with wrong kernels
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl

from quantizers.solve import kernels, triton_code
from quantizers.solve.kernel_check import KERNELS, differences

SHAPES = [(2, 3, 32, 8, False), (1, 40, 32, 4, True)]  # experts, rows, columns of a group, bits, signed


@triton.jit
def off_by_one(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    return tl.minimum(tl.maximum(x + 1, LOW), HIGH)


class Failing:
    """A kernel that does not compile."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        raise RuntimeError("ptxas failed\nwith a second line")


def main(what: str, *arguments: str) -> int:
    if what == "compare":
        kernels.INTERPRETED = 32  # rows of a program, so that some matrices take several, of which the last is not full
        cpu = torch.device("cpu")
        print(json.dumps({name: [differences(name, cpu, shape) for shape in SHAPES] for name in KERNELS}))
        return 0
    triton_code.refine_group = Failing()
    triton_code._whole = off_by_one
    from quantizers.cli.main import main as quantize

    sys.argv = ["quantize", *arguments]
    quantize()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
