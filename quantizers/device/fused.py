"""Whether this program's kernels can be launched on a device, see forward/fused and solve/fused, and how; where they
cannot, torch's own operations do the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

INTERPRETER = "TRITON_INTERPRET"  # Triton's own variable: 1 runs kernels in Python, on tensors of a CPU
SMALLEST = 8, 0  # compute capability: the kernels are compiled for it, and for newer ones, in the tests
# How they are compiled. Fused, a product and the sum after it would be rounded once, where torch's operations round
# twice.
OPTIONS = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": False}
WIDER = {"num_warps": 4}  # instead, where each number is moved once
_LAUNCHING = Lock()


def fused(device: torch.device) -> bool:
    """Whether kernels are launched there.

    On a CPU they are if Triton's interpreter was asked for; on the meta device they always are, since what is counted
    there is the work of a GPU.
    """
    if device.type == "cpu":
        return os.environ.get(INTERPRETER) == "1" and find_spec("triton") is not None
    return device.type == "meta" or not why_not(device)


def launched(kernel: Any, grid: tuple[int, ...], there: torch.Tensor, **options: Any) -> Callable[..., None]:
    """A kernel, to be called with its arguments: it is launched on the device where a tensor lies.

    By one thread at a time: Triton compiles and launches for one alone, and the audit of a layer is another thread's
    than the next layer's work. Triton takes the thread's current device, which for a new thread is the first GPU.
    """

    def launch(*arguments: Any, **named: Any) -> None:
        import torch

        with _LAUNCHING, torch.cuda.device_of(there):  # type: ignore[no-untyped-call]  # in torch
            kernel[grid](*arguments, **named, **options)

    return launch


def kernels(device: torch.device) -> str:
    """For reports, of a GPU: what computes there, and if it is not Triton, why not."""
    if reason := why_not(device):
        return f"torch ({reason})"
    import triton

    return f"triton {triton.__version__}"


@cache
def why_not(device: torch.device) -> str:
    """Why no kernels can be launched on a GPU; empty if they can."""
    import torch

    if torch.version.hip is not None:
        return "not tried on AMD's cards"
    if torch.cuda.get_device_capability(device) < SMALLEST:
        return f"compute capability below {SMALLEST[0]}.{SMALLEST[1]}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from triton.runtime import driver

        driver.active.get_current_device()  # its first use builds the part that launches, with the machine's C compiler
    except Exception as failure:  # Triton's, the compiler's, or the driver's
        return f"Triton cannot launch: {str(failure).strip().splitlines()[0] if str(failure).strip() else failure!r}"
    return ""
