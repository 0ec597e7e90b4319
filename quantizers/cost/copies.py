"""Copies that cross beside the work on a layer, counted: a stream of device/crossing.py that is not there."""

from __future__ import annotations

from quantizers.device.crossing import Crossing, Pairs

from .counting import Counting
from .work import Work


class CountedStream:
    """Counts copies where they are waited for: that is what they cross beside."""

    def __init__(self, counting: Counting) -> None:
        self._counting = counting

    def copy(self, pairs: Pairs) -> Crossing:
        """See `device.crossing.Stream`."""
        with self._counting.aside() as copies:
            for target, source in pairs:
                target.copy_(source)
        return _Counted(self._counting, copies)


class _Counted:
    def __init__(self, counting: Counting, copies: Work) -> None:
        self._counting, self._copies = counting, copies

    def wait(self) -> None:
        self._counting.book(self._copies)
        self._copies = Work()

    def finish(self) -> None:
        self._copies.syncs += 1
        self.wait()
