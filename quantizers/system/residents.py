"""How many units of experts have their sums in the device's memory at a time: as many as fit, fewer once they do not.

It decides how often the rows are read, and no byte of the output: with one unit at a time a layer is the same as with
all at once.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass

from .errors import QuantizeError
from .formatting import gib


@dataclass
class Residents:
    """One number for a whole run, which only ever becomes smaller.

    Attributes:
        count: units whose sums may be held at a time, at least 1.
        unit: experts of a unit, for messages.
        needed: bytes that one unit at a time needs, as far as was foreseen.
    """

    count: int
    unit: int
    needed: int

    @classmethod
    def all_of(cls, experts: int) -> Residents:
        """Without a limit, whatever the units of these experts are."""
        return cls(experts, 1, 0)

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)

    def share(self, units: int) -> int:
        """How many of so many waiting units come first, so that all sweeps have equally many: not 5, 5, 5 and 1."""
        sweeps = -(-units // self.count)
        return -(-units // max(sweeps, 1))

    def shrink(self) -> None:
        """After the device's memory was full: half as many from now on, with one line that says so.

        Raises:
            QuantizeError: it was one already.
        """
        if self.count <= 1:
            raise QuantizeError(
                f"the device's memory is full with the sums of one unit of {self.unit} experts at a time, for which "
                f"{gib(self.needed)} were foreseen; free memory there, or give a smaller --device-memory (hidden "
                "states then lie elsewhere), a larger device or --device cpu, and the same command again"
            )
        self.count //= 2
        print(
            f"the device's memory was full: from now on the sums of {self.count} unit{'s' * (self.count > 1)} of "
            f"{self.unit} experts are held at a time; the bytes stay the same",
            file=sys.stderr,
            flush=True,
        )
