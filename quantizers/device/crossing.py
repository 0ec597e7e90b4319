"""Copies between a GPU and the host's memory, beside the GPU's own work: on one stream of their own.

A copy begins once all that was asked of the GPU before it is done, and only whoever needs its bytes waits for it. So
while one block of rows is worked on, the next one is brought, and the results of the one before go back. Copies decide
no bit of a result. They are as fast as the bus from and to memory that was pinned, see pinned.py; the driver has to
look after all others, and may make this process wait.

    for rows in ahead(parts, device):       # the next ones cross meanwhile
        with behind(device) as put: …       # what is put crosses meanwhile
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Protocol

import torch

Part = tuple[torch.Tensor, ...]
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # targets and sources


class Crossing(Protocol):
    """Copies that were asked for together."""

    def wait(self) -> None:
        """Let whatever is asked of the device from now on wait for them."""

    def finish(self) -> None:
        """Wait for them here, as whoever reads on the host what came there has to."""


class Stream(Protocol):
    """Makes copies, one after the other."""

    def copy(self, pairs: Pairs) -> Crossing:
        """Begin to copy to each target what its source, of the same shape and dtype, holds once all that was asked of
        the device so far is done. Both must stay alive until the device waits for the crossing, or it is finished."""


class _Arrived:
    """Of copies that are made at once."""

    def wait(self) -> None:
        """Nothing is under way."""

    finish = wait


ARRIVED: Crossing = _Arrived()


class _AtOnce:
    """Where there is no stream, as on a CPU."""

    def copy(self, pairs: Pairs) -> Crossing:
        for target, source in pairs:
            target.copy_(source)
        return ARRIVED


class _CudaCrossing:
    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def finish(self) -> None:
        self._event.synchronize()


class _Cuda:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # in torch

    def copy(self, pairs: Pairs) -> Crossing:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # The current device too: that of a new thread is the first GPU, to which torch would go back when it is done.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return _CudaCrossing(self._device, self._stream.record_event())


def stream_of(device: torch.device) -> Stream:
    """The stream that copies from and to a device are made on."""
    return _of_gpu(device.index or 0) if device.type == "cuda" else _AtOnce()


@cache
def _of_gpu(number: int) -> Stream:
    return _Cuda(torch.device("cuda", number))


def beside(pairs: Pairs, device: torch.device) -> Crossing:
    """Begin copies from or to a device, see `Stream.copy`."""
    return stream_of(device).copy(pairs)


def ahead(parts: Sequence[Part], device: torch.device) -> Iterator[Part]:
    """Each part on the device in its turn, while the next one crosses.

    Two pieces of the device's memory take turns, each as large as the largest part. So what is given is valid until the
    next part is asked for. Tensors that lie on the device already are given as they are.

    Args:
        parts: tensors (rows, …), as many in each part and of the same widths and dtypes.
    """
    if all(_there(tensor, device) for part in parts for tensor in part):
        yield from parts
        return
    most = max(len(part[0]) for part in parts)
    rooms: list[Part] = []
    coming: tuple[Part, Crossing] | None = None

    def bring(number: int) -> tuple[Part, Crossing]:
        part = parts[number]
        if len(rooms) < 2:
            rooms.append(tuple(_room(tensor, most, device) for tensor in part))
        arriving = tuple(
            own if _there(own, device) else room[: len(own)] for own, room in zip(part, rooms[number % 2], strict=True)
        )
        pairs = [(to, own) for to, own in zip(arriving, part, strict=True) if not _there(own, device)]
        return arriving, beside(pairs, device)

    try:
        for number in range(len(parts) + 1):
            here, coming = coming, bring(number) if number < len(parts) else None
            if here is not None:
                here[1].wait()
                yield here[0]
    finally:
        if coming is not None:  # given up: nothing else may get this memory while it is written to
            coming[1].wait()


@contextlib.contextmanager
def behind(device: torch.device) -> Iterator[Callable[[Pairs], None]]:
    """Gives a function that takes targets and what is to go there from the device, beside what is asked of it next.

    Called once for each part, since what comes after a call waits until the call before it has been dealt with. When
    the block ends, all of it is there.
    """
    last: tuple[Crossing, Pairs] = ARRIVED, ()

    def put(pairs: Pairs) -> None:
        nonlocal last
        leaving = []
        for target, made in pairs:
            if _there(target, device):
                target.copy_(made)
            else:
                leaving.append((target, made.to(target.dtype)))
        if leaving:
            crossing = beside(leaving, device)
            # Memory that is freed here is used again for what comes next, which so waits until the last ones have left.
            last[0].wait()
            last = crossing, leaving

    try:
        yield put
    finally:
        last[0].finish()


def _there(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type


def _room(like: torch.Tensor, rows: int, device: torch.device) -> torch.Tensor:
    """Memory on the device for so many rows; none for what lies there already."""
    return like if _there(like, device) else torch.empty(rows, *like.shape[1:], dtype=like.dtype, device=device)
