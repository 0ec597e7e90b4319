"""Choice of device, threads and allocator, and a fingerprint of everything about them that decides bits."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.system.cores import THREADS, cores, threads_asked
from quantizers.system.errors import InputError, OutputError, first_line
from quantizers.system.extras import lacking
from quantizers.system.host_memory import available, total
from quantizers.system.version import __version__, files_digest

from .determinism import LT_WORKSPACE, WORKSPACE, settings_in_force, settle_gpu
from .triton_support import kernels

SMALL_LAYER = 20_000_000  # weights in a layer's experts; below this one thread is faster than several
# glibc's mallopt: M_ARENA_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h, and their values.
MALLOC_OPTIONS = (-8, 1), (-3, 4 * 2**20), (-1, 64 * 2**20)


def choose_device(name: str, dist: ProcessGroup = SINGLE_PROCESS) -> torch.device:
    """The device of a name, settled by `settle_gpu`: `auto` is the first GPU if there is one, else the CPU.

    Several processes get a GPU each, and are connected.

    Raises:
        InputError: there is no such device, or an environment variable makes the GPU nondeterministic.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and dist.is_distributed:
        name = f"cuda:{dist.local_rank}"
    if wrong := device_problem(name):
        problem, remedies = wrong
        raise InputError(f"--device {name}", problem, ", or ".join(remedies))
    device = torch.device(name)
    if device.type == "cuda":
        settle_gpu()  # so far CUDA was only asked for the number of GPUs
    try:
        torch.zeros(1, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # the default device for events and streams
    except (RuntimeError, AssertionError) as failure:
        raise InputError(
            f"--device {name}", first_line(failure), "give another device, or look at it with nvidia-smi"
        ) from None
    dist.connect(device)
    return device


def device_problem(name: str) -> tuple[str, list[str]] | None:
    """The problem with a device's name on this machine, and its remedies; None if it can be used."""
    if name == "cpu":
        return None
    form = re.fullmatch(r"cuda(?::(\d+))?", name)
    if form is None:
        return "only the CPU and GPUs of NVIDIA and AMD are supported", ["give cpu, cuda, cuda:N or auto"]
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a build for the CPU alone", ["install one for GPUs", "give cpu"]
    count = torch.cuda.device_count()
    if not count:
        look = "see whether nvidia-smi lists one and what CUDA_VISIBLE_DEVICES says"
        return "torch finds no GPU", [look, "give cpu"]
    if int(form[1] or 0) >= count:
        if count == 1:
            return "torch finds one GPU", ["give cuda:0"]
        return f"torch finds {count} GPUs", [f"give one of cuda:0 to cuda:{count - 1}"]
    return None


def is_accelerator(device: torch.device) -> bool:
    """Whether work is launched there and waited for: large batches are quicker, reading a number is a synchronisation,
    and products of bfloat16 with float32 sums exist. The order and the shapes of the work depend on this alone.
    """
    return device.type != "cpu"


def use_threads(facts: Architecture, begun_with: int | None = None, dist: ProcessGroup = SINGLE_PROCESS) -> None:
    """Set torch's threads: one for a layer with few weights, else one per core. OMP_NUM_THREADS takes precedence.

    On a CPU the number of threads decides bits, so a run or evaluation that is resumed keeps the number that it was
    begun with. torchrun sets OMP_NUM_THREADS=1 if it is unset: resumed with several processes, that 1 is ignored.

    Raises:
        InputError: OMP_NUM_THREADS is no number of threads.
        OutputError: it asks for another number than `begun_with`.
    """
    asked = threads_asked()
    if begun_with is None:
        small = facts.num_experts * facts.expert_numbers < SMALL_LAYER
        torch.set_num_threads(asked or (1 if small else cores()))
        return
    chosen = asked is not None and not (dist.is_distributed and asked == 1)
    if chosen and asked != begun_with:
        raise OutputError(
            "",
            f"{THREADS} is {asked}, but the unfinished work here was begun with {begun_with} threads, and their "
            "number decides bits",
            f"unset it, or set {THREADS}={begun_with}",
        )
    torch.set_num_threads(begun_with)


def use_one_arena() -> None:
    """Let glibc's allocator use one arena, and return freed blocks of 4 MiB and more at once; nothing without glibc.

    By default it keeps freed blocks of up to 32 MB in an arena for every thread: the peak memory of a layer grew by a
    sixth over 24 layers. Smaller blocks stay in the heap, since a newly mapped one costs a page fault for every 4 KiB.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for parameter, value in MALLOC_OPTIONS:
            mallopt(parameter, value)


def release_free_memory() -> None:
    """Return the free memory between small blocks to the system; nothing without glibc."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def forward_dtype(device: torch.device) -> torch.dtype:
    """float32 on a CPU, bfloat16 on an accelerator."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def device_limit(device: torch.device, processes: int = 1) -> int:
    """Default bound on a device's memory in bytes: 90 % of what is free there now; on a CPU half, divided among the
    processes, since hidden states and the layers that are read and written are in the same memory. So it is where CPU
    and GPU share their memory, and there CUDA counts the page cache as taken, which the kernel would give away.
    """
    if device.type == "cuda" and not torch.cuda.get_device_properties(device).is_integrated:
        return int(0.9 * torch.cuda.mem_get_info(device)[0])
    return int(0.5 * available() / processes)


def fingerprint(device: torch.device) -> dict[str, Any]:
    """Everything that decides bits on this machine: device, versions of libraries, and settings. Threads, driver,
    amount of memory and allocator decide nothing on a GPU.
    """
    libraries = {"torch": torch.__version__, "transformers": version("transformers")}
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        return {"device": "cpu", "threads": torch.get_num_threads(), "cpu_capability": capability} | libraries
    gpu = torch.cuda.get_device_properties(device)
    return {
        "device": gpu.name,
        "multiprocessors": gpu.multi_processor_count,
        "compute_capability": f"{gpu.major}.{gpu.minor}",
        "cuda": torch.version.cuda,
        "cublas": _package_version("cublas"),
        "cusolver": _package_version("cusolver"),
        "cublas_workspace": os.environ.get(WORKSPACE),
        "cublaslt_workspace": os.environ.get(LT_WORKSPACE),
        "kernels": kernels(device),
        **settings_in_force(),
        **libraries,
    }


def _package_version(library: str) -> str | None:
    """The version of one of NVIDIA's libraries, from its package; None in images that build torch themselves."""
    if torch.version.cuda is None:
        return None
    major = int(torch.version.cuda.partition(".")[0])
    try:
        return version(f"nvidia-{library}" if major >= 13 else f"nvidia-{library}-cu{major}")
    except PackageNotFoundError:
        return None


def machine(device: torch.device) -> dict[str, Any]:
    """For reports: the fingerprint, and the CPU threads even on a GPU, where they do not decide bits."""
    return fingerprint(device) | {"threads": torch.get_num_threads()}


def versions() -> dict[str, str]:
    """Versions of this program, its files' digest, and versions of packages and Python that decided the result."""
    packages = ["torch", "transformers", "compressed-tensors", "llmcompressor", "safetensors"]
    if lacking("llmcompressor"):
        packages.remove("llmcompressor")
    return {
        "moe-quantizers": __version__,
        "moe-quantizers files": files_digest(),
        **{name: version(name) for name in packages},
        "python": platform.python_version(),
    }


def environment() -> dict[str, Any]:
    """Versions, torch's CUDA or ROCm, and every device: its memory in bytes and, of a GPU, `triton_support.kernels`."""
    cpu = {"device": "cpu", "name": f"{cores()} cores", "bytes": total()}
    return {"versions": versions(), "cuda": torch.version.cuda, "rocm": torch.version.hip, "devices": [*gpus(), cpu]}


def gpus() -> list[dict[str, Any]]:
    """List all GPUs with their names, their memory in bytes, and `triton_support.kernels`."""
    listed = []
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        entry = {"device": f"cuda:{number}", "name": gpu.name, "bytes": gpu.total_memory}
        listed.append(entry | {"kernels": kernels(torch.device("cuda", number))})
    return listed
