"""Parts of a checkpoint on a device: while one is in use there, the next one crosses, as soon as it has been read.

Two pieces of the device's memory take turns, as the buffers on the host do, see checkpoint/ahead.py.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from quantizers.checkpoint.held import Held
from quantizers.device.crossing import Crossing, beside

if TYPE_CHECKING:
    import torch


class Brought:
    """What crosses to a device.

    Args:
        device: where parts are used; on a CPU they stay where they are.
        early: whether each crosses while the one before it is in use; else all that is asked for crosses at once.
    """

    def __init__(self, device: torch.device, *, early: bool) -> None:
        self._device, self._early = device, early
        self._rooms: deque[torch.Tensor] = deque()
        self._coming: deque[tuple[torch.Tensor, torch.Tensor, Crossing]] = deque()

    def make_room(self, buffer: torch.Tensor) -> None:
        """Take as much of the device's memory as a buffer on the host has; called once for each."""
        if self._early:
            self._rooms.append(buffer.new_empty(buffer.shape, device=self._device))

    def begin(self, part: Held) -> None:
        """Let a part cross; called in the order of parts, by whoever has just read one."""
        if self._early:
            assert part.buffer is not None
            room = self._rooms[0][: len(part.buffer)]
            self._rooms.rotate(1)
            self._coming.append((room, part.buffer, beside([(room, part.buffer)], self._device)))

    def take(self, part: Held) -> Held:
        """The part on the device, when its turn comes; its memory on the host is then not read any more."""
        if not self._early:
            return part.to(self._device)
        room, _, crossing = self._coming.popleft()
        crossing.finish()
        return part.to(self._device, room)

    def give_up(self) -> None:
        """Wait for what still crosses and nobody will take, before other things get its memory; here and there."""
        for *_, crossing in self._coming:
            crossing.finish()
        self._coming.clear()
