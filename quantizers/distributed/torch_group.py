"""The process group of several processes, through torch.distributed.

Collectives are awaited in Python, so that a signal ends the wait, and so does another process's failure: a process that
fails writes the reason into the launcher's store; one that was killed is noticed by gloo's connections to it, by the
launcher, which then terminates the others on its machine, or at the latest by a timeout.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import BroadcastOptions, PrefixStore, Store, Work
from torch.distributed.rendezvous import rendezvous

from quantizers.system.errors import InputError, Interrupted, PeerFailed, QuantizeError, first_line, from_dicts

from .process_group import RESUME, Made, ProcessGroup

CPU = torch.device("cpu")
START_TIMEOUT = timedelta(minutes=10)  # from the first process to the last: a cold disk takes minutes to import torch
TIMEOUT = timedelta(days=1)  # of a collective: rank 0 may download a model, and a CPU may take hours for a layer
GPU_TIMEOUT = timedelta(hours=1)  # the same once all have a GPU, which takes seconds for a layer
CHUNK = 2**28  # bytes of one broadcast
LONGEST_PAUSE = 0.05  # seconds between two looks at a collective
LOOK = 0.5  # seconds between two looks at the store
SIGTERM_CODE = 128 + signal.SIGTERM


def init_process_group(rank: int, world_size: int, local_rank: int) -> DistributedGroup:
    """Join the processes that a launcher started; see `launched`.

    Raises as `exchange_places` and `node_numbers` do.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost connection is reported here, in one line
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # or NCCL's watchdog aborts with pages of text
    rendezvous_store, _, _ = next(rendezvous("env://"))
    # torchrun --max-restarts keeps its store, with the keys of earlier attempts.
    store = PrefixStore(f"quantize/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", rendezvous_store)
    places = exchange_places(store, rank, world_size, (socket.gethostname(), local_rank))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and torch.distributed.is_nccl_available() else "gloo"
    torch.distributed.init_process_group(
        backend, store=PrefixStore("torch", store), rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    world = torch.distributed.group.WORLD
    assert world is not None
    return DistributedGroup(world, store, rank, places)


def exchange_places(store: Store, rank: int, world_size: int, own: tuple[str, int]) -> list[tuple[str, int]]:
    """Host name and local rank of every process, in the order of ranks, once all have started; `own` is this one's.

    Raises QuantizeError where one did not start within START_TIMEOUT.
    """
    store.set(f"place/{rank}", json.dumps(own))
    keys = [f"place/{other}" for other in range(world_size)]
    try:
        store.wait(keys, START_TIMEOUT)
    except RuntimeError:
        raise QuantizeError(
            f"rank {rank}", f"not all of the {world_size} processes started within {START_TIMEOUT}", RESUME
        ) from None
    return [tuple(json.loads(store.get(key))) for key in keys]


class DistributedGroup(ProcessGroup):
    """The group of several processes.

    Args:
        group: exchanges tensors of the CPU, and those of GPUs if there are any.
        store: shared by these processes alone.
        places: see `exchange_places`.
    """

    def __init__(
        self, group: torch.distributed.ProcessGroup, store: Store, rank: int, places: Sequence[tuple[str, int]]
    ) -> None:
        self.rank = rank
        self.world_size = len(places)
        self.local_rank = places[rank][1]
        self.nodes = node_numbers([local_rank for _, local_rank in places])
        self._group = group
        self._store = store
        self._host = places[rank][0]
        self._device, self._timeout = CPU, TIMEOUT
        self._interrupt: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {self._host}"

    def connect(self, device: torch.device) -> None:
        kind, *_ = self.all_gather_object(device.type)
        if device.type != kind:
            raise InputError(
                "",
                f"{self.name} has the device {device}, but rank 0 is on {kind}",
                "give all processes the same --device, and each machine a GPU for each of its processes",
            )
        if device.type != "cpu":
            self._device, self._timeout = device, GPU_TIMEOUT

    def watch(self, interrupt: Callable[[], None]) -> Callable[[], None]:
        self._interrupt = interrupt
        return interrupt

    def barrier(self) -> None:
        self._wait(self._group.allreduce, torch.zeros(1))

    def in_turn(self, make: Callable[[], Made]) -> Made:
        before = 0 if self.is_main else 1 if self.local_rank == 0 else 2
        for _ in range(before):
            self.barrier()
        made = make()
        for _ in range(before, 2):
            self.barrier()
        return made

    def all_gather_object(self, value: Any) -> list[Any]:
        return [self.broadcast_object(value, src) for src in range(self.world_size)]

    def broadcast_object(self, value: Any = None, src: int = 0) -> Any:
        pickled = pickle.dumps(value) if self.rank == src else b""
        size = torch.tensor([len(pickled)])
        self._broadcast(size, src)
        raw = torch.frombuffer(bytearray(pickled or int(size)), dtype=torch.uint8)
        self._broadcast(raw, src)
        return value if self.rank == src else pickle.loads(raw.numpy().tobytes())

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        assert tensor.is_contiguous(), "the received bytes would be written to a copy"
        if not tensor.numel():
            return
        for chunk in torch.split(tensor.detach().flatten().view(torch.uint8), CHUNK):
            sent = chunk.to(self._device)
            self._broadcast(sent, src)
            if self.rank != src and sent is not chunk:
                chunk.copy_(sent)

    def all_gather(self, parts: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        shapes = self.all_gather_object({name: (tuple(rows.shape), rows.dtype) for name, rows in parts.items()})
        whole: dict[str, torch.Tensor] = {}
        for name in dict.fromkeys(name for shape in shapes for name in shape):
            counts = [shape[name][0][0] if name in shape else 0 for shape in shapes]
            (_, *width), dtype = next(shape[name] for shape in shapes if name in shape)
            whole[name] = torch.empty(sum(counts), *width, dtype=dtype, device=device)
            for src, rows in enumerate(torch.split(whole[name], counts)):
                if src == self.rank and len(rows):
                    rows.copy_(parts[name])
                self.broadcast(rows, src)
        return whole

    def _broadcast(self, tensor: torch.Tensor, src: int) -> None:
        options = BroadcastOptions()
        options.rootRank = src
        self._wait(self._group.broadcast, [tensor], options)

    def _wait(self, collective: Callable[..., Work], *arguments: Any) -> None:
        """Begin a collective, and wait for it.

        Raises:
            PeerFailed: another process has failed, and said why.
            QuantizeError: another process is lost, or the timeout is over.
        """
        started = looked = time.monotonic()
        pause = 0.0001
        try:
            work = collective(*arguments)
            while not work.is_completed():
                self._interrupt()
                now = time.monotonic()
                if now - looked > LOOK:
                    looked = now
                    if self._store.check(["failure"]):
                        raise PeerFailed(json.loads(self._store.get("failure"))["errors"][0]["code"])
                if now - started > self._timeout.total_seconds():
                    raise TimeoutError(f"no answer for {self._timeout}")
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            work.wait()  # raises the failure of gloo; lets a GPU's next kernels wait for NCCL
        except (RuntimeError, TimeoutError) as failure:
            reason = re.sub(r"^\[.*?\] ", "", first_line(failure))  # without gloo's file and line
            raise QuantizeError(
                self.name, f"another process is lost ({reason}); the launcher's report says which", RESUME
            ) from None

    def shutdown(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def first_failure(self, error: QuantizeError) -> tuple[QuantizeError, bool]:
        if error.exit_code == SIGTERM_CODE:
            why = "stopped by SIGTERM, which a launcher sends when another process has failed (its report says which)"
            error = Interrupted(self.name, why, RESUME, signal.SIGTERM)
        own = json.dumps({"rank": self.rank, "errors": [fault.as_dict() for fault in error.errors]})
        try:
            first = json.loads(self._store.compare_set("failure", "", own))
        except RuntimeError:  # the store is lost with the launcher of rank 0
            return error, self.local_rank == 0
        rank = first["rank"]
        prints = rank == self.rank or (self.nodes[rank] != self.node and self.local_rank == 0)
        return from_dicts(first["errors"]), prints


def node_numbers(local_ranks: Sequence[int]) -> list[int]:
    """The machine of each rank. Raises InputError where ranks are not numbered machine by machine."""
    nodes: list[int] = []
    for rank, local_rank in enumerate(local_ranks):
        if local_rank and (rank == 0 or local_rank != local_ranks[rank - 1] + 1):
            raise InputError(
                "",
                f"rank {rank} has local rank {local_rank}, which does not follow that of the rank before it",
                "number ranks machine by machine, as torchrun and accelerate launch do",
            )
        nodes.append((nodes[-1] if nodes else -1) + (local_rank == 0))
    return nodes
