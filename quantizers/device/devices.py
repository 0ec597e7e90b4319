"""What computes: the device, its threads, and what of both decides bits."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

from quantizers.architectures.architecture import Sizes
from quantizers.system.errors import InputError, OutputError
from quantizers.team.ranks import ALONE, Ranks

if TYPE_CHECKING:
    import torch

SMALL_LAYER = 20_000_000  # weights of a layer's experts, below which one thread is faster than several


def choose_device(name: str, ranks: Ranks = ALONE) -> torch.device:
    """`auto` is the first GPU where there is one, else the CPU; of several processes each has a GPU of its own.

    For a GPU the process is also set to give the same bytes again, see `determinism.settle_gpu`.

    Raises:
        InputError: no such device here, or an environment in which a GPU's bytes would not be the same again.
    """
    import torch

    from .determinism import settle_gpu

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and ranks.several:
        name = f"cuda:{ranks.local}"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("not a device that is supported")
        torch.zeros(1, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # events and streams are made there unless something else is said
    except (RuntimeError, AssertionError) as failure:
        raise InputError(f"--device {name}: {str(failure).splitlines()[0]}; give cpu, cuda or cuda:N") from None
    if device.type == "cuda":
        settle_gpu()  # no library of CUDA's has been asked for anything yet
    return device


def use_threads(sizes: Sizes, begun_with: int | None = None, ranks: Ranks = ALONE) -> None:
    """Set torch's threads: one where a layer has few weights, else one a core; OMP_NUM_THREADS overrules.

    With matrices this small, waiting for each other costs threads more than they win. On a CPU the number of
    threads decides bits, so what was begun with a number goes on with it, however it is started: torchrun sets
    OMP_NUM_THREADS to 1 where nothing is set, and that 1 is nobody's wish.

    Args:
        begun_with: the threads of the unfinished run or evaluation that goes on here; None for a new one.

    Raises:
        OutputError: OMP_NUM_THREADS asks for another number than that.
    """
    import torch

    given = os.environ.get("OMP_NUM_THREADS")
    if begun_with is None:
        if given is None:
            small = 3 * sizes["experts"] * sizes["hidden"] * sizes["width"] < SMALL_LAYER
            torch.set_num_threads(1 if small else len(os.sched_getaffinity(0)))
        return
    wished = given is not None and not (ranks.several and given == "1")
    if wished and given != str(begun_with):
        raise OutputError(
            f"OMP_NUM_THREADS is {given}, and what goes on here was begun with {begun_with}, which decides bits; "
            f"unset it, or set OMP_NUM_THREADS={begun_with}"
        )
    torch.set_num_threads(begun_with)


def forward_dtype(device: torch.device) -> torch.dtype:
    """float32 on a CPU, bfloat16 on an accelerator."""
    import torch

    return torch.float32 if device.type == "cpu" else torch.bfloat16


def device_limit(device: torch.device, processes: int = 1) -> int:
    """Bytes to be used of a device when nothing else is said: most of its memory, which processes on a CPU share.

    Of all its memory, not of what is free now: on a GPU the number of experts solved at a time decides
    bits, and a run that goes on must find the same.
    """
    import torch

    if device.type == "cuda":
        return int(0.85 * torch.cuda.get_device_properties(device).total_memory)
    return int(0.85 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / processes)


def fingerprint(device: torch.device) -> dict[str, Any]:
    """What of the machine decides bits: the device and the versions of what computes; on a CPU how it computes, too."""
    from importlib.metadata import version

    import torch

    from .determinism import WORKSPACE

    shared = {"torch": torch.__version__, "transformers": version("transformers")}
    if device.type != "cpu":
        own = {"cuda": torch.version.cuda, "cublas_workspace": os.environ.get(WORKSPACE)}
        return {"device": torch.cuda.get_device_name(device)} | own | shared
    return {
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    } | shared


def machine(device: torch.device) -> dict[str, Any]:
    """For reports: the fingerprint, and the CPU's threads also where they decide nothing."""
    import torch

    return fingerprint(device) | {"threads": torch.get_num_threads()}


def versions() -> dict[str, str]:
    """Versions of what decided the result."""
    from importlib.metadata import version

    names = ("moe-quantizers", "torch", "transformers", "compressed-tensors", "llmcompressor", "safetensors")
    return {name: version(name) for name in names} | {"python": platform.python_version()}
