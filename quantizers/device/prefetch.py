"""Memory of the host that a GPU reads and writes by itself: a copy is then as fast as the bus.

From and to any other memory the driver copies twice, by way of a small buffer of its own. So the buffers of a layer are
registered, and the hidden states that lie in host memory. Memory is registered where it lies, and not taken from
torch's pool for this: that rounds sizes up to powers of two, and has nothing that several processes see.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

from .kind import accelerated

if TYPE_CHECKING:
    import torch

_pinned: set[int] = set()  # first addresses


def pin(buffer: torch.Tensor, device: torch.device) -> None:
    """Let a device copy from and to this memory, as long as the tensor lives; on a CPU this does nothing.

    Where the driver refuses, as it does if a process may not lock so much memory, that is said once; copies are slower.

    Args:
        buffer: on the CPU, all of its storage.
        device: whose copies these will be. On the meta device it is only noted, for who counts.
    """
    address = buffer.data_ptr()
    if not accelerated(device) or not buffer.nbytes or address in _pinned:
        return
    if device.type != "meta":
        import torch

        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # in torch
        failure = runtime.cudaHostRegister(address, buffer.nbytes, 0)
        if failure != runtime.cudaError.success:
            _say_why_slower(runtime.cudaGetErrorString(failure))
            # CUDA keeps the refusal as this thread's last error, and torch would take it for that of the next kernel.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
            return
        weakref.finalize(buffer, runtime.cudaHostUnregister, address).atexit = False
    _pinned.add(address)
    weakref.finalize(buffer, _pinned.discard, address).atexit = False


@cache
def _say_why_slower(failure: str) -> None:
    """Once: the buffers of every layer are refused alike."""
    print(
        f"copies to and from the device are slower than they could be: host memory cannot be locked ({failure}); see "
        "ulimit -l",
        file=sys.stderr,
    )


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in memory that was pinned here."""
    return tensor.untyped_storage().data_ptr() in _pinned


class Turns:
    """Two pieces of pinned memory that take turns: what is in one may still be read while the other is filled.

    Args:
        device: whose copies go there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[torch.Tensor] = []

    def room(self, size: int) -> torch.Tensor:
        """So many bytes, uint8 (size,), of the piece that was not given last."""
        import torch

        piece = self._pieces.pop(0) if len(self._pieces) == 2 else None
        if piece is None or len(piece) < size:
            piece = torch.empty(size, dtype=torch.uint8)
            pin(piece, self._device)
        self._pieces.append(piece)
        return piece[:size]
