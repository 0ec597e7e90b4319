"""What this program runs on: versions of the libraries that decide its output, and the devices that torch finds."""

from __future__ import annotations

import os
from typing import Any

from .devices import versions
from .fused import kernels


def environment() -> dict[str, Any]:
    """Versions, CUDA or ROCm as torch was built with it, and every device with its memory in bytes and, of a GPU, what
    computes there, see `fused.kernels`."""
    import torch

    built = {"cuda": torch.version.cuda, "rocm": torch.version.hip}
    cards = []
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        own = {"kernels": kernels(torch.device("cuda", number))}
        cards.append({"device": f"cuda:{number}", "name": card.name, "bytes": card.total_memory} | own)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cpu = {"device": "cpu", "name": f"{len(os.sched_getaffinity(0))} cores", "bytes": memory}
    return {"versions": versions(), **built, "devices": [*cards, cpu]}
