"""Packages that only some of the work needs. Each is an extra of the installation, see pyproject.toml."""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {"matplotlib": "pictures", "gguf": "imatrix", "py3langid": "languages", "llmcompressor": "llmcompressor"}


def lacking(package: str) -> str:
    """The line that says that a package of `EXTRAS` is not installed, with the remedy; empty if it is."""
    if find_spec(package) is not None:
        return ""
    return f"{package} is not installed; `pip install 'moe-quantizers[{EXTRAS[package]}]'`"
