"""Settings that make a GPU compute the same bytes every time: deterministic algorithms, and no TF32.

The threads of a GPU run in any order. Sums made with atomics differ in the last bits from run to run, cuBLAS may
choose another algorithm when its workspace differs, and TF32 computes float32 products with 11 bits of mantissa; some
images switch TF32 on for everything. `settle_gpu` fixes all of this once, before the first computation. torch then
refuses operations that have no fixed order; `ordered` turns that refusal into a one-line message.

A CPU needs none of this: there the number of threads and the instruction set decide the bits, and the fingerprint
contains both.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from quantizers.system.errors import InputError, QuantizeError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")  # the two for which cuBLAS promises the same bits; the first is faster
TF32 = "NVIDIA_TF32_OVERRIDE"  # overrides every setting that a program makes
REFUSED = " does not have a deterministic implementation"  # torch's error message after the operation's name


def settle_gpu() -> None:
    """Make this process compute on a GPU in a fixed order and in full precision. Call it before the first product.

    Raises:
        InputError: an environment variable rules it out.
    """
    import torch

    override = os.environ.get(TF32, "0")
    if override not in ("", "0"):
        raise InputError(f"{TF32}={override}: float32 products would keep 11 bits; unset it, or set it to 0")
    workspace = os.environ.setdefault(WORKSPACE, WORKSPACES[0])
    if workspace not in WORKSPACES:
        raise InputError(
            f"{WORKSPACE}={workspace}: cuBLAS does not promise the same bytes with it; unset it, or set it to "
            f"{' or '.join(WORKSPACES)}"
        )
    torch.use_deterministic_algorithms(True)
    memory: Any = torch.utils.deterministic  # a module to which torch adds the property, unseen by type checkers
    memory.fill_uninitialized_memory = False  # we never read uninitialized memory, and filling it takes time
    # The older of torch's two interfaces: an image's TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 has already used it, and
    # torch's products raise an error when both interfaces were used.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


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
