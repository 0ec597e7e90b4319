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


def test_without_a_container_it_is_the_machines(machine: Path) -> None:
    assert host_memory.available() == 8 * GB


def test_a_container_without_a_limit_has_the_machines(machine: Path) -> None:
    container(machine, "max", 3 * GB, 0)
    assert host_memory.available() == 8 * GB


@pytest.mark.parametrize(
    ("used", "cached", "free"), [(3 * GB, 0, GB), (3 * GB, 2 * GB, 3 * GB), (5 * GB, 0, 0), (0, 0, 4 * GB)]
)
def test_a_container_has_what_is_left_of_its_limit(machine: Path, used: int, cached: int, free: int) -> None:
    """Cached files that were not used lately give way."""
    container(machine, str(4 * GB), used, cached)
    assert host_memory.available() == free


def test_a_large_container_on_a_full_machine(machine: Path) -> None:
    container(machine, str(64 * GB), GB, 0)
    assert host_memory.available() == 8 * GB
