"""Writes shards in the background, by the processes of the first machine in turn.

On a CPU one process writes a shard while it takes the held-out texts through the quantized layer, and waits for it at
the end of the step: next to solving, that is nothing. A GPU, or one of several processes, is so much faster that
writing would be what all wait for. There the next layer is begun meanwhile; of several processes on the first machine
the others begin theirs, and the one that wrote a layer is waited for when its turn comes again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

from quantizers.team.team import Team

Digest = TypeVar("Digest")
Audit = TypeVar("Audit")


class ShardWriter(Generic[Digest, Audit]):
    """The shards of one process, and which of the others' are on disk.

    Args:
        team: the processes that take turns.
        executor: one thread, which held-out states are written by as well.
        background: whether the next layer is begun while a shard is on its way.

    Attributes:
        ahead: how many shards may be on their way while the next layer is worked on.
    """

    def __init__(self, team: Team, executor: Executor, *, background: bool) -> None:
        self._team, self._executor = team, executor
        self._writers = len(team.ranks_of(0))
        self.ahead = max(self._writers - 1, 1) if background else 0
        self._begun: list[int] = []  # layers, in their order; the same in all processes
        self._own: dict[int, tuple[Future[Digest], Future[Audit]]] = {}
        self._known: dict[int, tuple[Digest, Audit] | None] = {}

    def has_turn(self, number: int) -> bool:
        """Whether this process writes the layer's shard."""
        return number % self._writers == self._team.rank

    def skip(self, number: int) -> None:
        """Another process writes this layer's shard."""
        self._begun.append(number)

    def begin(self, number: int, audit: Callable[[], Audit], store: Callable[[], Digest]) -> None:
        """Let this process's shard be audited, which reads the source's memory, and then written."""
        self._begun.append(number)
        audited = self._executor.submit(audit)
        self._own[number] = self._executor.submit(store), audited

    def finished(self, ahead: int | None = None) -> dict[int, tuple[Digest, Audit] | None]:
        """The layers whose shards are on disk since the last call, in their order; all processes call this.

        What was written is known on the first machine; on the others it is None.

        Args:
            ahead: how many may still be on their way; None for `self.ahead`.

        Raises:
            QuantizeError: a shard could not be written, or holds other bytes than it was written with.
        """
        ahead = self.ahead if ahead is None else ahead
        due = self._begun[: max(len(self._begun) - ahead, 0)]
        for _, audited in self._own.values():
            audited.result()  # it reads the source's memory
        # What went wrong is raised in its turn: the layers before it are finished, and are journaled first.
        ready = [n for n, (f, _) in self._own.items() if n in due or (f.done() and not f.exception())]
        own = {n: (self._own[n][0].result(), self._own[n][1].result()) for n in ready}
        for number in own:
            del self._own[number]
        for found in self._team.here.collect(own) if self._team.node == 0 else ():
            self._known.update(found)
        if self._team.node:  # nothing is written here
            self._known.update(dict.fromkeys(due))
        done = {}
        while self._begun and self._begun[0] in self._known:
            number = self._begun.pop(0)
            done[number] = self._known.pop(number)
        return done
