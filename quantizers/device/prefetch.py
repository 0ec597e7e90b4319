"""Copies between a GPU and host memory: page-locked buffers, and a prefetch of the next tensors.

A prefetch runs on a stream of its own, beside the GPU's work, but after all work queued before it, so that its target
may be memory that earlier work still reads. Copies back to the host wait. On a CPU nothing is copied.
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
from itertools import accumulate
from typing import Any, TypeVar

import torch

Part = tuple[torch.Tensor, ...]
Key = TypeVar("Key")
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # targets and sources


def pin(buffer: torch.Tensor, device: torch.device) -> None:
    """Page-lock host memory for copies from and to a GPU, for the tensor's lifetime; does nothing for a CPU.

    It is registered in place, once: torch's own pool rounds sizes up to powers of two, and has no memory that several
    processes share. Where the driver refuses, one line is printed, and copies are slower.
    """
    if device.type != "cuda" or not buffer.nbytes:
        return
    address = buffer.data_ptr()
    runtime: Any = torch.cuda.cudart()
    failure = runtime.cudaHostRegister(address, buffer.nbytes, 0)
    if failure == runtime.cudaError.success:
        weakref.finalize(buffer, runtime.cudaHostUnregister, address).atexit = False
        return
    # CUDA keeps the refusal as this thread's last error, and torch would take it for that of the next kernel.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
    _print_refusal(str(runtime.cudaGetErrorString(failure)))


@cache
def _print_refusal(failure: str) -> None:
    print(
        f"copies to and from the device are slower than they could be: host memory cannot be locked ({failure}); see "
        "ulimit -l",
        file=sys.stderr,
    )


@dataclass(frozen=True)
class Copies:
    """Copies to a GPU in progress."""

    device: torch.device
    event: torch.cuda.Event

    def before_next_work(self) -> None:
        """Let all work that is queued from now on wait for them."""
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def wait(self) -> None:
        """Wait for them here, so that their sources may be overwritten."""
        self.event.synchronize()


def start_copies(pairs: Pairs, device: torch.device) -> Copies:
    """Begin to copy each source to its target on the GPU, after all work queued there so far.

    Both must stay alive, and the source unchanged, until the copies have been waited for.
    """
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
    return torch.cuda.Stream(torch.device("cuda", number))


def prefetched(parts: Sequence[Part], device: torch.device) -> Iterator[Part]:
    """Each part, of tensors (rows, …) of the same widths and dtypes, on the device in turn, while the next is copied.

    A double buffer on the device, as large as the largest part: a part is valid until the next one is asked for. Parts
    that are on the device already are returned as they are.
    """
    if all(_is_on(tensor, device) for part in parts for tensor in part):
        yield from parts
        return
    rows = max(len(part[0]) for part in parts)
    buffers = [tuple(tensor.new_empty(rows, *tensor.shape[1:], device=device) for tensor in part) for part in parts[:2]]

    def begin(number: int) -> tuple[Part, Copies]:
        part = parts[number]
        targets = tuple(buffer[: len(tensor)] for tensor, buffer in zip(part, buffers[number % 2], strict=True))
        return targets, start_copies(list(zip(targets, part, strict=True)), device)

    following: tuple[Part, Copies] | None = begin(0)
    try:
        for number in range(1, len(parts) + 1):
            current, following = following, begin(number) if number < len(parts) else None
            assert current is not None
            current[1].before_next_work()
            yield current[0]
    finally:
        if following is not None:  # interrupted: no other tensor may get this memory while it is written to
            following[1].before_next_work()


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type


class BufferPrefetch:
    """Copies of the host's two buffers to two on a device, in the order in which they are filled, one ahead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: deque[torch.Tensor] = deque()
        self._queued: deque[tuple[torch.Tensor, torch.Tensor, Copies]] = deque()

    def allocate(self, buffer: torch.Tensor) -> None:
        """Allocate as much of the device's memory as a buffer on the host has; called once for each."""
        self._free.append(buffer.new_empty(buffer.shape, device=self._device))

    def begin(self, source: torch.Tensor) -> None:
        """Begin to copy uint8 (N,); called by the thread that reads. `source` must not change until `take`."""
        target = self._free[0][: len(source)]
        self._free.rotate(1)
        self._queued.append((target, source, start_copies([(target, source)], self._device)))

    def take(self) -> torch.Tensor:
        """The next buffer's bytes on the device; its source may then be overwritten."""
        target, _, copies = self._queued.popleft()
        copies.wait()
        return target

    def stop(self) -> None:
        """Wait for all copies that were not taken, before other things get their memory, on either side."""
        while self._queued:
            self.take()


class PinnedBuffers:
    """A page-locked double buffer: one half may still be read while the other is filled."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._buffers = device, deque[torch.Tensor]()

    def next(self, size: int) -> torch.Tensor:
        """uint8 (size,) of the half that was not returned last."""
        buffer = self._buffers.popleft() if len(self._buffers) == 2 else None
        if buffer is None or len(buffer) < size:
            buffer = torch.empty(size, dtype=torch.uint8)
            pin(buffer, self._device)
        self._buffers.append(buffer)
        return buffer[:size]

    def copied(self, tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """Copies of some tensors in the next buffer; tensors on a CPU are given as they are. Waits for the device."""
        away = {key: tensor for key, tensor in tensors.items() if tensor.device.type != "cpu"}
        # Aligned for every dtype.
        starts = list(accumulate((math.ceil(tensor.nbytes / 8) * 8 for tensor in away.values()), initial=0))
        buffer = self.next(starts.pop())
        copies = dict(tensors)
        for (key, tensor), start in zip(away.items(), starts, strict=True):
            copies[key] = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[key].copy_(tensor)
        return copies


def to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Small tensors of one device, of any shapes and number types, on the CPU in float64; one synchronisation."""
    if not tensors:
        return {}
    flat = tensor_to_host(torch.cat([tensor.flatten().double() for tensor in tensors.values()]))
    parts = torch.split(flat, [math.prod(tensor.shape) for tensor in tensors.values()])
    return {name: numbers.view(tensors[name].shape) for name, numbers in zip(tensors, parts, strict=True)}


def tensor_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU: the only way in which the solver waits for a device."""
    return tensor.cpu()
