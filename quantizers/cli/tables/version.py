"""What `quantize --version` prints."""

from __future__ import annotations

from typing import Any

from quantizers.system.formatting import gib


def version_table(found: dict[str, Any]) -> str:
    """The program's version first, as scripts expect it; then what it runs on."""
    versions = dict(found["versions"])
    own, python, torch = (versions.pop(name) for name in ("moe-quantizers", "python", "torch"))
    built = [f"{word} {found[key]}" for key, word in (("cuda", "CUDA"), ("rocm", "ROCm")) if found[key]]
    return "\n".join(
        [
            f"quantize {own}",
            f"python {python}, torch {torch}, {built[0] if built else 'CPU build'}",
            ", ".join(f"{name} {version}" for name, version in versions.items()),
            *(_described(device) for device in found["devices"]),
        ]
    )


def _described(device: dict[str, Any]) -> str:
    """A device, and what computes there if it is a GPU."""
    kernels = [f"kernels: {device['kernels']}"] if "kernels" in device else []
    return ", ".join([f"{device['device']}: {device['name']}", gib(device["bytes"]), *kernels])
