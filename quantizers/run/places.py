"""Where the calibration states of a run lie. It decides how fast they are at hand, and no byte of the output."""

from __future__ import annotations

from quantizers.architectures.sizes import Sizes
from quantizers.output.context import Place
from quantizers.plan.solve_memory import DeviceMemory
from quantizers.plan.states import between_bytes, recorded_bytes
from quantizers.system.host_memory import available

from .options import Options

SHARE_FOR_STATES = 0.5  # of the memory that is free: calibration states that need more lie in files


def places(
    sizes: Sizes, memory: DeviceMemory, rows: int, itemsize: int, options: Options, free: int | None = None
) -> tuple[Place, Place, int]:
    """On the device as far as `memory` has room for them, else in the host's memory where they fit, else in files.

    Args:
        rows: of the calibration set; of several machines each keeps a part of the states between the layers.
        itemsize: bytes of one element of a hidden state.
        free: bytes of memory that are free on every machine; None for what is free here.

    Returns:
        The place of the experts' inputs, that of the states between the layers, and the bytes of those in files.
    """
    inputs = 0 if memory.inputs else recorded_bytes(sizes, rows, itemsize)
    states = 0 if memory.states else between_bytes(sizes, -(-rows // options.team.nodes), itemsize)
    free = available() if free is None else free
    files = options.states == "files" or (options.states == "auto" and inputs + states > SHARE_FOR_STATES * free)
    other: Place = "files" if files else "memory"
    return other if inputs else "device", other if states else "device", inputs + states if files else 0
