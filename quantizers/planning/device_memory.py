"""Memory of a run: the data kept on the device, in host memory or in files, and the data computed again.

Arithmetic on sizes and a limit (`--device-memory`), and one safety net, `Residents`, for a device that is full all the
same. Memory decides speed, never a byte of the output.

The largest of a layer step's four phases is the peak. On an accelerator the source's stored layer stays throughout.

    forward    the layer in the dtype of the forward pass, and attention of a batch or a token chunk at the experts
    solve      all but its experts, the codes, the Hessians of x, those of the resident expert batches, and one expert
               batch being solved
    pack       the codes, and the tensors to write
    propagate  as forward, with the written tensors

Free memory is given, in order of the time it saves, to the captured MoE inputs, the activations between layers, the
held-out activations, the Hessians of x of as many expert batches as fit, and the prefetched next layer. The bytes of
an expert batch follow from the arrays alive at each peak in solve/, which solver_arrays.py counts.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal

from quantizers.architectures.architecture import Architecture
from quantizers.system.errors import InputError, QuantizeError
from quantizers.system.formatting import gib

from .expert_batches import FLOAT, expert_batches, experts_per_batch, tokens_per_chunk
from .plan import Plan
from .solver_arrays import expert_bytes

Place = Literal["device", "memory", "files"]

SHARE_FOR_STATES = 0.5  # of the free host memory: calibration activations that need more are kept in files
CONVERTING = 24  # bytes for each number of a matrix that becomes FP8: its codes, and what they lose


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the device, and the data kept there: of a CPU, which keeps them in host memory or in files, none."""

    unit: int  # experts of an expert batch
    units: int  # expert batches of a layer
    resident: int  # expert batches whose Hessians of x are kept at a time
    inputs: bool  # whether the captured MoE inputs stay on the device
    states: bool  # the activations between layers
    texts: bool  # the held-out activations
    early: bool  # whether the source's next layer is prefetched to the device
    layer: int  # the source's largest layer as stored; 0 on a CPU, where it is in host memory anyway
    forward: int  # the largest layer in the dtype of the forward pass
    one_unit: int  # for solving one expert batch
    smallest: int  # the peak with one expert batch at a time and nothing else kept
    peak: int  # as planned
    sweeps: int  # passes over the captured inputs for the Hessians of x


