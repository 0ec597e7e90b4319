"""Background shard writer: the ranks of the first machine write in turn.

On a CPU one process writes a shard while it takes the held-out texts through the quantized layer, and waits for it at
the end of the step. A GPU, or one of several processes, is so much faster that writing would be the bottleneck: there
the next layer is begun meanwhile, and the process that writes a layer is waited for when its turn comes again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future

from quantizers.distributed.process_group import ProcessGroup
from quantizers.output.journal import ShardDigest
from quantizers.stitch.audit.layer import LayerAudit

from .layer_entry import Written


class ShardWriter:
    """The shards of one process, and which of the others' are on disk.

    Args:
        executor: one thread, which also writes held-out activations.
        background: whether the next layer is begun before a shard is written.

    Attributes:
        pending: how many shards may be unfinished while the next layer is solved.
    """

    def __init__(self, dist: ProcessGroup, executor: Executor, *, background: bool) -> None:
        self._dist, self._executor = dist, executor
        self._writers = dist.nodes.count(0)
        self.pending = max(self._writers - 1, 1) if background else 0
        self._begun: list[int] = []  # layers, in their order; the same in all processes
        self._own: dict[int, tuple[Future[ShardDigest], Future[LayerAudit]]] = {}
        self._known: dict[int, Written] = {}

    def has_turn(self, number: int) -> bool:
        """Whether this process writes the layer's shard."""
        return number % self._writers == self._dist.rank

    def skip(self, number: int) -> None:
        """Another process writes this layer's shard."""
        self._begun.append(number)

    def begin(self, number: int, audit: Callable[[], LayerAudit], store: Callable[[], ShardDigest]) -> None:
        """Let this process's shard be audited, which reads the source's memory, and then written."""
        self._begun.append(number)
        audited = self._executor.submit(audit)
        self._own[number] = self._executor.submit(store), audited

    def finished(self, pending: int | None = None) -> dict[int, Written]:
        """The layers whose shards are on disk since the last call, in their order; all processes call this.

        As many as `pending`, by default `self.pending`, may still be unfinished. A QuantizeError says that a shard
        could not be written, or holds other bytes than it was written with.
        """
        pending = self.pending if pending is None else pending
        due = self._begun[: max(len(self._begun) - pending, 0)]
        for _, audited in self._own.values():
            audited.result()  # it reads the source's memory
        # What went wrong is raised in its turn: the layers before it are finished, and are journaled first.
        ready = [n for n, (f, _) in self._own.items() if n in due or (f.done() and not f.exception())]
        own = {n: (self._own[n][0].result(), self._own[n][1].result()) for n in ready}
        for number in own:
            del self._own[number]
        for written in self._dist.all_gather_object(own):
            self._known.update(written)
        done = {}
        while self._begun and self._begun[0] in self._known:
            number = self._begun.pop(0)
            done[number] = self._known.pop(number)
        return done
