"""Servers on this machine, against the versions whose rules are known: rows of `quantize doctor`."""

from __future__ import annotations

import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Protocol

from packaging.version import Version

from quantizers.commands.doctor import shown

from .engines import READ

SERVERS = {"vllm": ("vLLM", "vllm"), "sglang": ("SGLang", "sglang"), "kt-kernel": ("KTransformers", "kt")}


class Rows(Protocol):
    """The checks of a diagnosis, in their order."""

    def __len__(self) -> int:
        """Number of checks."""

    def add(self, what: str, state: str, remedy: str = "", /) -> None:
        """Add a check of `what`, and the state in which that is; it is ok if it needs no remedy."""


def look_for_servers(rows: Rows) -> None:
    """Servers that are found without importing them, against the versions whose rules the program knows."""
    before = len(rows)
    for distribution, (name, command) in SERVERS.items():
        version, place = _installed(distribution, command)
        if place:
            first, last = map(Version, READ[distribution])
            release = Version(version).release[: len(last.release)] if version else ()
            known = first.release <= release <= last.release
            read = f"; its rules are known of {first if first == last else f'{first} to {last}'}" * (not known)
            remedy = "" if known else "compare what it serves with `quantize serve-check`"
            rows.add(name, f"{version or 'version unknown'}, {place}{read}", remedy)
    if len(rows) == before:
        names = ", ".join(name for name, _ in SERVERS.values())
        rows.add("servers", f"none of {names}", "only serving needs one; install it in an environment of its own")


def _installed(distribution: str, command: str) -> tuple[str, str]:
    """Version and place of a server: in this environment, or in that of the command on PATH; empty if there is none."""
    command = shutil.which(command) or ""
    folders = Path(command).resolve().parent.parent.glob("lib/python3*/*-packages") if command else ()
    for place, path in (("in this environment", sys.path), (shown(command), [*map(str, folders)])):
        for name in (distribution, f"{distribution}-cpu"):  # which a build for CPUs may be called
            for installed in metadata.distributions(name=name, path=path):
                return installed.version, place
    return "", command and shown(command)
