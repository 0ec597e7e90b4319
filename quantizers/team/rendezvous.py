"""Processes of one machine that wait for each other, for as long as it takes, and notice when one has died.

They exchange small values through the key-value store that torchrun keeps for the processes it starts.
There are no collectives (gloo, nccl): their timeouts are shorter than a layer may take, and a signal cannot
interrupt their waits. Here a process waits in Python and checks in turn whether the key is there, whether
another process has failed, and whether all others are alive. The kernel reports a death at once (pidfd),
so a killed process is noticed within a moment, and a slow one is never taken for dead.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from quantizers.system.errors import PeerFailed, QuantizeError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # public all the same

RESUME = "give the same command again to go on"
LONGEST_PAUSE = 0.05  # seconds between two looks while waiting


class Rendezvous:
    """One process's view of all of them.

    Args:
        store: shared by all processes, and empty when the first one starts.
        rank: which process this is, 0 to count - 1.
        count: how many there are.
        check: called while waiting; may raise.
    """

    def __init__(self, store: Store, rank: int, count: int, check: Callable[[], None] = lambda: None) -> None:
        self.rank, self.count, self.number = rank, count, 0
        self._store = store
        self._alive: dict[int, int] = {}  # the others' pidfds
        self._others = [other for other in range(count) if other != rank]
        with _reached():
            store.set(f"pid/{rank}", str(os.getpid()))
        self.wait([f"pid/{other}" for other in self._others], check)
        for other in self._others:
            try:
                self._alive[other] = os.pidfd_open(int(store.get(f"pid/{other}")))
            except ProcessLookupError:
                raise self.is_gone(other) from None

    def barrier(self, check: Callable[[], None] = lambda: None) -> None:
        """Return when all processes have called this. Each calls it equally often, in the same order.

        Raises:
            QuantizeError: a process has died.
            PeerFailed: a process has failed, and printed why.
        """
        self.number += 1
        with _reached():
            self._store.set(f"barrier/{self.number}/{self.rank}", "")
        self.wait([f"barrier/{self.number}/{rank}" for rank in range(self.count)], check)
        with _reached():  # all are here, so all are past the barrier before this one
            self._store.delete_key(f"barrier/{self.number - 1}/{self.rank}")

    def send(self, key: str, value: str) -> None:
        """Store a value for the others."""
        with _reached():
            self._store.set(key, value)

    def receive(self, key: str, check: Callable[[], None] = lambda: None) -> str:
        """Wait until another process has sent this key. Raises as `barrier` does."""
        self.wait([key], check)
        with _reached():
            return self._store.get(key).decode()

    def wait(self, keys: list[str], check: Callable[[], None]) -> None:
        """Wait until all the keys are there. Raises as `barrier` does."""
        pause = 0.001
        while True:
            gone = self.gone()  # asked first: a process that finishes sends everything before it ends
            if self._has(*keys):
                return
            if (code := self.failure()) is not None:
                raise PeerFailed(code)
            if gone:
                raise self.is_gone(gone[0])
            check()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def gone(self) -> list[int]:
        """The processes that have died: they ended, and neither finished nor failed."""
        ended = [rank for rank, handle in self._alive.items() if select.select([handle], [], [], 0)[0]]
        return [rank for rank in ended if not self._has(f"ended/{rank}")]

    def failure(self) -> int | None:
        """The exit code of the process that failed first, None while none has."""
        if not self._has("failure"):
            return None
        with _reached():
            return int(self._store.get("failure"))

    def fail(self, code: int) -> bool:
        """This process ends with an exit code. Returns whether it is the first one, which is the one to print why."""
        with _reached():
            first = bool(self._store.add("failures", 1) == 1)
            if first:
                self._store.set("failure", str(code))
            self._store.set(f"ended/{self.rank}", "")
        return first

    def finish(self) -> None:
        """This process has done its part."""
        self.send(f"ended/{self.rank}", "")

    def is_gone(self, rank: int) -> QuantizeError:
        """The error to raise when a process has died."""
        return QuantizeError(f"process {rank} of {self.count} is gone: killed, or out of memory? {RESUME}")

    def _has(self, *keys: str) -> bool:
        with _reached():
            return not keys or self._store.check(list(keys))


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except RuntimeError as failure:  # torch's DistError
        raise QuantizeError(
            f"torchrun, which started this process, is gone ({type(failure).__name__}); {RESUME}"
        ) from None