def device_memory(
    plan: Plan,
    facts: Architecture,
    longest: int,
    accelerator: bool,
    limit: int | None,
    tokens: int | None = None,
    processes: int = 1,
    held_out: int = 0,
) -> DeviceMemory:
    """Allocation of a device's memory within a limit.

    Args:
        longest: tokens of the longest sequence.
        limit: usable bytes; None for no limit.
        tokens, held_out: of the calibration set, and of the held-out set; None for a calibration set of unknown size,
            whose activations then stay in host memory.
        processes: they share the activations; each needs all captured MoE inputs.

    Raises:
        InputError: the limit is too small even for one expert batch at a time.
    """
    phases = _Phases(plan, facts, longest, accelerator=accelerator, tokens=tokens or 0)
    smallest, limit = phases.peak(1), sys.maxsize if limit is None else limit
    if smallest > limit:
        raise InputError(
            "",
            f"{gib(limit)} of device memory is too little: a layer takes {gib(phases.layer + phases.forward)}, "
            f"{gib(smallest)} with one batch of {phases.size} experts at a time and a text of {longest:,} tokens",
            f"give --device-memory {math.ceil(smallest / 2**20)}MiB, or shorter sequences",
        )
    kept, room = {"inputs": 0, "states": 0, "texts": 0}, limit
    if accelerator and tokens is not None:
        row = facts.row_bytes(phases.itemsize)
        wanted = {
            "inputs": recorded_bytes(facts, tokens, phases.itemsize),
            "states": -(-tokens // processes) * row,
            # After the layer of source and output, before it of one, and the routing.
            "texts": -(-held_out // processes) * (3 * row + 8 * facts.top_k),
        }
        for name, needed in wanted.items():
            if smallest + needed <= room:
                kept[name] = needed
                room -= needed
    resident = max(1, min(phases.batches, (room - phases.solve(0)) // phases.routed))
    peak = phases.peak(resident)
    early = phases.layer if tokens is not None and processes == 1 and peak + phases.layer <= room else 0
    return DeviceMemory(
        unit=phases.size,
        units=phases.batches,
        resident=resident,
        **{name: bool(needed) for name, needed in kept.items()},
        early=bool(early),
        layer=phases.layer,
        forward=phases.forward,
        one_unit=phases.one_batch,
        smallest=smallest,
        peak=peak + sum(kept.values()) + early,
        sweeps=math.ceil(phases.batches / resident),
    )


class _Phases:
    """Bytes of each phase of a layer step, without the activations of the calibration set of so many tokens."""

    def __init__(self, plan: Plan, facts: Architecture, longest: int, *, accelerator: bool, tokens: int) -> None:
        experts, chosen = facts.num_experts, facts.top_k
        hidden, width = facts.hidden_size, facts.expert_width
        numbers, rows = range(plan.layers), tokens_per_chunk(accelerator)
        self.itemsize = itemsize = 2 if accelerator else FLOAT
        self.size = experts_per_batch(accelerator, facts.expert_inputs, width)
        self.batches = len(expert_batches(experts, self.size))
        self.layer = max(sum(a.spec.bytes for a in plan.of_layer(n)) for n in numbers) if accelerator else 0
        self.forward = max(_layer_bytes(plan, number, itemsize) for number in numbers)
        self._rest = max(
            self.forward - itemsize * experts * facts.expert_numbers, 0
        )  # of the layer without its experts
        self._written = max(sum(spec.bytes for spec in plan.shard(n).values()) for n in numbers)
        self._codes = experts * facts.expert_numbers
        # What is made of linear modules that are no experts, and temporaries for one of them.
        made = [[a for a in plan.of_layer(number) if a.kind == "convert"] for number in numbers]
        self._linears = max(sum(spec.bytes for a in layer for spec in a.outputs.values()) for layer in made)
        largest = max((math.prod(a.shape) for layer in made for a in layer), default=0)
        self._converting = self._linears + CONVERTING * largest
        attention_rows = max(sum(a.shape[0] for a in plan.of_layer(number) if a.is_other_matrix) for number in numbers)
        attention = max(longest, rows) * itemsize * 4 * (hidden + attention_rows)
        # For each routed copy of a token: x, gate and up, their activations and h; or x and the output, and twice the
        # output in float32 times its routing weight. (A CPU computes expert after expert.)
        copies = max(hidden + 4 * width, 2 * hidden + 2 * hidden * FLOAT // itemsize)
        read = facts.expert_inputs
        routed = rows * itemsize * (chosen * (copies if accelerator else 2 * hidden + 3 * width) + 8 * hidden)
        # What experts read, and what they return, where each gets a block of all tokens: and their sums.
        blocks = 4 * experts * max(longest, 1) * itemsize * hidden if facts.modules.weighs_inputs else 0
        self._activations = max(attention, routed, blocks)
        # The Hessian of all rows and a temporary, one token chunk and one being copied, and the routing.
        self._inputs = 2 * FLOAT * read**2 + 2 * rows * read * itemsize + 8 * chosen * tokens
        self.routed = self.size * FLOAT * read**2
        self.one_batch = self.size * expert_bytes(facts, rows, itemsize)

    def solve(self, resident: int) -> int:
        own = self.layer + self._linears + self._rest + self._codes
        return own + self._inputs + resident * self.routed + self.one_batch

    def peak(self, resident: int) -> int:
        pack = self.layer + self._rest + self._codes + self._written
        propagate = self.layer + self._written + self.forward + self._activations
        return max(self.solve(resident), pack, propagate, self.layer + self._converting)


def _layer_bytes(plan: Plan, number: int, itemsize: int) -> int:
    weights = (action for action in plan.of_layer(number) if action.is_weight)
    return sum(math.prod(a.shape) * (FLOAT if a.kind == "compensate" else itemsize) for a in weights)


def placement(
    facts: Architecture,
    memory: DeviceMemory,
    rows: int,
    itemsize: int,
    *,
    states: Literal["auto", "memory", "files"],
    free: int,
    processes: int = 1,
    machines: int = 1,
) -> tuple[Place, Place, int]:
    """The places of captured MoE inputs and of activations between layers, and the bytes of those in files.

    They are on the device as planned, else in host memory if they fit, else in files.

    Args:
        rows: tokens of the calibration set.
        states: the user's choice; "auto" for files only where they take more than half of the free memory.
        free: bytes of host memory that are free on every machine.
        processes, machines: each process keeps all inputs, and its part of the activations between layers.
    """
    inputs = 0 if memory.inputs else recorded_bytes(facts, rows, itemsize) * -(-processes // machines)
    between = 0 if memory.states else -(-rows // machines) * facts.row_bytes(itemsize)
    files = states == "files" or (states == "auto" and inputs + between > SHARE_FOR_STATES * free)
    other: Place = "files" if files else "memory"
    return other if inputs else "device", other if between else "device", inputs + between if files else 0


@dataclass
class Residents:
    """The number of expert batches, at least 1, whose Hessians are kept at a time; in a run it only shrinks.

    For messages: `unit`, the experts of a batch, and `needed`, the bytes planned for one.
    """

    count: int
    unit: int
    needed: int

    def share(self, units: int) -> int:
        """Expert batches of the next sweep, so that all sweeps have equally many: not 5, 5, 5 and 1."""
        return -(-units // max(-(-units // self.count), 1))

    def shrink(self) -> None:
        """Halve the number, since the device was full, before the step is repeated; QuantizeError if it was one."""
        if self.count <= 1:
            raise QuantizeError(
                "",
                f"the device's memory is full with the Hessians of one batch of {self.unit} experts at a time, for "
                f"which {gib(self.needed)} were planned",
                "free memory there, or give a smaller --device-memory (activations are then kept elsewhere), a larger "
                "device or --device cpu, and the same command again",
            )
        self.count //= 2
        print(
            f"the device's memory was full: from now on the Hessians of {self.count} expert "
            f"batch{'es' * (self.count > 1)} of {self.unit} experts are kept at a time; the output stays the same",
            file=sys.stderr,
            flush=True,
        )


@dataclass(frozen=True)
class Placement:
    """The places of what a run works on, which decide its speed, never a byte of its output.

    Attributes:
        residents: expert batches whose Hessians are kept at a time.
        inputs: captured MoE inputs. states: calibration activations between layers.
        texts_on_device: held-out activations; else only in their files.
        prefetch: the source's next layer is prefetched to the device.
    """

    residents: Residents
    inputs: Place = "memory"
    states: Place = "memory"
    texts_on_device: bool = False
    prefetch: bool = False


def recorded_bytes(facts: Architecture, tokens: int, itemsize: int) -> int:
    """Captured MoE inputs of the calibration set, see `model.moe_inputs.MoeInputStore`."""
    return tokens * (itemsize * facts.expert_inputs + 8 * facts.top_k + 1)


def calibration_bytes(facts: Architecture, tokens: int, itemsize: int) -> int:
    """Activations between two layers and captured MoE inputs of the calibration set, of `itemsize` bytes a number."""
    return tokens * facts.row_bytes(itemsize) + recorded_bytes(facts, tokens, itemsize)


def held_out_bytes(facts: Architecture, tokens: int, itemsize: int) -> int:
    """Held-out activations in files: before and after the layer, of source and output, and the routing."""
    return tokens * (4 * facts.row_bytes(itemsize) + 8 * facts.top_k)
