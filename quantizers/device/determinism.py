"""Bitwise reproducible computation on GPUs: deterministic algorithms, full float32, a fixed environment.

Sums made with atomics differ in the last bits from run to run, cuBLAS may choose another algorithm when its workspace
differs, and TF32 computes float32 products with 11 bits of mantissa; some images switch TF32 on for everything. Of a
CPU the number of threads and the instruction set decide the bits; both are in the fingerprint.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
    """Make this process compute on a GPU in a fixed order and in full precision. Call it before CUDA is used: then its
    libraries and torch's allocator read the environment variables.

    Raises:
        InputError: an environment variable rules it out.
        QuantizeError: torch did not take a setting.
    """
    import torch

    _refuse_undoing()
    os.environ.setdefault(WORKSPACE, WORKSPACES[0])
    # More memory would be lost between blocks otherwise; it decides no bit, and the user may have settings of his own.
    if torch.version.hip is None and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[-1]] = GROWING
    for setting in gpu_settings():
        setting.write(setting.value)
        if (value := setting.read()) != setting.value:
            raise QuantizeError(
                "",
                f"torch {torch.__version__}: {setting.name} is {value} after it was set to {setting.value}, so a GPU "
                "would not give the same bytes",
                "use --device cpu, or another version of torch",
            )


def _refuse_undoing() -> None:
    for name, consequence in UNDOING.items():
        if (value := os.environ.get(name, "")) not in OFF:
            raise InputError(f"{name}={value}", consequence, "unset it, or set it to 0")
    workspace = os.environ.get(WORKSPACE, WORKSPACES[0])
    if workspace not in WORKSPACES:
        raise InputError(
            f"{WORKSPACE}={workspace}",
            "cuBLAS does not promise the same bytes with it",
            f"unset it, or set it to {' or '.join(WORKSPACES)}",
        )


class Setting(NamedTuple):
    """One of torch's settings: its key in the fingerprint, the value for it, and how torch reads and sets it."""

    name: str
    value: bool | str
    read: Callable[[], bool | str]
    write: Callable[[Any], Any]


def gpu_settings() -> tuple[Setting, ...]:
    """torch's settings that decide the bits of a GPU's results.

    Two are defaults, unless TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, as in some images, or TORCH_BLAS_PREFER_CUBLASLT is set.
    """
    import torch

    def deterministic() -> bool:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        return torch.are_deterministic_algorithms_enabled() and not warns

    products = torch.backends.cuda.matmul
    reductions = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"
    # By default torch chooses between NVIDIA's libraries by the size of the problem, and differently in every version.
    # AMD's have other names, and not every build takes them.
    libraries = {"preferred_linalg_library": "cusolver", "preferred_blas_library": "cublas"}
    precision = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    return (
        Setting("deterministic_algorithms", True, deterministic, torch.use_deterministic_algorithms),
        # We never read uninitialized memory, and filling it takes time.
        _switched_off("fill_uninitialized_memory", torch.utils.deterministic, "fill_uninitialized_memory"),
        # The older of torch's two interfaces: an image's TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 has already used it, and
        # torch's products raise an error when both interfaces were used.
        Setting("float32_matmul_precision", "highest", *precision),
        _switched_off("cudnn_allow_tf32", torch.backends.cudnn, "allow_tf32"),
        *(_switched_off(name, products, name) for name in reductions),
        *(_library(*item) for item in libraries.items() if torch.version.hip is None),
    )


def _switched_off(name: str, owner: Any, attribute: str) -> Setting:
    return Setting(name, False, lambda: getattr(owner, attribute), lambda new: setattr(owner, attribute, new))


def _library(name: str, value: str) -> Setting:
    """A preferred library. torch answers with a member of an enumeration, such as _LinalgBackend.Cusolver."""
    import torch

    prefer = getattr(torch.backends.cuda, name)

    def read() -> str:
        return str(prefer()).rpartition(".")[2].lower()

    return Setting(name, value, read, prefer)


def settings_in_force() -> dict[str, bool | str]:
    """The values in force of all of `gpu_settings`, by name."""
    return {setting.name: setting.read() for setting in gpu_settings()}


@contextlib.contextmanager
def ordered() -> Iterator[None]:
    """Within the block, raise a QuantizeError of one line for an operation that torch refused as nondeterministic."""
    try:
        yield
    except RuntimeError as failure:
        operation, refused, _ = str(failure).partition(REFUSED)
        if not refused:
            raise
        raise QuantizeError(
            operation,
            "torch cannot do this in a fixed order on a GPU, so the bytes would not be the same again",
            "use --device cpu, or another version of torch",
        ) from failure
