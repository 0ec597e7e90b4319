"""Several processes, on one machine or on more: objects through a store, tensors through torch.distributed.

Every wait is in Python, in small steps, so that a signal ends it and a lost process is noticed (heart.py). Tensors are
passed on as bytes, in pieces, from wherever they lie: the group of a CPU (gloo) wants them in memory, that of GPUs
(NCCL) on the device.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed import BroadcastOptions, PrefixStore

from quantizers.system.errors import InputError

from .dist import ProcessGroup
from .heart import Heart

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store, Work

Made = TypeVar("Made")
PIECE = 2**28  # bytes that are passed on at a time
IN_STORE = 2**20  # bytes of one value in the store, which takes no more than a few MiB


@dataclass(frozen=True)
class Place:
    """Where a process runs.

    Attributes:
        host: name of its machine.
        pid: its number there.
        local: which of the machine's processes it is.
    """

    host: str
    pid: int
    local: int


class Distributed(ProcessGroup):
    """One of several processes.

    Args:
        store: of these processes alone, and empty at first.
        ranks: the numbers of these processes in the whole run, in their order.
        rank: which of them this is, by its place among them.
        places: of all processes of the run.
        heart: of this process.
        parts: whether these are all processes of the run, which have `here` and `heads`.
    """

    def __init__(
        self,
        store: Store,
        ranks: Sequence[int],
        rank: int,
        places: Sequence[Place],
        heart: Heart,
        *,
        parts: bool = True,
    ) -> None:
        self.rank, self.count, self.ranks = rank, len(ranks), list(ranks)
        nodes = node_numbers([place.local for place in places])
        self.local, self.node, self.nodes = places[ranks[rank]].local, nodes[ranks[rank]], len(set(nodes))
        self._nodes = [nodes[r] for r in ranks]
        self._places, self._store, self._heart = places, store, heart
        self._group: ProcessGroup | None = None
        self._wire = torch.device("cpu")  # where the group wants tensors
        self._said = 0
        self._kept: list[list[str]] = []  # keys of this process that somebody may still have to read
        self._here = self._heads = ProcessGroup()
        if parts:
            self._here = self._part([r for r in ranks if nodes[r] == self.node], f"node-{self.node}")
            self._heads = self._part([r for r in ranks if places[r].local == 0], "heads")

    def _part(self, ranks: list[int], name: str) -> ProcessGroup:
        own = self.ranks[self.rank]
        if own not in ranks or len(ranks) == 1:
            return ProcessGroup()
        store = PrefixStore(name, self._store)
        return Distributed(store, ranks, ranks.index(own), self._places, self._heart, parts=False)

    @property
    def name(self) -> str:
        return self._heart.names[self.ranks[self.rank]]

    @property
    def here(self) -> ProcessGroup:
        """The processes of this machine. They pass on objects and share memory, but no tensors."""
        return self._here

    @property
    def heads(self) -> ProcessGroup:
        """The first process of each machine; where this is none of them, it alone."""
        return self._heads

    def ranks_of(self, node: int) -> range:
        first = self._nodes.index(node)
        return range(first, first + self._nodes.count(node))

    def join(self, group: ProcessGroup, wire: torch.device, of_heads: ProcessGroup | None = None) -> None:
        """Pass on tensors through a group.

        Args:
            wire: the device on which it wants them.
            of_heads: the same of the first processes of all machines; only these have one, where there are several.
        """
        self._group, self._wire = group, wire
        if isinstance(self._heads, Distributed) and of_heads is not None:
            self._heads.join(of_heads, wire)

    def connect(self, device: torch.device) -> None:
        """Make torch's process groups, as accelerate chooses them for the device: NCCL for GPUs, gloo for CPUs."""
        from .engine import process_groups

        kinds = self.collect(device.type)
        if device.type != kinds[0]:
            raise InputError(
                f"{self.name} has the device {device}, but rank 0 is on {kinds[0]}; give all processes the same "
                f"--device, and each machine a GPU for each of its processes"
            )
        heads = [rank for rank in self.ranks if self._places[rank].local == 0]
        self.join(*process_groups(PrefixStore("groups", self._store), device, heads, self.rank, self.count))

    def heed(self, interrupt: Callable[[], None]) -> Callable[[], None]:
        self._heart.interrupt = interrupt
        return self._heart.check

    def barrier(self) -> None:
        self._say("here", b"")
        self._wait_for_all("here")

    def in_turn(self, make: Callable[[], Made]) -> Made:
        before = 0 if self.leads else 1 if self.local == 0 else 2
        for _ in range(before):
            self.barrier()
        made = make()
        for _ in range(before, 2):
            self.barrier()
        return made

    def tell(self, value: Any = None) -> Any:
        if self.leads:
            self._say("told", pickle.dumps(value))
            return value
        self._said += 1
        key = f"told/{self._said}/0"
        self._heart.wait_for(self._store, [key])
        return self._read(key)

    def collect(self, value: Any) -> list[Any]:
        self._say("of", pickle.dumps(value))
        return [self._read(key) for key in self._wait_for_all("of")]

    def _say(self, what: str, value: bytes) -> None:
        self._said += 1
        key = f"{what}/{self._said}/{self.rank}"
        pieces = [value[start : start + IN_STORE] for start in range(0, len(value), IN_STORE)]
        with self._explained():
            for number, piece in enumerate(pieces):
                self._store.set(f"{key}/{number}", piece)  # type: ignore[arg-type]  # bytes too
            self._store.set(key, str(len(pieces)))  # last: this is what the others wait for
        self._kept.append([key, *(f"{key}/{number}" for number in range(len(pieces)))])

    def _read(self, key: str) -> Any:
        with self._explained():
            pieces = [self._store.get(f"{key}/{number}") for number in range(int(self._store.get(key)))]
        return pickle.loads(b"".join(pieces))

    def _wait_for_all(self, what: str) -> list[str]:
        keys = [f"{what}/{self._said}/{rank}" for rank in range(self.count)]
        self._heart.wait_for(self._store, keys)
        # All have said this, so nobody is still to read what was said before.
        old, self._kept = self._kept[:-1], self._kept[-1:]
        with self._explained():
            for key in (key for one in old for key in one):
                self._store.delete_key(key)
        return keys

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """What torch raises when a connection breaks becomes a line that says who is lost."""
        try:
            yield
        except RuntimeError as failure:
            raise self._heart.explain(failure) from None

    def broadcast(self, tensor: torch.Tensor, owner: int = 0) -> None:
        options = BroadcastOptions()
        options.rootRank = owner
        for piece in self._pieces(tensor, gives=owner == self.rank, takes=owner != self.rank):
            self._finish(self._engine.broadcast, [piece], options)

    def gather(self, parts: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        shapes = self.collect({name: (tuple(part.shape), part.dtype) for name, part in parts.items()})
        whole: dict[str, torch.Tensor] = {}
        for name in dict.fromkeys(name for shape in shapes for name in shape):
            counts = [shape[name][0][0] if name in shape else 0 for shape in shapes]
            (_, *width), dtype = next(shape[name] for shape in shapes if name in shape)
            whole[name] = torch.empty(sum(counts), *width, dtype=dtype, device=device)
            for owner, rows in enumerate(torch.split(whole[name], counts)):
                if owner == self.rank and len(rows):
                    rows.copy_(parts[name])
                self.broadcast(rows, owner)
        return whole

    def _pieces(self, tensor: torch.Tensor, *, gives: bool, takes: bool) -> Iterator[torch.Tensor]:
        """The bytes of a tensor piece by piece on the wire; what has come in is put in its place afterwards."""
        assert tensor.is_contiguous(), "what comes in would be put into a copy"
        if not tensor.numel():
            return
        for piece in torch.split(tensor.detach().flatten().view(torch.uint8), PIECE):
            on_wire = piece
            if piece.device != self._wire:
                on_wire = piece.to(self._wire) if gives else torch.empty_like(piece, device=self._wire)
            yield on_wire
            if takes and on_wire is not piece:
                piece.copy_(on_wire)

    @property
    def _engine(self) -> ProcessGroup:
        assert self._group is not None, "connect() comes before tensors are passed on"
        return self._group

    def _finish(self, begin: Callable[..., Work], *arguments: Any) -> None:
        """Begin what the group does, and wait until it is done."""
        with self._explained():
            work = begin(*arguments)
            self._heart.wait(work.is_completed)
            work.wait()  # raises what went wrong; and on a GPU lets what follows wait for it

    def finish(self) -> None:
        from .engine import close

        if self._group is not None:
            close()
        self._heart.finish()

    def last_words(self, message: str, code: int) -> tuple[str | None, int]:
        return self._heart.last_words(message, code)


def node_numbers(locals_: Sequence[int]) -> list[int]:
    """Which machine each process is on, from which of its machine's processes it is.

    Raises:
        InputError: the ranks are not numbered machine by machine.
    """
    numbers: list[int] = []
    for rank, local in enumerate(locals_):
        if local == 0:
            numbers.append(numbers[-1] + 1 if numbers else 0)
        elif rank == 0 or local != locals_[rank - 1] + 1:
            raise InputError(
                f"rank {rank} is process {local} of its machine, after a rank that is not the one before it; ranks "
                "must be numbered machine by machine, as torchrun and accelerate launch do"
            )
        else:
            numbers.append(numbers[-1])
    return numbers
