"""How long a counted visit takes on a device, with what a run does beside it: reading, hashing and writing files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from .visit import CountedVisit
from .work import Work

DISK, HASH = 1e9, 1.5e9  # bytes a second that are read or written, and hashed
# The shard of a layer is written while these are under way.
BESIDE_WRITING = ("propagate", "candidate", "compare")


class Device(Protocol):
    """Whatever work takes time on."""

    @property
    def name(self) -> str:
        """As it is printed."""

    def seconds(self, work: Work) -> float:
        """How long a phase takes."""


@dataclass(frozen=True)
class LayerSeconds:
    """Of a visit to one layer.

    Attributes:
        phases: of the device's work, one after the other.
        reading: the next layer, hashed as it arrives, beside all of them.
        writing: the shard, hashed before and after that, beside those in BESIDE_WRITING.
        layer: from one layer to the next.
    """

    phases: Mapping[str, float]
    reading: float
    writing: float
    layer: float


def layer_seconds(visit: CountedVisit, device: Device) -> LayerSeconds:
    """What a visit takes on a device."""
    phases = {name: device.seconds(work) for name, work in visit.phases.items()}
    reading, writing = reading_seconds(visit.source), writing_seconds(visit.shard)
    waited_for = max(0.0, writing - sum(phases.get(name, 0.0) for name in BESIDE_WRITING))
    return LayerSeconds(phases, reading, writing, max(reading, sum(phases.values()) + waited_for))


def reading_seconds(size: int) -> float:
    """To read so many bytes of the source, and hash them."""
    return size / DISK + size / HASH


def writing_seconds(size: int) -> float:
    """To hash a shard in memory, write it, and read it back, from the page cache, to hash file and tensors."""
    return size / DISK + 3 * size / HASH


def proving_seconds(size: int) -> float:
    """To read the whole output once more from the disk, and hash it."""
    return size / DISK + size / HASH
