"""Copies that are made as late as they may be, or at once: what is right with both is right in between."""

from __future__ import annotations

import threading
from collections import deque

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from quantizers.device import prefetch
from quantizers.device.prefetch import Pairs


class Delayed:
    """Makes copies in their order, each as soon as somebody waits for it or for a later one.

    It keeps no memory alive, as a GPU does not.

    Attributes:
        copied: how many tensors.
        most: the most copies that were ever on their way.
    """

    def __init__(self) -> None:
        self.copied = self.most = self._asked = 0
        self._waiting: deque[tuple[int, list[tuple[_Place, _Place]]]] = deque()
        self._lock = threading.Lock()

    def start(self, pairs: Pairs, device: torch.device) -> _Late:
        for target, source in pairs:
            assert target.shape == source.shape
            assert target.dtype == source.dtype
        with self._lock:
            self._asked += 1
            self._waiting.append((self._asked, [(_Place(target), _Place(source)) for target, source in pairs]))
            self.most = max(self.most, len(self._waiting))
            return _Late(self, self._asked)

    def until(self, number: int) -> None:
        """Make all copies up to one of them."""
        with self._lock:
            while self._waiting and self._waiting[0][0] <= number:
                for target, source in self._waiting.popleft()[1]:
                    target.tensor().copy_(source.tensor())
                    self.copied += 1

    @property
    def under_way(self) -> int:
        """Copies that nobody has waited for so far."""
        return len(self._waiting)


class _Place:
    """Where a tensor is, as long as somebody else keeps that memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage, self._dtype = StorageWeakRef(tensor.untyped_storage()), tensor.dtype
        self._where = tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        assert storage is not None, "memory was given back while it was copied"
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._where)


class _Late:
    def __init__(self, copies: Delayed, number: int) -> None:
        self._copies, self._number = copies, number

    def wait(self) -> None:
        self._copies.until(self._number)

    before_next_work = wait


class AtOnce(Delayed):
    """Makes each copy when it is asked for."""

    def start(self, pairs: Pairs, device: torch.device) -> _Late:
        made = super().start(pairs, device)
        made.wait()
        return made


class Hosts:
    """Tensors that count as memory of the host, though the device is this CPU."""

    def __init__(self) -> None:
        self._places: set[int] = set()

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let all memory of a tensor count; gives it back."""
        self._places.add(tensor.untyped_storage().data_ptr())
        return tensor

    def is_on(self, tensor: torch.Tensor, device: torch.device) -> bool:
        """Whether a tensor is on the device."""
        return tensor.untyped_storage().data_ptr() not in self._places


def delay(monkeypatch: pytest.MonkeyPatch, copies: Delayed) -> Hosts:
    """Copy by these, between the CPU and what is then said to be the host's memory."""
    hosts = Hosts()
    monkeypatch.setattr(prefetch, "start_copies", copies.start)
    monkeypatch.setattr(prefetch, "_is_on", hosts.is_on)
    return hosts
