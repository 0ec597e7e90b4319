"""Device memory: what lies there while a layer is worked on, and how much of it at a time within a limit.

Legend: E experts, U experts of a unit (units.py), H hidden, I expert width, T tokens of the longest sequence,
K experts chosen per token, b bytes of an element of the forward pass (2 on an accelerator, 4 on a CPU).

A visit has four phases, of which the largest is the peak. On an accelerator the source's layer, as it is stored, lies
there throughout.

    forward    the layer in the dtype of the forward pass, and attention of a batch or a block of rows at experts
    solve      all but its experts, the codes, the sums of x, those of the resident units, and one unit being solved
    pack       the codes, and what is written
    propagate  as forward, with what was written

In order of what they save, free memory holds the inputs of the experts, the states between the layers, those of the
held-out texts, the sums of x of as many units as fit, and the source's next layer. None of this decides a byte of the
output. The bytes of a unit are derived from the files in solve/: they count the arrays that are live at each one's
peak. tests/plan/test_solve_memory.py measures them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from quantizers.architectures.sizes import Sizes
from quantizers.system.errors import InputError
from quantizers.system.formatting import gib

from .plan import Plan
from .states import between_bytes, lanes_bytes, recorded_bytes
from .units import ROUTED_ROWS, rows_of_block, unit_of_experts, units_of

FLOAT = 4
# Arrays that are alive while a matrix is rounded. First its Gram matrix in order, damped and factorized, (C, C), beside
# the matrix itself transposed, (R, C). Then that with what is left to do, or what codes leave of it, and its codes; and
# of what is worked on a panel of columns, see solve/refine.py.
FACTORIZED = 6, 2, 0
ROUNDED = 3, 4, 5
PANEL = 256


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the device, and what is held there.

    Attributes:
        unit: experts of a unit.
        units: of a layer.
        resident: units whose sums of x are held at a time.
        inputs, states, texts: whether the inputs of the experts, the states between the layers, and those of the
            held-out texts lie on the device throughout; never on a CPU, where they lie in host memory or in files.
        early: whether the source's next layer lies there as well, beside the one that is worked on.
        layer: the source's largest layer as it is stored; 0 on a CPU, where it lies in host memory anyway.
        forward: the largest layer in the dtype of the forward pass.
        one_unit: bytes for solving one unit.
        smallest: the total at its peak with one unit at a time and nothing else held.
        peak: the total at its peak.
    """

    unit: int
    units: int
    resident: int
    inputs: bool
    states: bool
    texts: bool
    early: bool
    layer: int
    forward: int
    one_unit: int
    smallest: int
    peak: int

    @property
    def sweeps(self) -> int:
        """How often the inputs are read for the sums of x."""
        return math.ceil(self.units / self.resident)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"sweeps": self.sweeps}


