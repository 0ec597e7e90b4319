"""Packages that only some of the work needs. Each is an extra of the installation, see pyproject.toml."""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {"matplotlib": "pictures", "gguf": "imatrix", "py3langid": "languages", "llmcompressor": "llmcompressor"}


def lacking(package: str) -> tuple[str, str] | None:
    """Problem and remedy where a package of `EXTRAS` is not installed; None if it is."""
    if find_spec(package) is not None:
        return None
    return f"{package} is not installed", f"`pip install 'moe-quantizers[{EXTRAS[package]}]'`"
