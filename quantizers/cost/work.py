"""What was counted: operations with their bytes and arithmetic, by phase, and what crosses the bus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

# The rate that arithmetic is done at; "" where an operation has none worth counting.
Arithmetic = Literal["", "bfloat16", "tf32", "float32", "float64", "factorization"]


@dataclass(frozen=True)
class Operation:
    """One operation on a device, as torch dispatches it.

    Attributes:
        name: of the operation, without its overload.
        launches: kernels that it takes.
        read, written: bytes of device memory.
        flops: multiplications and additions, each counted alone.
        kind: the rate at which these are done.
        turns: parts that wait for each other, however little each is.
    """

    name: str
    launches: int
    read: int
    written: int
    flops: int = 0
    kind: Arithmetic = ""
    turns: int = 0


@dataclass
class Work:
    """Of one phase, or of several together.

    Attributes:
        operations: how often each was done.
        views: operations that only look at memory in another way: no launch, but time of the process that asks.
        syncs: how often a number on the device was waited for.
        to_device, to_host: bytes copied.
        pinned: of those bytes, how many went from or to pinned memory of the host, see device/pinned.py.
        beside: of those again, how many crossed beside the device's work, see device/crossing.py.
        copies: number of those copies.
        host_bytes: read and written by operations on the host's own memory.
        sent, received: bytes passed on from and to this process, and which of both pass `between` machines.
        broadcasts, rounds: how often tensors were passed on, and how often all processes waited for each other's words.
        peak: the most bytes that were alive on the device.
    """

    operations: Counter[Operation] = field(default_factory=Counter)
    views: int = 0
    syncs: int = 0
    to_device: int = 0
    to_host: int = 0
    pinned: int = 0
    beside: int = 0
    copies: int = 0
    host_bytes: int = 0
    sent: int = 0
    received: int = 0
    between: int = 0
    broadcasts: int = 0
    rounds: int = 0
    peak: int = 0

    @property
    def launches(self) -> int:
        """Kernels launched."""
        return sum(operation.launches * times for operation, times in self.operations.items())

    @property
    def read(self) -> int:
        """Bytes read of device memory."""
        return sum(operation.read * times for operation, times in self.operations.items())

    @property
    def written(self) -> int:
        """Bytes written to device memory."""
        return sum(operation.written * times for operation, times in self.operations.items())

    @property
    def flops(self) -> dict[str, int]:
        """Arithmetic by its kind."""
        found = Counter[str]()
        for operation, times in self.operations.items():
            if operation.flops:
                found[operation.kind] += operation.flops * times
        return dict(sorted(found.items()))

    def add(self, other: Work, times: int = 1) -> None:
        """Add what was done elsewhere, as often as given."""
        for operation, count in other.operations.items():
            self.operations[operation] += count * times
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name) * times)
        self.peak = max(self.peak, other.peak)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: numbers, and the operations by name."""
        by_name = Counter[str]()
        for operation, times in self.operations.items():
            by_name[operation.name] += times
        return {
            "launches": self.launches,
            "bytes_read": self.read,
            "bytes_written": self.written,
            "flops": self.flops,
            "views": self.views,
            "synchronisations": self.syncs,
            "bytes_to_device": self.to_device,
            "bytes_to_host": self.to_host,
            "bytes_pinned": self.pinned,
            "bytes_beside": self.beside,
            "copies": self.copies,
            "host_bytes": self.host_bytes,
            "bytes_sent": self.sent,
            "bytes_received": self.received,
            "bytes_between_machines": self.between,
            "broadcasts": self.broadcasts,
            "rounds": self.rounds,
            "peak_bytes": self.peak,
            "operations": dict(by_name.most_common()),
        }


SUMS = tuple(own.name for own in fields(Work) if own.name not in ("operations", "peak"))


def together(parts: Iterable[Work]) -> Work:
    """All of them as one."""
    whole = Work()
    for part in parts:
        whole.add(part)
    return whole


def times(phases: Mapping[str, Work], factor: int) -> dict[str, Work]:
    """The same done `factor` times."""
    result: dict[str, Work] = {}
    for name, work in phases.items():
        result[name] = Work()
        result[name].add(work, factor)
    return result
