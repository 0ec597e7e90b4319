"""Copies between a GPU and the host's memory: page-locked buffers, and a prefetch of what is used next.

A prefetch runs on a stream of its own, beside the GPU's work. It begins once all that was asked of the GPU before it is
done, so its target may be memory that this earlier work still reads. Copies back to the host are plain ones, and wait.
None of this decides a bit of a result. On a CPU nothing is copied.
"""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

Part = tuple[torch.Tensor, ...]
Key = TypeVar("Key")
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # targets and sources

_pinned: set[int] = set()  # first addresses


def pin(buffer: torch.Tensor, device: torch.device) -> None:
    """Page-lock host memory for copies from and to a GPU, as long as the tensor lives; does nothing for a CPU.

    Memory is registered in place: torch's own pool rounds sizes up to powers of two, and has no memory that several
    processes share. Where the driver refuses, as it does if a process may not lock so much, that is printed once, and
    copies are slower.

    Args:
        buffer: on the CPU, all of its storage.
    """
    address = buffer.data_ptr()
    if device.type != "cuda" or not buffer.nbytes or address in _pinned:
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # in torch
    failure = runtime.cudaHostRegister(address, buffer.nbytes, 0)
    if failure != runtime.cudaError.success:
        _print_why_slower(runtime.cudaGetErrorString(failure))
        # CUDA keeps the refusal as this thread's last error, and torch would take it for that of the next kernel.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)
        return
    weakref.finalize(buffer, runtime.cudaHostUnregister, address).atexit = False
    _pinned.add(address)
    weakref.finalize(buffer, _pinned.discard, address).atexit = False


@cache
def _print_why_slower(failure: str) -> None:
    print(
        f"copies to and from the device are slower than they could be: host memory cannot be locked ({failure}); see "
        "ulimit -l",
        file=sys.stderr,
    )


@dataclass(frozen=True)
class Copies:
    """Copies to a device that are under way; without an event they are done."""

    device: torch.device
    event: torch.cuda.Event | None = None

    def before_next_work(self) -> None:
        """Let all that is asked of the device from now on wait for them."""
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)

    def wait(self) -> None:
        """Wait for them here, so that their sources may be overwritten."""
        if self.event is not None:
            self.event.synchronize()


def start_copies(pairs: Pairs, device: torch.device) -> Copies:
    """Begin to copy each source to its target on the device, after all that was asked of the device so far.

    Both must stay alive, and the source unchanged, until the copies have been waited for.
    """
    if device.type != "cuda":
        for target, source in pairs:
            target.copy_(source)
        return Copies(device)
    device = torch.device("cuda", device.index or 0)
    stream = _copy_stream(device.index)
    stream.wait_stream(torch.cuda.current_stream(device))
    # The current device too: that of a new thread is the first GPU, to which torch would go back when it is done.
    with torch.cuda.device(device), torch.cuda.stream(stream):
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        return Copies(device, stream.record_event())


@cache
def _copy_stream(number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(torch.device("cuda", number))  # type: ignore[no-untyped-call]  # in torch


def prefetched(parts: Sequence[Part], device: torch.device) -> Iterator[Part]:
    """Each part on the device in its turn, while the next one is copied there.

    Two buffers on the device take turns, each as large as the largest part, so a part is valid until the next one is
    asked for. Tensors that are on the device already are given as they are.

    Args:
        parts: tensors (rows, …), as many in each part and of the same widths and dtypes.
    """
    if all(_is_on(tensor, device) for part in parts for tensor in part):
        yield from parts
        return
    rows, buffers = max(len(part[0]) for part in parts), list[Part]()
    coming: tuple[Part, Copies] | None = None

    def begin(number: int) -> tuple[Part, Copies]:
        part = parts[number]
        if len(buffers) < 2:
            buffers.append(tuple(_buffer_like(tensor, rows, device) for tensor in part))
        targets = tuple(
            own if _is_on(own, device) else buffer[: len(own)]
            for own, buffer in zip(part, buffers[number % 2], strict=True)
        )
        pairs = [(target, own) for target, own in zip(targets, part, strict=True) if not _is_on(own, device)]
        return targets, start_copies(pairs, device)

    try:
        for number in range(len(parts) + 1):
            here, coming = coming, begin(number) if number < len(parts) else None
            if here is not None:
                here[1].before_next_work()
                yield here[0]
    finally:
        if coming is not None:  # given up: nothing else may get this memory while it is written to
            coming[1].before_next_work()


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type


def _buffer_like(tensor: torch.Tensor, rows: int, device: torch.device) -> torch.Tensor:
    """Memory on the device for so many rows; none for what is there already."""
    if _is_on(tensor, device):
        return tensor
    return torch.empty(rows, *tensor.shape[1:], dtype=tensor.dtype, device=device)


class BufferPrefetch:
    """Copies the host's buffers to a device in the order in which they are filled, one ahead of its use.

    Two buffers on the device take turns, as two on the host do.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: deque[torch.Tensor] = deque()
        self._coming: deque[tuple[torch.Tensor, torch.Tensor, Copies]] = deque()

    def allocate(self, buffer: torch.Tensor) -> None:
        """Allocate as much of the device's memory as a buffer on the host has; called once for each."""
        self._free.append(buffer.new_empty(buffer.shape, device=self._device))

    def begin(self, source: torch.Tensor) -> None:
        """Copy what was read, uint8 (N,); called by the thread that reads. `source` is not changed until `take`."""
        target = self._free[0][: len(source)]
        self._free.rotate(1)
        self._coming.append((target, source, start_copies([(target, source)], self._device)))

    def take(self) -> torch.Tensor:
        """The next buffer's bytes on the device; its source may then be overwritten."""
        target, _, copies = self._coming.popleft()
        copies.wait()
        return target

    def stop(self) -> None:
        """Wait for all copies that were not taken, before other things get their memory, on either side."""
        while self._coming:
            self.take()


class PinnedBuffers:
    """Two page-locked buffers that take turns: one may still be read while the other is filled."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._buffers = device, deque[torch.Tensor]()

    def next(self, size: int) -> torch.Tensor:
        """So many bytes, uint8 (size,), of the buffer that was not given last."""
        buffer = self._buffers.popleft() if len(self._buffers) == 2 else None
        if buffer is None or len(buffer) < size:
            buffer = torch.empty(size, dtype=torch.uint8)
            pin(buffer, self._device)
        self._buffers.append(buffer)
        return buffer[:size]

    def copied(self, tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """Copies of some tensors in the next buffer; tensors on a CPU are given as they are. Waits for the device."""
        away = {key: tensor for key, tensor in tensors.items() if tensor.device.type != "cpu"}
        ends = list[int]()
        for tensor in away.values():
            ends.append((ends[-1] if ends else 0) + math.ceil(tensor.nbytes / 8) * 8)  # aligned for every dtype
        buffer = self.next(ends[-1] if ends else 0)
        found = dict(tensors)
        for (key, tensor), start in zip(away.items(), [0, *ends], strict=False):
            found[key] = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            found[key].copy_(tensor)
        return found


def to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors on the CPU, in float64, which holds whole numbers up to 2^53; one synchronisation for all.

    Args:
        tensors: small ones, of any number type and shape, all on one device; there may be none.
    """
    if not tensors:
        return {}
    flat = tensor_to_host(torch.cat([tensor.flatten().double() for tensor in tensors.values()]))
    parts = torch.split(flat, [math.prod(tensor.shape) for tensor in tensors.values()])
    return {name: part.view(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}


def tensor_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU. The solver reads all numbers that it looks at through here."""
    return tensor.cpu()
