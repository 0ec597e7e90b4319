"""Device memory: how many experts of a layer can be solved at a time within a limit.

Legend: E experts, c experts of a chunk, H hidden, I expert width, T tokens of the longest sequence,
K experts chosen per token, b bytes of an element of the forward pass (2 on an accelerator, 4 on a CPU).

    peak = the layer + its codes + max(one sequence's attention, one block of rows through router and experts,
                                       sums of x + c · bytes of one expert)

The bytes of one expert are derived from expert_sums.py, gram_engine.py, rounding.py and refine.py in solve/:
they count the arrays that are live at each one's peak. tests/plan/test_solve_memory.py measures them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from quantizers.architectures.sizes import Sizes
from quantizers.system.byte_size import gib
from quantizers.system.errors import InputError

from .plan import Plan

FLOAT = 4
ROW_BLOCK = 4096  # rows that go through router and experts together, whatever sequences they belong to
BATCH_TOKENS = 1024  # tokens: short sequences are batched up to this number
# Arrays live at the peak of each phase, see `_expert_bytes`.
SUMS_FINISHED = 6  # (H, H): the routed sums, their blend in float64, the result
ROUNDING_SQUARE = 8  # (C, C): Gram matrix: original, folded, damped, permuted, its factor, and the solver's copies
ROUNDING_MATRIX = 7  # (R, C): scaled, codes, steps, errors, and the candidates of a search


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the device.

    Attributes:
        layer: weights of the largest layer in the dtype of the forward pass.
        fixed: codes, and the largest of a sequence's attention, a block's rows at the experts, and the sums of x.
        expert: bytes for each expert of a chunk.
        chunk: number of experts solved at a time.
        peak: the total at its peak.
    """

    layer: int
    fixed: int
    expert: int
    chunk: int
    peak: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def device_memory(plan: Plan, sizes: Sizes, longest: int, itemsize: int, limit: int | None) -> DeviceMemory:
    """Choose the number of experts in a chunk.

    Args:
        longest: T, tokens of the longest sequence.
        itemsize: b, bytes of an element of the forward pass.
        limit: bytes that may be used; None for no limit and all experts at once.

    Raises:
        InputError: the limit is too small even for one expert at a time.
    """
    experts, hidden, width = sizes["experts"], sizes["hidden"], sizes["width"]
    layer = max(_layer_bytes(plan, number, itemsize) for number in range(plan.layers))
    codes = 3 * experts * width * hidden
    attention = longest * itemsize * (8 * hidden + 4 * (sizes["heads"] + 2 * sizes["kv_heads"]) * sizes["head_dim"])
    routed = ROW_BLOCK * itemsize * (sizes["chosen"] * (2 * hidden + 3 * width) + 8 * hidden)
    input_sums = 2 * FLOAT * hidden**2 + 4 * longest * hidden * FLOAT
    fixed = max(2 * codes, codes + max(attention, routed, input_sums))
    expert = _expert_bytes(sizes, longest, itemsize)
    chunk = experts if limit is None else min(experts, (limit - layer - codes - input_sums) // expert)
    peak = layer + max(fixed, codes + input_sums + max(chunk, 1) * expert)
    if limit is not None and (chunk < 1 or peak > limit):
        smallest = layer + max(fixed, codes + input_sums + expert)
        raise InputError(
            f"{gib(limit)} of device memory is too little: a layer takes {gib(layer)}, {gib(smallest)} with one "
            f"expert solved at a time; give --device-memory {math.ceil(smallest / 2**20)}MiB, or shorter sequences"
        )
    return DeviceMemory(layer, fixed, expert, chunk, peak)


def _layer_bytes(plan: Plan, number: int, itemsize: int) -> int:
    weights = (action for action in plan.of_layer(number) if action.is_weight)
    return sum(math.prod(a.spec.shape) * (FLOAT if a.kind == "compensate" else itemsize) for a in weights)


def _expert_bytes(sizes: Sizes, longest: int, itemsize: int) -> int:
    hidden, width, chosen = sizes["hidden"], sizes["width"], sizes["chosen"]
    square, narrow = FLOAT * hidden**2, FLOAT * width**2  # input_gram, width_gram
    gate_up, down = FLOAT * 2 * width * hidden, FLOAT * width * hidden
    longest = max(longest, BATCH_TOKENS)
    small = longest * (9 * chosen + 40)  # routing weights and row indices
    # Routed rows (all rows in the worst case) with their weights, one batch at a time; then the blend.
    inputs = max(square + longest * itemsize * 4 * hidden + small, SUMS_FINISHED * square)
    # The weights in float32, rounded and as served; gate, up and h of a batch, or of its routed rows.
    batch = longest * itemsize * max(6 * width, 2 * hidden + 5 * width) + small
    serving = 3 * gate_up + down + square + 2 * narrow + batch
    # The weights in float32 and as passed on, both Gram matrices, and then one matrix being rounded.
    held = 2 * (gate_up + down) + square + narrow
    rounding = max(
        ROUNDING_SQUARE * square + ROUNDING_MATRIX * gate_up, ROUNDING_SQUARE * narrow + ROUNDING_MATRIX * down
    )
    return max(inputs, serving, held + rounding)
