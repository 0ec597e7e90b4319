"""How long counted work takes on a CPU.

What is counted is an accelerator's way. A CPU multiplies and adds as much, in float32 and in smaller units of experts,
of which more fit in its cache; and what is one kernel there are many operations of torch's here. Measured once, on 2
cores, for a layer with 8 of MiniMax-M2.1's experts and 4,096 tokens
(`quantize bench layer --like minimax-m2.1 --experts 8 --tokens 4096 --length 1024 --device cpu`): these rates then give
each phase of more than a second within 1.4 times of its time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from quantizers.plan.units import unit_of_experts
from quantizers.system.thread_map import THREADS

from .cards import HOST
from .work import Operation, Work

LAUNCH = 3e-6  # seconds of an operation that is next to nothing
OF_A_CORE = 0.095e12  # operations a second in float32
BANDWIDTH, MOST = 7.5e9, 200e9  # bytes a second: of a core with its caches, and of all
REACHED = {"": 1.0, "bfloat16": 0.75, "tf32": 0.75, "float32": 0.75, "float64": 0.4, "factorization": 0.3}
WIDER = {"bfloat16": 2}  # what an accelerator has in bfloat16
# Of each kernel of forward/fused and solve/fused: how many times as many bytes torch's operations move, and how many
# operations they are; with groups of 32.
INSTEAD: Mapping[str, tuple[float, int]] = {
    "gptq_block": (30, 226), "refine_group": (31, 327), "mse_scales": (380, 404), "tried_errors": (14, 68),
    "summed_products": (3, 387), "token_roots": (18.7, 10), "gate_rows": (1.7, 6), "weigh_rows": (3.5, 5),
    "dequantize": (7.7, 10),
}  # fmt: skip


@dataclass(frozen=True)
class Cpu:
    """Some cores.

    Attributes:
        cores: that are used.
        smaller: how many times more experts an accelerator's unit has, so that there are fewer operations.
    """

    cores: int
    smaller: float = 1.0

    @property
    def name(self) -> str:
        """As it is printed."""
        return f"CPU, {self.cores} core{'s' if self.cores > 1 else ''}"

    @property
    def readers(self) -> int:
        """Threads that read files at once."""
        return min(THREADS, self.cores)

    def seconds(self, work: Work) -> float:
        """How long a phase takes; nothing crosses a bus."""
        computed = sum(self._one(operation) * times for operation, times in work.operations.items())
        launches = sum(_instead(one)[1] * one.launches * times for one, times in work.operations.items())
        return computed + launches * self.smaller * LAUNCH + work.host_bytes / HOST

    def _one(self, operation: Operation) -> float:
        bytes_moved = (operation.read + operation.written) * WIDER.get(operation.kind, 1) * _instead(operation)[0]
        moved = bytes_moved / min(BANDWIDTH * self.cores, MOST)
        return max(moved, operation.flops / (OF_A_CORE * self.cores * REACHED[operation.kind]))


def _instead(operation: Operation) -> tuple[float, int]:
    return INSTEAD.get(operation.name, (1, 1))


def cpu_rates(cores: int) -> str:
    """The rates behind the seconds, in one line."""
    return (
        f"{cores} core{'s' if cores > 1 else ''}, each {OF_A_CORE / 1e12:g} TFLOP/s in float32, of which "
        f"{REACHED['float32']:.0%} are reached, and {BANDWIDTH / 1e9:g} GB/s; {LAUNCH * 1e6:g} us an operation"
    )


def this_cpu(sizes: Mapping[str, int]) -> Cpu:
    """The cores of this machine that the program may use, for a model of these sizes."""
    units = (unit_of_experts(accelerator, sizes["hidden"], sizes["width"]) for accelerator in (True, False))
    there, here = units
    return Cpu(len(os.sched_getaffinity(0)), there / here)
