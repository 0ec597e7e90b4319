"""Free memory is the machine's, or the container's if that is less."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from quantizers.system import host_memory

GB = 10**9


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 8 GB free; the folder of its container's files."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GB))
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    return tmp_path


def container(folder: Path, limit: str, used: int, cached: int) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\nfile 2\n")


@pytest.mark.parametrize(
    ("limit", "used", "cached", "free"),
    [
        ("max", 3, 0, 8),  # a container without a limit
        ("64", 1, 0, 8),  # a large container on a full machine
        ("4", 3, 0, 1),
        ("4", 3, 2, 3),  # cached files that were not used lately give way
        ("4", 5, 0, 0),
    ],
)
def test_a_container_has_the_rest_of_its_limit(machine: Path, limit: str, used: int, cached: int, free: int) -> None:
    container(machine, limit if limit == "max" else f"{limit}{'0' * 9}", used * GB, cached * GB)
    assert host_memory.available() == free * GB


def test_without_a_container_it_is_the_machines(machine: Path) -> None:
    assert host_memory.available() == 8 * GB
