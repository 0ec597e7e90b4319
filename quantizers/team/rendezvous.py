"""Processes of one machine that wait for each other, however long, and notice when one has died.

What they say to each other are words in the small store that torchrun keeps for the processes it
starts. There are no collectives (gloo, nccl), and so neither their timeouts, which a layer may well
outlast, nor waits that a signal cannot end: a process waits in Python, looking in turn whether the word
is there, whether another process has failed, and whether all others live. The kernel says that at once
(pidfd), so a killed process is noticed within a moment, and a slow one is never taken for dead.
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

GO_ON = "give the same command again to go on"
LONGEST_PAUSE = 0.05  # seconds between two looks while waiting


class Meeting:
    """One process's view of all of them.

    Args:
        store: where words are left; the same for all processes, and empty when the first comes.
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

    def meet(self, check: Callable[[], None] = lambda: None) -> None:
        """Return when all processes have come here. Every process meets equally often, in the same order.

        Raises:
            QuantizeError: a process is gone.
            PeerFailed: a process has failed, and said why.
        """
        self.number += 1
        with _reached():
            self._store.set(f"met/{self.number}/{self.rank}", "")
        self.wait([f"met/{self.number}/{rank}" for rank in range(self.count)], check)
        with _reached():  # all are here, so all have left the meeting before
            self._store.delete_key(f"met/{self.number - 1}/{self.rank}")

    def tell(self, key: str, word: str) -> None:
        """Leave a word for the others."""
        with _reached():
            self._store.set(key, word)

    def hear(self, key: str, check: Callable[[], None] = lambda: None) -> str:
        """Wait for another's word. Raises as `meet` does."""
        self.wait([key], check)
        with _reached():
            return self._store.get(key).decode()

    def wait(self, keys: list[str], check: Callable[[], None]) -> None:
        """Wait until all the words are there. Raises as `meet` does."""
        pause = 0.001
        while True:
            gone = self.gone()  # looked at first: who has left in peace has left his word before
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
        """The processes that have ended without a word."""
        ended = [rank for rank, handle in self._alive.items() if select.select([handle], [], [], 0)[0]]
        return [rank for rank in ended if not self._has(f"left/{rank}")]

    def failure(self) -> int | None:
        """The exit code of the process that failed first, None while none has."""
        if not self._has("failure"):
            return None
        with _reached():
            return int(self._store.get("failure"))

    def fail(self, code: int) -> bool:
        """This process ends with an exit code. Returns whether it is the first, and so the one that says why."""
        with _reached():
            first = bool(self._store.add("failures", 1) == 1)
            if first:
                self._store.set("failure", str(code))
            self._store.set(f"left/{self.rank}", "")
        return first

    def leave(self) -> None:
        """This process has done its part."""
        self.tell(f"left/{self.rank}", "")

    def is_gone(self, rank: int) -> QuantizeError:
        """What there is to say of a process that has ended without a word."""
        return QuantizeError(f"process {rank} of {self.count} is gone: killed, or out of memory? {GO_ON}")

    def _has(self, *keys: str) -> bool:
        with _reached():
            return not keys or self._store.check(list(keys))


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except RuntimeError as failure:  # torch's DistError
        raise QuantizeError(
            f"torchrun, which started this process, is gone ({type(failure).__name__}); {GO_ON}"
        ) from None
