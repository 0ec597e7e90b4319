"""torch's settings that decide the bits of a GPU's results: one table, applied once and read back for the fingerprint.

Most differ from torch's defaults. Two have the same value there, but an environment variable can change them before
this program begins: TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which some images set, and TORCH_BLAS_PREFER_CUBLASLT.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from quantizers.system.errors import QuantizeError


class Setting(NamedTuple):
    """One of torch's settings.

    Attributes:
        name: torch's own as far as it is clear alone; the key in the fingerprint.
        value: what it is set to.
        read: asks torch for the value in force.
        write: sets it.
    """

    name: str
    value: bool | str
    read: Callable[[], bool | str]
    write: Callable[[Any], Any]


def _attribute(owner: Any, name: str, value: bool, called: str = "") -> Setting:
    """A setting that is an attribute of one of torch's modules; `called` where its name alone says too little."""
    return Setting(called or name, value, lambda: getattr(owner, name), lambda new: setattr(owner, name, new))


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _library(name: str, value: str) -> Setting:
    """A preferred library. torch answers with a member of an enumeration, such as _LinalgBackend.Cusolver."""

    def prefer(*library: str) -> Any:
        return getattr(torch.backends.cuda, name)(*library)

    def read() -> str:
        return str(prefer()).rpartition(".")[2].lower()

    return Setting(name, value, read, prefer)


_products = torch.backends.cuda.matmul
_LIBRARIES = (_library("preferred_linalg_library", "cusolver"), _library("preferred_blas_library", "cublas"))

SETTINGS = (
    Setting("deterministic_algorithms", True, _deterministic, torch.use_deterministic_algorithms),
    # We never read uninitialized memory, and filling it takes time.
    _attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
    # The older of torch's two interfaces: an image's TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 has already used it, and
    # torch's products raise an error when both interfaces were used.
    Setting(
        "float32_matmul_precision", "highest", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    _attribute(torch.backends.cudnn, "allow_tf32", False, called="cudnn_allow_tf32"),
    _attribute(_products, "allow_bf16_reduced_precision_reduction", False),
    _attribute(_products, "allow_fp16_reduced_precision_reduction", False),
    # By default torch chooses between NVIDIA's libraries by the size of the problem, and differently in every version.
    # AMD's have other names, and not every build takes them.
    *(() if torch.version.hip else _LIBRARIES),
)


def apply_settings() -> None:
    """Set all of SETTINGS.

    Raises:
        QuantizeError: torch did not take one of them.
    """
    for setting in SETTINGS:
        setting.write(setting.value)
        if (found := setting.read()) != setting.value:
            raise QuantizeError(
                f"torch {torch.__version__}: {setting.name} is {found} after it was set to {setting.value}, so a GPU "
                "would not give the same bytes; use --device cpu, or another version of torch"
            )


def settings_in_force() -> dict[str, bool | str]:
    """What torch says of every one of SETTINGS, by name."""
    return {setting.name: setting.read() for setting in SETTINGS}
