"""Shards are audited and written in the background, by the processes of the first machine in turn.

On a CPU one process writes a shard while it takes the texts through the quantized layer, and waits for it at the end
of the visit: next to solving, that is nothing. A GPU, or one of several processes, is so much faster that writing would
be what all wait for. There the next layer is begun meanwhile; and of several processes on the first machine the others
begin theirs, and whoever wrote a layer is waited for when its turn comes again.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor, Future

import torch

from quantizers.checkpoint.held import Held
from quantizers.device.crossing import ARRIVED, Crossing
from quantizers.device.kind import accelerated
from quantizers.output.context import Context
from quantizers.plan.job import Job
from stitch.audit.layer import LayerAudit, audit_layer, written_from
from stitch.write.digests import ShardDigest
from stitch.write.shard import LayerTensors, kept_hashes, write_shard

from .visit import Visit

Written = tuple[ShardDigest, LayerAudit]


class Shards:
    """Those of one process, and which of the others' are on disk.

    Args:
        job: what is written.
        context: where.
        writer: one thread, which held-out states are written by as well.

    Attributes:
        ahead: how many shards may be on their way while the next layer is worked on.
    """

    def __init__(self, job: Job, context: Context, writer: Executor) -> None:
        self.job, self.context, self._writer = job, context, writer
        self._writers = len(context.team.ranks_of(0))
        quick = context.team.several or accelerated(context.device)
        self.ahead = max(self._writers - 1, 1) if quick else 0
        self._begun: list[int] = []  # layers, in their order; the same in all processes
        self._own: dict[int, tuple[Future[ShardDigest], Future[LayerAudit]]] = {}
        self._known: dict[int, Written | None] = {}

    def has_turn(self, number: int) -> bool:
        """Whether this process writes the layer's shard."""
        return number % self._writers == self.context.team.rank

    def begin(self, visit: Visit, tensors: LayerTensors, made: Held) -> None:
        """Let a shard be audited and written, if it is this process's turn.

        Args:
            tensors: those on the CPU are for the file, and of no use if it is another's turn.
            made: those where the layer was solved.
        """
        self._begun.append(visit.number)
        if not self.has_turn(visit.number):
            return
        source = visit.source
        host = tensors.host
        if self.ahead:  # the source's memory gets other bytes before the shard is on disk
            host = {name: tensor.clone() if source.holds(tensor) else tensor for name, tensor in host.items()}
        hashes = kept_hashes(self.job.plan, visit.number, source)
        audit = self._writer.submit(self.audit, visit, made, tensors.crossing)
        self._own[visit.number] = self._writer.submit(self.store, visit.number, host, hashes), audit

    def audit(self, visit: Visit, made: Held, crossing: Crossing = ARRIVED) -> LayerAudit:
        """Compare what is going to be in the file with the source, while it comes to the host."""
        job, number = self.job, visit.number
        audit = written_from(job.plan.of_layer(number))
        try:
            audit_layer(number, job.facts, job.sizes, visit.there, made, device=self.context.device, audit=audit)
        finally:  # the file is written next, whatever was found
            crossing.finish()
        return audit

    def store(self, number: int, tensors: Mapping[str, torch.Tensor], kept: Mapping[str, str]) -> ShardDigest:
        """Write a shard; what the file holds is then known to be what is in memory, see `write_shard`."""
        path = self.context.work / "output" / self.job.plan.shard_file(number)
        return write_shard(tensors, path, kept, self.job.plan.carried(number))

    def finished(self, ahead: int | None = None) -> dict[int, Written | None]:
        """The layers whose shards are on disk since the last call, in their order; all processes call this.

        What was written is known on the first machine; on the others it is None.

        Args:
            ahead: how many may still be on their way; None for `self.ahead`.

        Raises:
            QuantizeError: a shard could not be written, or holds other bytes than it was written with.
        """
        ahead = self.ahead if ahead is None else ahead
        due = self._begun[: max(len(self._begun) - ahead, 0)]
        for _, audit in self._own.values():
            audit.result()  # it reads the source's memory
        # What went wrong is raised in its turn: the layers before it are finished, and are journaled first.
        ready = [n for n, (f, _) in self._own.items() if n in due or (f.done() and not f.exception())]
        own = {n: (self._own[n][0].result(), self._own[n][1].result()) for n in ready}
        for number in own:
            del self._own[number]
        team = self.context.team
        for found in team.here.collect(own) if team.node == 0 else ():
            self._known.update(found)
        if team.node:  # nothing is written here
            self._known.update(dict.fromkeys(due))
        done = {}
        while self._begun and self._begun[0] in self._known:
            number = self._begun.pop(0)
            done[number] = self._known.pop(number)
        return done