def device_memory(
    plan: Plan,
    sizes: Sizes,
    longest: int,
    accelerator: bool,
    limit: int | None,
    tokens: int | None = None,
    processes: int = 1,
    held_out: int = 0,
) -> DeviceMemory:
    """What is held on a device within a limit.

    Args:
        longest: T, tokens of the longest sequence.
        accelerator: see `device.kind`.
        limit: bytes that may be used; None for no limit.
        tokens: of the calibration set; None if that is not known, and then they stay in host memory.
        processes: how many share the states, of which each keeps a part; each needs all inputs of the experts.
        held_out: tokens of the held-out set.

    Raises:
        InputError: the limit is too small even for one unit of experts at a time.
    """
    itemsize = 2 if accelerator else FLOAT
    unit = unit_of_experts(accelerator, sizes["hidden"], sizes["width"])
    units = len(units_of(sizes["experts"], unit))
    rows = rows_of_block(accelerator)
    phases = _Phases(plan, sizes, longest, itemsize, unit=unit, rows=rows, accelerator=accelerator, tokens=tokens or 0)
    inputs = states = texts = early = 0
    resident, smallest = units, phases.peak(1)
    if accelerator and tokens is not None:
        inputs = recorded_bytes(sizes, tokens, itemsize)
        states = between_bytes(sizes, -(-tokens // processes), itemsize)
        texts = lanes_bytes(sizes, -(-held_out // processes), itemsize)
        early = phases.layer if processes == 1 else 0
    if limit is not None:
        if smallest > limit:
            raise InputError(
                f"{gib(limit)} of device memory is too little: a layer takes {gib(phases.layer + phases.forward)}, "
                f"{gib(smallest)} with one unit of {unit} experts at a time; give --device-memory "
                f"{math.ceil(smallest / 2**20)}MiB, or shorter sequences"
            )
        inputs = inputs if smallest + inputs <= limit else 0
        states = states if smallest + inputs + states <= limit else 0
        texts = texts if smallest + inputs + states + texts <= limit else 0
        resident = max(1, min(units, (limit - inputs - states - texts - phases.solve(0)) // phases.routed))
        early = early if phases.peak(resident) + inputs + states + texts + early <= limit else 0
    return DeviceMemory(
        unit,
        units,
        resident,
        bool(inputs),
        bool(states),
        bool(texts),
        bool(early),
        phases.layer,
        phases.forward,
        phases.one_unit,
        smallest,
        phases.peak(resident) + inputs + states + texts + early,
    )


class _Phases:
    """Bytes of each phase of a visit, without the rows of the calibration set."""

    def __init__(
        self,
        plan: Plan,
        sizes: Sizes,
        longest: int,
        itemsize: int,
        *,
        unit: int,
        rows: int,
        accelerator: bool,
        tokens: int = 0,
    ) -> None:
        experts, hidden, width = sizes["experts"], sizes["hidden"], sizes["width"]
        numbers = range(plan.layers)
        self.layer = max(sum(a.spec.bytes for a in plan.of_layer(n)) for n in numbers) if accelerator else 0
        self.forward = max(_layer_bytes(plan, number, itemsize) for number in numbers)
        self._rest = max(self.forward - itemsize * 3 * experts * width * hidden, 0)  # of the layer without its experts
        self._written = max(sum(spec.bytes for spec in plan.shard(n).values()) for n in numbers)
        self._codes = 3 * experts * width * hidden
        batch = max(longest, rows)
        attention = batch * itemsize * 4 * (hidden + max(_rows_made(plan, number) for number in numbers))
        # At the experts, of each token's copies: itself, gate and up, what replaces them and what is made of them; or
        # itself and what comes of it, and that in float32 times its weight, twice. (A CPU takes expert after expert.)
        copies = max(hidden + 4 * width, 2 * hidden + 2 * hidden * FLOAT // itemsize)
        routed = rows * itemsize * (sizes["chosen"] * (copies if accelerator else 2 * hidden + 3 * width) + 8 * hidden)
        self._activations = max(attention, routed)
        # Their sums, one block of them and one that crosses meanwhile, and who is routed where.
        self._inputs = 2 * FLOAT * hidden**2 + 2 * rows * hidden * itemsize + 8 * sizes["chosen"] * tokens
        self.routed = unit * FLOAT * hidden**2
        self.one_unit = unit * _expert_bytes(sizes, rows, itemsize)

    def solve(self, resident: int) -> int:
        return self.layer + self._rest + self._codes + self._inputs + resident * self.routed + self.one_unit

    def peak(self, resident: int) -> int:
        pack = self.layer + self._rest + self._codes + self._written
        propagate = self.layer + self._written + self.forward + self._activations
        return max(self.solve(resident), pack, propagate)


def _layer_bytes(plan: Plan, number: int, itemsize: int) -> int:
    weights = (action for action in plan.of_layer(number) if action.is_weight)
    return sum(math.prod(a.spec.shape) * (FLOAT if a.kind == "compensate" else itemsize) for a in weights)


def _rows_made(plan: Plan, number: int) -> int:
    """How many numbers a layer's kept matrices make of one token, together."""
    return sum(a.spec.shape[0] for a in plan.of_layer(number) if a.is_kept_matrix)


def _expert_bytes(sizes: Sizes, rows: int, itemsize: int) -> int:
    """Of one expert while its unit is solved, without its routed sums.

    Args:
        rows: of a block.
    """
    hidden, width, chosen = sizes["hidden"], sizes["width"], sizes["chosen"]
    square, narrow = FLOAT * hidden**2, FLOAT * width**2  # the Gram matrices of x and of h
    gate_up, down = FLOAT * 2 * width * hidden, FLOAT * width * hidden
    stored = itemsize * 3 * width * hidden  # the weights as they are served
    small = rows * (9 * chosen + 40)  # routing weights and row indices
    # Routed rows, of which all that are gathered at a time may be one expert's.
    routed = min(rows, ROUTED_ROWS)
    inputs = routed * itemsize * 2 * hidden + square // 4 + small
    # The weights in float32, rounded and as served; gate, up and h of a block, and the same of its routed rows.
    batch = itemsize * max(4 * width * rows, 3 * width * rows + (2 * hidden + 3 * width) * routed) + small
    serving = stored + 3 * gate_up + down + 2 * narrow + batch
    # The weights in float32 and as passed on, and then one matrix being rounded.
    held = stored + 2 * (gate_up + down) + narrow
    rounding = max(
        squares * gram + matrices * weight + panels * min(PANEL, columns) * weight // columns
        for squares, matrices, panels in (FACTORIZED, ROUNDED)
        for gram, weight, columns in ((square, gate_up, hidden), (narrow, down, width))
    )
    return max(inputs, serving, held + rounding)
