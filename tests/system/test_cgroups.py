"""Limits of cgroups: trees of files as containers, SLURM, systemd and Kubernetes lay them out; the least limit counts.

The lines of /proc/self/cgroup and mountinfo have the form of cgroups(7) and proc_pid_mountinfo(5).
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from quantizers.system import cores, host_memory
from quantizers.system.cgroups import cpu_limits, memory_limits

GB = 10**9
MEMORY, CPU, UNIFIED = "sys/fs/cgroup/memory", "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup"
NO_LIMIT = "9223372036854771712"  # of v1
Files = Mapping[str, str]


def mounted(root: str, point: str, kind: str = "cgroup2", options: str = "rw") -> str:
    return f"31 23 0:28 {root} /{point} rw,nosuid,relatime shared:9 - {kind} {kind} {options}\n"


def v1(root: str, folder: str = "sys/fs/cgroup") -> str:
    memory = mounted(root, f"{folder}/memory", "cgroup", "rw,memory")
    return memory + mounted(root, f"{folder}/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct")


def of_memory(folder: str, limit: object, used: int = 0, cached: int = 0) -> Files:
    """v1: what is used and cached in GB."""
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used * GB}\n",
        f"{folder}/memory.stat": f"cache 1\ninactive_file 7\ntotal_inactive_file {cached * GB}\n",
    }


def unified(folder: str, limit: object, used: int = 0, cached: int = 0) -> Files:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used * GB}\n",
        f"{folder}/memory.stat": f"anon 1\ninactive_file {cached * GB}\nfile 2\n",
    }


def quota(folder: str, quota: int, period: int = 100_000) -> Files:
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


SLURM = "slurm/uid_1000/job_7/step_0/task_0"
SCOPE = "system.slice/slurmstepd.scope/job_7/step_0/user/task_0"
POD = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice"
USER = "user.slice/user-1000.slice/user@1000.service/app.slice/run-r1.scope"
# By layout: /proc/self/cgroup, mountinfo, files, GB in all and free of 64 and 60, cores of 32.
LAYOUTS: dict[str, tuple[str, str, Files, int, int, int]] = {
    "none": ("", "", {}, 64, 60, 32),
    "without a limit, v2": ("0::/\n", mounted("/", UNIFIED), {f"{UNIFIED}/cpu.max": "max 100000\n"}, 64, 60, 32),
    "without a limit, v1": (
        "4:memory:/\n3:cpu,cpuacct:/\n", v1("/"), {**of_memory(MEMORY, NO_LIMIT, 3), **quota(CPU, -1)}, 64, 60, 32,
    ),
    "Docker v1": (
        "4:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n", v1("/docker/ab"),
        {**of_memory(MEMORY, 4 * GB, 3, 2), **quota(CPU, 150_000)}, 4, 3, 2,
    ),
    "Docker v1, whose mount says that it is the root": (
        "4:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n", v1("/"),
        {**of_memory(MEMORY, 4 * GB, 1), **quota(CPU, 50_000)}, 4, 3, 1,
    ),
    "Docker v2": (
        "0::/\n", mounted("/", UNIFIED), {**unified(UNIFIED, 4 * GB, 3, 2), f"{UNIFIED}/cpu.max": "250000 100000\n"},
        4, 3, 3,
    ),
    "Docker v2 in the machine's namespace": (
        "0::/system.slice/docker-ab.scope\n", mounted("/system.slice/docker-ab.scope", UNIFIED),
        {**unified(UNIFIED, 4 * GB, 1), f"{UNIFIED}/cpu.max": "10000 100000\n"}, 4, 3, 1,
    ),
    "a container on a full machine": ("0::/\n", mounted("/", UNIFIED), unified(UNIFIED, 63 * GB, 1), 63, 60, 32),
    "a full container": ("0::/\n", mounted("/", UNIFIED), unified(UNIFIED, 4 * GB, 5), 4, 0, 32),
    "SLURM v1": (
        f"4:memory:/{SLURM}\n3:cpu,cpuacct:/\n", v1("/"),
        {**of_memory(f"{MEMORY}/{SLURM}", NO_LIMIT, 1), **of_memory(f"{MEMORY}/slurm/uid_1000/job_7", 32 * GB, 2)},
        32, 30, 32,
    ),
    "SLURM v2": (
        f"0::/{SCOPE}\n", mounted("/", UNIFIED),
        {**unified(f"{UNIFIED}/{SCOPE}", "max", 1),
         **unified(f"{UNIFIED}/system.slice/slurmstepd.scope/job_7", 32 * GB, 4, 1)}, 32, 29, 32,
    ),
    "systemd-run -p MemoryHigh in a user's slice": (
        f"0::/{USER}\n", mounted("/", UNIFIED),
        {f"{UNIFIED}/{USER}/memory.high": f"{8 * GB}\n", f"{UNIFIED}/{USER}/memory.current": f"{GB}\n",
         **unified(f"{UNIFIED}/user.slice", 16 * GB, 12), f"{UNIFIED}/user.slice/cpu.max": "400000 100000\n",
         f"{UNIFIED}/{USER}/cpu.max": "max 100000\n"}, 8, 4, 4,
    ),
    "Kubernetes v1": (
        f"4:memory:/{POD}/cri-1.scope\n3:cpu,cpuacct:/{POD}/cri-1.scope\n", v1(f"/{POD}/cri-1.scope"),
        {**of_memory(MEMORY, NO_LIMIT, 1), **quota(CPU, 1_600_000),
         f"{MEMORY}/memory.stat": f"hierarchical_memory_limit {16 * GB}\ntotal_inactive_file 0\n"}, 16, 15, 16,
    ),
    "Kubernetes v2, with a sidecar's limit on the pod": (
        f"0::/{POD}/cri-1.scope\n", mounted("/", UNIFIED),
        {**unified(f"{UNIFIED}/{POD}/cri-1.scope", 16 * GB, 1), **unified(f"{UNIFIED}/{POD}", 20 * GB, 8),
         f"{UNIFIED}/{POD}/cpu.max": "800000 100000\n"}, 16, 12, 8,
    ),
    "nested containers, v1": (
        "4:memory:/docker/ab/docker/cd\n3:cpu,cpuacct:/docker/ab/docker/cd\n", v1("/docker/ab"),
        {**of_memory(f"{MEMORY}/docker/cd", 8 * GB, 1), **of_memory(MEMORY, 6 * GB, 3),
         **quota(f"{CPU}/docker/cd", 400_000), **quota(CPU, 200_000)}, 6, 3, 2,
    ),
    "a mount that begins above the namespace": (
        "0::/\n", mounted("/../..", UNIFIED), unified(UNIFIED, 9 * GB, 1), 9, 8, 32,
    ),
    "a process outside of its namespace": (
        "0::/../job\n", mounted("/..", UNIFIED), unified(f"{UNIFIED}/job", 9 * GB, 1), 9, 8, 32,
    ),
    "a path of which the mount shows the end": (
        "0::/machine/pod/inner\n", mounted("/", UNIFIED), unified(f"{UNIFIED}/inner", 9 * GB, 1), 9, 8, 32,
    ),
    "a cgroup that was removed": (
        "0::/job/step (deleted)\n", mounted("/", UNIFIED), unified(f"{UNIFIED}/job", 9 * GB, 1), 9, 8, 32,
    ),
    "hybrid": (
        "4:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/other\n0::/job\n",
        v1("/") + mounted("/", "sys/fs/cgroup/unified")
        + mounted("/", "sys/fs/cgroup/systemd", "cgroup", "rw,name=systemd"),
        {**of_memory(f"{MEMORY}/job", 8 * GB, 1), "sys/fs/cgroup/unified/job/cpu.max": "300000 100000\n",
         **quota(f"{CPU}/job", 400_000), **of_memory("sys/fs/cgroup/systemd/other", GB)}, 8, 7, 3,
    ),
    "another container's cgroup is mounted too": (
        "0::/docker/ab\n", mounted("/docker/cd", "mnt/other") + mounted("/docker/ab", UNIFIED),
        {**unified("mnt/other", 1 * GB, 1), **unified(UNIFIED, 4 * GB, 1)}, 4, 3, 32,
    ),
    "elsewhere, in a folder with a space": (
        "0::/a b:c\n", mounted("/", r"cg\040roup"), unified("cg roup/a b:c", 4 * GB, 1), 4, 3, 32,
    ),
    "without mountinfo, v1": (
        "4:memory:/job\n", "",
        {**of_memory(f"{MEMORY}/job", 4 * GB, 1), **quota("sys/fs/cgroup/cpu", 200_000)}, 4, 3, 2,
    ),
    "without mountinfo, v2": ("0::/job\n", "", unified(f"{UNIFIED}/job", 4 * GB, 1), 4, 3, 32),
    "damaged": (
        "nonsense\n0::\n:::\n4:memory\n", "1 2\n - cgroup2\n" + mounted("/", UNIFIED),
        {**unified(UNIFIED, "4 GB"), f"{UNIFIED}/cpu.max": "0 0\n", f"{UNIFIED}/memory.high": "-1\n"}, 64, 60, 32,
    ),
    "a limit without what is used of it": (
        "0::/\n", mounted("/", UNIFIED), {f"{UNIFIED}/memory.max": f"{4 * GB}"}, 4, 4, 32,
    ),
}  # fmt: skip


def lay_out(root: Path, own: str, mounts: str, files: Files) -> None:
    for name, text in {"proc/self/cgroup": own, "proc/self/mountinfo": mounts, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 64 GB, 60 of them free, and 32 cores; the root of its files."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GB, available=60 * GB))
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: range(32))
    monkeypatch.setattr(host_memory, "memory_limits", lambda: memory_limits(tmp_path))
    monkeypatch.setattr(cores, "cpu_limits", lambda: cpu_limits(tmp_path))
    return tmp_path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_least_limit_of_all_cgroups_counts(machine: Path, layout: str) -> None:
    own, mounts, files, total, free, count = LAYOUTS[layout]
    lay_out(machine, own, mounts, files)
    assert (host_memory.total(), host_memory.available(), cores.cores()) == (total * GB, free * GB, count)


def test_a_file_that_cannot_be_read_is_no_limit(machine: Path) -> None:
    lay_out(machine, "0::/\n", mounted("/", UNIFIED), {f"{UNIFIED}/cpu.max": "\0", f"{UNIFIED}/memory.max/x": ""})
    (machine / UNIFIED / "memory.high").write_bytes(b"\xff\xfe")
    assert (host_memory.total(), cores.cores()) == (64 * GB, 32)


def test_a_limit_names_its_file(machine: Path) -> None:
    lay_out(machine, *LAYOUTS["SLURM v2"][:3])
    least = min(host_memory.limits(), key=lambda limit: limit.most)
    assert least.place == "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/memory.max"
    lay_out(machine, *LAYOUTS["Docker v1"][:3])
    assert min(cores.limits(), key=lambda limit: limit.most).place == "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us"


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_a_limit_of_the_shell_counts(machine: Path, monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    """As `ulimit -v` and `ulimit -d` set it; what the process has of it counts as used."""
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(vms=3 * GB, data=2 * GB))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    given = {kind: (10 * GB, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: given.get(which, (resource.RLIM_INFINITY,) * 2))
    left = 7 if kind == resource.RLIMIT_AS else 8
    assert (host_memory.total(), host_memory.available()) == (10 * GB, left * GB)
