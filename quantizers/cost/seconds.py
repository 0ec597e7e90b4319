"""How long a counted visit takes on a device, with what a run does beside it: reading, hashing and writing files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from .counted_team import ALONE, Ranks
from .visit import CountedVisit
from .work import Work

DISK, HASH = 1e9, 1.5e9  # bytes a second that are read or written, and that one thread hashes


class Device(Protocol):
    """Whatever work takes time on."""

    @property
    def name(self) -> str:
        """As it is printed."""

    @property
    def readers(self) -> int:
        """Threads of its machine that read files at once."""

    def seconds(self, work: Work) -> float:
        """How long a phase takes."""


@dataclass(frozen=True)
class LayerSeconds:
    """Of a visit to one layer.

    Attributes:
        phases: of the device's work, one after the other.
        reading: the next layer, hashed as it arrives, beside all of them.
        writing: the shard, hashed before and after that, beside those of the next layer.
        files: all that, for each layer, with as many processes as there are.
        layer: from one layer to the next.
    """

    phases: Mapping[str, float]
    reading: float
    writing: float
    files: float
    layer: float


def layer_seconds(visit: CountedVisit, device: Device, ranks: Ranks = ALONE, disk: float = DISK) -> LayerSeconds:
    """What a visit takes on a device.

    A run reads the next layer, and writes the one before, beside the work on a layer. (On a CPU it writes within the
    visit, beside the passes of the texts, which take longer there.) Several processes read and hash each their share of
    a layer, as far as they are on one machine, and those of the first write whole shards in turn.

    Args:
        ranks: by whom the visit was counted.
        disk: bytes a second that are read from or written to files.
    """
    phases = {name: device.seconds(work) for name, work in visit.phases.items()}
    reading = reading_seconds(visit.source, disk, max(device.readers, ranks.here))
    writing = writing_seconds(visit.shard, disk, max(device.readers // ranks.here, 1))
    files = max(reading, writing / ranks.here, (visit.source + visit.shard) / disk)
    return LayerSeconds(phases, reading, writing, files, max(sum(phases.values()), files))


def reading_seconds(size: int, disk: float = DISK, readers: int = 1) -> float:
    """To read so many bytes of the source, while threads hash what has arrived."""
    return max(size / disk, size / HASH / readers)


def writing_seconds(size: int, disk: float = DISK, readers: int = 1) -> float:
    """To hash a shard's tensors in memory, write it, and read it back, from the page cache, to hash file and tensors.

    The file is hashed by one thread, the tensors by all.
    """
    return size / disk + size / HASH * (1 / readers + max(1, 2 / readers))


def proving_seconds(size: int, disk: float = DISK, readers: int = 1) -> float:
    """To read the whole output once more from the disk, and hash it by so many threads, see `system.at_once`."""
    return max(size / disk, (size / disk + size / HASH) / readers)
