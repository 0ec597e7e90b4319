"""Whether this program's Triton kernels (solve/kernels.py) run on a device, and how they are launched."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from threading import Lock
from typing import Any

import torch

from quantizers.system.errors import first_line

INTERPRETER = "TRITON_INTERPRET"  # Triton's own variable: 1 runs kernels in Python, on tensors of a CPU
SMALLEST = 8, 0  # compute capability: the kernels are compiled for it, and for newer ones, in the tests
# How they are compiled. Fused, a product and the sum after it would be rounded once, where torch's operations round
# twice.
OPTIONS = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": False}
_LAUNCHING = Lock()
_disabled: set[str] = set()


def can_launch(device: torch.device) -> bool:
    """Whether kernels can be launched on a device; on a CPU only if Triton's interpreter was asked for."""
    if device.type == "cpu":
        return os.environ.get(INTERPRETER) == "1" and find_spec("triton") is not None
    return device.type == "cuda" and not why_not(device)


def use_kernel(name: str, device: torch.device) -> bool:
    """Whether a kernel is used on a device: it can be launched there, and its verification did not disable it."""
    return name not in _disabled and can_launch(device)


def disable_kernel(name: str) -> None:
    """Use a kernel's eager twin from now on, in this process. Call it before other threads compute."""
    _disabled.add(name)


def launch(kernel: Any, grid: tuple[int, ...], on: torch.Tensor, *arguments: Any, **options: Any) -> None:
    """Launch a kernel on a tensor's device and its current stream.

    One thread launches at a time, since Triton compiles and launches for one alone. It takes the thread's current
    device, in a new thread the first GPU.
    """
    with _LAUNCHING, torch.cuda.device_of(on):
        kernel[grid](*arguments, **(OPTIONS | options))


def kernels(device: torch.device) -> str:
    """The fingerprint's entry for the inner loops on a GPU: Triton's version, or torch and the reason."""
    if reason := why_not(device):
        return f"torch ({reason})"
    import triton

    without = f" without {', '.join(sorted(_disabled))}" if _disabled else ""
    return f"triton {triton.__version__}{without}"


@cache
def why_not(device: torch.device) -> str:
    """Reason why no kernels can be launched on a GPU; empty if they can."""
    if torch.version.hip is not None:
        return "not tried on AMD's GPUs"
    if torch.cuda.get_device_capability(device) < SMALLEST:
        return f"compute capability below {SMALLEST[0]}.{SMALLEST[1]}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from triton.runtime import driver

        driver.active.get_current_device()  # its first use builds the launcher, with the machine's C compiler
    except Exception as failure:  # Triton's, the compiler's, or the driver's
        return f"Triton cannot launch: {first_line(failure)}"
    return ""
