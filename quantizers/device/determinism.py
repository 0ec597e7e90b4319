"""What makes a GPU give the same bytes again: torch's deterministic algorithms, and float32 products in float32.

A GPU's threads come in any order. Sums that they add up with atomics differ in the last bits from run to run, cuBLAS
may take another algorithm where its workspace is another, and TF32 leaves a float32 product with 11 bits: some images
switch that on for everything. All of it is settled here, once, before the first number is computed. What torch cannot
do in a fixed order it then refuses, which `ordered` puts in one line of ours.

On a CPU nothing of this is needed: there threads and instructions decide bits, and both are in the fingerprint.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from quantizers.system.errors import InputError, QuantizeError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")  # the two with which cuBLAS promises the same bits; the first is the faster one
TF32 = "NVIDIA_TF32_OVERRIDE"  # above all settings of a program
REFUSED = " does not have a deterministic implementation"  # as torch says it, after the operation's name


def settle_gpu() -> None:
    """Let this process compute on a GPU in a fixed order and in full precision; before its first product.

    Raises:
        InputError: the environment rules it out.
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
    # Nothing reads uninitialized memory, and to fill it takes time. (A property that torch adds to its module.)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # The older of torch's two ways to say so: an image's TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 has used it already, and
    # torch refuses a mixture of both when it multiplies.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


@contextlib.contextmanager
def ordered() -> Iterator[None]:
    """Within it, an operation that torch refuses because it has no fixed order is one line of ours.

    Raises:
        QuantizeError: which names the operation.
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
