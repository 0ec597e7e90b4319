"""What makes a GPU compute the same bytes every time: deterministic algorithms, whole float32, a fixed environment.

The threads of a GPU run in any order. Sums made with atomics differ in the last bits from run to run, cuBLAS may
choose another algorithm when its workspace differs, and TF32 computes float32 products with 11 bits of mantissa; some
images switch TF32 on for everything. `settle_gpu` fixes all of this in one place, before CUDA is used: environment
variables that it keeps, sets or refuses, and torch's own settings, in gpu_settings.py. torch then refuses operations
that have no fixed order; `ordered` turns that refusal into a one-line message.

A CPU needs none of this: there the number of threads and the instruction set decide the bits, and the fingerprint
contains both.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from quantizers.system.errors import InputError, QuantizeError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")  # the two for which cuBLAS promises the same bits; the first is faster
LT_WORKSPACE = "CUBLASLT_WORKSPACE_SIZE"  # any size gives the same bits again, but maybe other ones than another size
# torch's allocator knows all three; the last is the one that every version from 2.10 on takes without a warning.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
GROWING = "expandable_segments:True"  # blocks of many sizes would leave gaps between segments of fixed size
OFF = ("", "0")
UNDOING = {
    "NVIDIA_TF32_OVERRIDE": "float32 products would keep 11 bits",  # overrides every setting that a program makes
    "CUBLAS_EMULATE_SINGLE_PRECISION": "float32 products would be put together from products of bfloat16",
    "CUBLAS_EMULATE_DOUBLE_PRECISION": "float64 products would be put together from products of integers",
    "PYTORCH_TUNABLEOP_ENABLED": "torch would choose kernels by their speed, and so other ones another time",
    "DISABLE_ADDMM_CUDA_LT": "some products would be computed by another library",
}
REFUSED = " does not have a deterministic implementation"  # torch's error message after the operation's name


def settle_gpu() -> None:
    """Make this process compute on a GPU in a fixed order and in full precision. Call it before CUDA is used.

    CUDA's libraries and torch's allocator read the environment variables when they are first used.

    Raises:
        InputError: an environment variable rules it out.
        QuantizeError: torch did not take a setting.
    """
    refuse_undoing()
    os.environ.setdefault(WORKSPACE, WORKSPACES[0])
    settle_allocator()
    from .gpu_settings import apply_settings

    apply_settings()


def refuse_undoing() -> None:
    """Refuse environment variables by which a GPU would not compute the same bytes.

    Raises:
        InputError: the variable, its value and the remedy.
    """
    for name, consequence in UNDOING.items():
        if (value := os.environ.get(name, "")) not in OFF:
            raise InputError(f"{name}={value}: {consequence}; unset it, or set it to 0")
    workspace = os.environ.get(WORKSPACE, WORKSPACES[0])
    if workspace not in WORKSPACES:
        raise InputError(
            f"{WORKSPACE}={workspace}: cuBLAS does not promise the same bytes with it; unset it, or set it to "
            f"{' or '.join(WORKSPACES)}"
        )


def settle_allocator() -> None:
    """Let torch's allocator extend its segments on NVIDIA's GPUs, unless the user has settings of his own.

    It decides how much memory is lost between blocks, and no bit of a result.
    """
    import torch

    if torch.version.hip is None and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[-1]] = GROWING


@contextlib.contextmanager
def ordered() -> Iterator[None]:
    """Within the block, replace torch's error about a nondeterministic operation with a one-line message.

    Raises:
        QuantizeError: torch refused an operation; the message names it.
    """
    try:
        yield
    except RuntimeError as failure:
        operation, refused, _ = str(failure).partition(REFUSED)
        if not refused:
            raise
        raise QuantizeError(
            f"{operation}: torch cannot do this in a fixed order on a GPU, so the bytes would not be the same again; "
            "use --device cpu, or another version of torch"
        ) from failure
