"""Each process of a run knows that the others are alive, whatever it is doing, and ends soon after one of them is lost.

A layer may take hours, so a collective that waits for hours is nothing unusual, and neither torch nor its launcher
says that a process on another machine is gone: with static rendezvous an agent does not see another one die. So each
process has a thread that writes a beat into the store every few seconds, and reads those of the others. On its own
machine the kernel tells of a death at once (pidfd).

    place/3     its machine, and its number there; see joining.py
    beat/3      a number that grows
    ended/3     it has done its part, or failed: silence is no loss any more
    failures    how many have failed; the first one prints why
    failure     its exit code, with which all others end, its machine, and its line: other machines print it too
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from quantizers.system.errors import PeerFailed, QuantizeError

if TYPE_CHECKING:
    from torch.distributed import Store

RESUME = "give the same command again to go on"
INTERRUPTED = (130, 143)  # exit codes
BEAT = 5.0  # seconds between two beats
SILENCE = 30.0  # seconds without a beat, after which a process is lost
GRACE = 15.0  # seconds that a process has to end in order, once it knows that another one is lost
LONGEST_PAUSE = 0.05  # seconds between two looks while waiting


class Heart:
    """One process's beat, and its view of those of the others.

    Args:
        store: shared by all processes, and empty when the first one starts.
        rank: which process this is.
        names: of all processes, for messages.
        nodes: which machine each is on.
        pids: of those that run on this machine, by rank.
        prints: whether this process prints what all processes of its machine have to say: one of each machine.
        launched: whether a launcher, which is the parent, keeps watch over this process and the store.

    Attributes:
        interrupt: called while waiting; may raise.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        names: Sequence[str],
        nodes: Sequence[int],
        pids: dict[int, int],
        *,
        prints: bool,
        launched: bool,
    ) -> None:
        self.rank, self.names, self.interrupt = rank, list(names), _nothing
        self._store, self._node, self._prints = store, nodes[rank], prints
        self._parent = os.getppid() if launched else None
        self._problem: QuantizeError | None = None
        self._ended = threading.Event()
        self._others = [other for other in range(len(names)) if other != rank]
        self._alive: dict[int, int] = {}  # pidfds
        self._looked = time.monotonic()
        for other, pid in pids.items():
            if other != rank:
                try:
                    self._alive[other] = os.pidfd_open(pid)
                except ProcessLookupError:
                    self._problem = self._problem or self._lost(other)
        for work in (self._beat, self._guard):
            threading.Thread(target=work, daemon=True).start()

    def check(self) -> None:
        """Raise if this process is to end: interrupted, or another one has failed or is lost."""
        self.interrupt()
        self._problem = self._problem or self._orphaned()
        if self._problem is not None:
            raise self._problem
        if lost := self._dead():
            raise self._lost(lost[0])

    def wait(self, done: Callable[[], bool]) -> None:
        """Return when `done` says so; until then raise as `check` does."""
        pause = 0.0002
        while not done():
            self.check()
            if pause == LONGEST_PAUSE:
                self._look_for_a_failure()  # which `_beat` sees too, but later
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def wait_for(self, store: Store, keys: list[str]) -> None:
        """Wait until all these keys are in a store."""

        def there() -> bool:
            try:
                return bool(store.check(keys))
            except RuntimeError as failure:  # torch's DistError
                raise self._store_is_gone(failure) from None

        try:
            self.wait(there)
        except QuantizeError:
            # Whoever ends in order sends everything before it ends, and a failure is better news than a death.
            if there():
                return
            raise

    def explain(self, failure: RuntimeError) -> QuantizeError:
        """Why a connection to other processes broke: who is lost, once that is known, else the failure itself."""
        ending = time.monotonic() + SILENCE + 2 * BEAT
        try:
            self.wait(lambda: time.monotonic() > ending)
        except QuantizeError as known:
            return known
        first = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
        return QuantizeError(f"the connection to the other processes broke ({first}); {RESUME}")

    def finish(self) -> None:
        """This process has done its part."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"ended/{self.rank}", "")
        self._ended.set()

    def last_words(self, message: str, code: int) -> tuple[str | None, int]:
        """See `ProcessGroup.last_words`. A launcher interrupts all others when one has ended; that is not why they end."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending already
        try:
            if code in INTERRUPTED:
                lost, failed = self._dead(), self._failure()
                if failed is not None:
                    code = failed[0]
                elif lost:
                    message, code = str(self._lost(lost[0])), 1
            line: str | None = message
            if self._store.add("failures", 1) == 1:
                self._store.set("failure", json.dumps([code, self._node, message]))
            else:
                failed = self._failure()
                said_elsewhere = failed is not None and failed[1] != self._node
                line = failed[2] if failed and said_elsewhere and self._prints else None
            self._store.set(f"ended/{self.rank}", "")
            return line, code
        except RuntimeError:  # the store is gone
            return message if self._prints else None, code
        finally:
            self._ended.set()

    def _beat(self) -> None:
        beats, heard = 0, dict.fromkeys(self._others, ("", time.monotonic()))
        self._store.set_timeout(timedelta(seconds=SILENCE))
        while not self._ended.is_set():
            try:
                self._store.set(f"beat/{self.rank}", str(beats))
                beats += 1
                self._problem = self._problem or self._heard(heard)
            except RuntimeError as failure:
                self._problem = self._problem or self._store_is_gone(failure)
            self._problem = self._problem or self._orphaned()
            self._looked = time.monotonic()
            self._ended.wait(BEAT)

    def _heard(self, heard: dict[int, tuple[str, float]]) -> QuantizeError | None:
        """What the store says of the others; `heard` has the last beat of each, and when it came."""
        if (failed := self._failure()) is not None:
            return PeerFailed(failed[0])
        for other, (last, when) in heard.items():
            beat = self._store.get(f"beat/{other}").decode() if self._has(f"beat/{other}") else ""
            now = time.monotonic()
            if beat != last:
                heard[other] = beat, now
            elif now - when > SILENCE and not self._has(f"ended/{other}"):
                return QuantizeError(
                    f"{self.names[other]} has not been heard of for {SILENCE:.0f} s: is the machine down, or its "
                    f"network? {RESUME}"
                )
        return None

    def _guard(self) -> None:
        """End this process when it cannot: a kernel or a connection may wait for a lost process for ever."""
        known: float | None = None
        while not self._ended.wait(1.0):
            now = time.monotonic()
            if self._problem is None and now - self._looked > SILENCE + BEAT:
                self._problem = self._store_is_gone(TimeoutError())
            known = now if known is None and self._problem is not None else known
            if known is not None and now - known > GRACE:
                problem = self._problem
                if self._prints and not isinstance(problem, PeerFailed):
                    print(f"quantize: {problem}", file=sys.stderr, flush=True)
                os._exit(problem.exit_code if problem else 1)

    def _look_for_a_failure(self) -> None:
        try:
            failed = self._failure()
        except RuntimeError as failure:
            raise self._store_is_gone(failure) from None
        if failed is not None:
            raise PeerFailed(failed[0])

    def _orphaned(self) -> QuantizeError | None:
        """The launcher ends its processes when it ends itself, unless it is killed."""
        if self._parent is None or os.getppid() == self._parent:
            return None
        name = self.names[self.rank]
        return QuantizeError(f"{name}: the launcher, which started this process, is gone; {RESUME}")

    def _dead(self) -> list[int]:
        """The processes of this machine that ended, and neither finished nor failed."""
        ended = [rank for rank, handle in self._alive.items() if select.select([handle], [], [], 0)[0]]
        if not ended:
            return []
        self._look_for_a_failure()
        try:
            return [rank for rank in ended if not self._has(f"ended/{rank}")]
        except RuntimeError as failure:
            raise self._store_is_gone(failure) from None

    def _failure(self) -> tuple[int, int, str] | None:
        """Of the process that failed first its exit code, its machine and its line; None while none has."""
        return tuple(json.loads(self._store.get("failure"))) if self._has("failure") else None

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _lost(self, rank: int) -> QuantizeError:
        return QuantizeError(f"{self.names[rank]} is gone: killed, or out of memory? {RESUME}")

    def _store_is_gone(self, failure: Exception) -> QuantizeError:
        return QuantizeError(
            f"{self.names[self.rank]}: the launcher of {self.names[0]}, by which all find each other, does not answer "
            f"({type(failure).__name__}): it is gone, or its machine, or the network; {RESUME}"
        )


def _nothing() -> None:
    pass
