"""Limits of the cgroups that this process is in: containers, jobs of SLURM, slices of systemd, pods.

    v1   one hierarchy for each controller: memory.limit_in_bytes, memory.usage_in_bytes; cpu.cfs_quota_us, _period_us
    v2   one for all: memory.max, memory.high, memory.current; cpu.max

A process may be in both (hybrid). Its own cgroup is the path in /proc/self/cgroup; /proc/self/mountinfo says where a
hierarchy is mounted, and from which of its cgroups on. Each cgroup up to there is a limit, so the least counts. psutil
knows no cgroups, and joblib's loky only the mount's root.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")
# Where hierarchies are mounted by convention, for machines whose mountinfo does not list them.
USUAL = {"memory": ("/sys/fs/cgroup/memory",), "cpu": ("/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/cpu")}
USUAL_UNIFIED = "/sys/fs/cgroup", "/sys/fs/cgroup/unified"
UNIFIED = ""  # stands for a controller in v2, as in /proc/self/cgroup


class Limit(NamedTuple):
    """A limit in bytes or cores, and what is left of it."""

    most: int
    left: int
    place: str  # its file, or another name of it; empty for the machine itself


def memory_limits(root: Path = ROOT) -> Iterator[Limit]:
    """The limits of the process's memory, in bytes. Cached files that were not used lately give way, so they are left.

    `memory.high` counts: from there on the kernel takes memory back, so that a process hardly moves. So does what v1
    says of cgroups above those that are mounted. What is "max", cannot be read or is no number is no limit.
    """
    for folder in _folders(root, UNIFIED, USUAL_UNIFIED):
        used = (_number(folder / "memory.current") or 0) - _statistics(folder).get("inactive_file", 0)
        for name in ("memory.max", "memory.high"):
            if (most := _number(folder / name)) is not None:
                yield Limit(most, most - used, _place(root, folder / name))
    for folder in _folders(root, "memory", USUAL["memory"]):
        statistics = _statistics(folder)
        used = (_number(folder / "memory.usage_in_bytes") or 0) - statistics.get("total_inactive_file", 0)
        if (most := _number(folder / "memory.limit_in_bytes")) is not None:
            yield Limit(most, most - used, _place(root, folder / "memory.limit_in_bytes"))
        if above := statistics.get("hierarchical_memory_limit"):
            yield Limit(above, above - used, _place(root, folder / "memory.stat"))


def cpu_limits(root: Path = ROOT) -> Iterator[Limit]:
    """The limits of the process's time on CPUs, in cores, rounded up."""
    files = [
        *([folder / "cpu.max"] for folder in _folders(root, UNIFIED, USUAL_UNIFIED)),
        *(
            [folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"]
            for folder in _folders(root, "cpu", USUAL["cpu"])
        ),
    ]
    for pair in files:
        words = " ".join(map(_text, pair)).split()
        if len(words) == 2 and all(map(_is_number, words)):
            cores = math.ceil(int(words[0]) / int(words[1]))
            yield Limit(cores, cores, _place(root, pair[0]))


# The folders of a process's cgroups ---------------------------------------------------------------------------------


def _folders(root: Path, controller: str, usual: tuple[str, ...]) -> list[Path]:
    """The folders of the process's own cgroup and of those above it in one hierarchy, as far as they are mounted."""
    own, mounts = _own(root, controller), _mounts(root, controller)
    # Another mount may show another container's cgroups. Without any the usual places are looked at.
    of_own = [mount for mount in mounts if own.is_relative_to(mount[0])] or mounts[:1]
    folders: dict[Path, None] = {}
    for start, place in of_own or [(PurePosixPath("/"), place) for place in usual]:
        top = root / place.lstrip("/")
        names = (own.relative_to(start) if own.is_relative_to(start) else own).parts
        names = tuple(name for name in names if name not in ("/", ".."))
        # What is above a container's own cgroup may be hidden, though its path is that of the machine.
        while names and not (top / names[0]).is_dir():
            names = names[1:]
        for count in range(len(names), -1, -1):
            folders[top.joinpath(*names[:count])] = None
    return list(folders)


def _own(root: Path, controller: str) -> PurePosixPath:
    """The path of the process's cgroup in a hierarchy; without a line for it, that in v2, or the root."""
    paths: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if path.startswith("/") and (controllers or number == "0"):
            paths |= dict.fromkeys(controllers.split(","), path)
    return PurePosixPath(paths.get(controller) or paths.get(UNIFIED) or "/")


def _mounts(root: Path, controller: str) -> list[tuple[PurePosixPath, str]]:
    """The mounts of a hierarchy: the cgroup that is the mount's root, and the folder where it is mounted."""
    mounts = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        is_unified = kinds[0] == "cgroup2" and controller == UNIFIED
        if is_unified or (kinds[0] == "cgroup" and controller in kinds[2].split(",")):
            mounts.append((PurePosixPath(_unescaped(fields[3])), _unescaped(fields[4])))
    return mounts


def _unescaped(text: str) -> str:
    """A path of mountinfo, where spaces, tabs, line ends and backslashes are octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


# Files ----------------------------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _is_number(text: str) -> bool:
    return re.fullmatch("0*[1-9][0-9]{0,29}", text) is not None


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if _is_number(text) else None


def _statistics(folder: Path) -> dict[str, int]:
    """The numbers in memory.stat."""
    pairs = (line.split() for line in _text(folder / "memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and _is_number(pair[1])}


def _place(root: Path, file: Path) -> str:
    return f"/{file.relative_to(root)}"
