"""Products of float32 that keep 11 bits of each factor (TF32): for numbers from which no byte follows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# Compute capability of the cards on which they are several times as fast as whole ones: A100, H100 and H200, B200 and
# B300. On those of workstations and desktops they are about as fast.
FASTER = (8, 0), (9, 0), (10, 0), (10, 3)


def worthwhile(device: torch.device) -> bool:
    """Whether rough products are so much faster on a device that all may be ranked by them first."""
    return capability(device) in FASTER


def capability(device: torch.device) -> tuple[int, int] | None:
    """Of one of NVIDIA's cards; None for all else."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


@contextlib.contextmanager
def rough_products() -> Iterator[None]:
    """Within the block products of float32 are rough on a GPU; for all that is done there meanwhile, by any thread.

    Everywhere else they are whole, see gpu_settings.py.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
