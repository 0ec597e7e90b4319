"""From a launcher's environment to a process that knows the others.

    torchrun --nproc-per-node 4 -m quantizers run RECIPE
    accelerate launch --num_processes 4 -m quantizers run RECIPE

and on several machines the same command on each, with what the launcher needs to find the first one.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from quantizers.system.errors import QuantizeError

from .dist import ProcessGroup
from .heart import LONGEST_PAUSE, Heart

if TYPE_CHECKING:
    from torch.distributed import Store

    from .distributed import Distributed

LONGEST_START = 600.0  # seconds from the first process to the last: from a cold disk torch is imported for minutes


def launched() -> tuple[int, int, int] | None:
    """This process's rank, how many there are, and which of its machine's it is; None for a process by itself."""
    words = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if not all(word.isdigit() for word in words) or int(words[1]) < 2:
        return None
    rank, count, local = map(int, words)
    return rank, count, local


def join() -> ProcessGroup:
    """Find the other processes, if a launcher started several.

    Raises:
        InputError: their ranks are not numbered machine by machine.
        QuantizeError: one has died already, or did not start.
    """
    found = launched()
    if found is None:
        return ProcessGroup()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # we report a lost store ourselves, in one line
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://"))  # that of the launcher, or of rank 0
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun --max-restarts keeps its store
    rank, count, local = found
    return meet(PrefixStore(f"quantize/{attempt}", store), rank, count, local, socket.gethostname())


def meet(store: Store, rank: int, count: int, local: int, host: str) -> Distributed:
    """Tell the others who this is, and wait until all have done so.

    Args:
        store: shared by all processes, and empty when the first one starts.
        local: which of its machine's processes this is.
        host: the name of its machine.
    """
    from torch.distributed import PrefixStore

    from .distributed import Distributed, Place, node_numbers

    store.set(f"place/{rank}", json.dumps(asdict(Place(host, os.getpid(), local))))
    keys = [f"place/{other}" for other in range(count)]
    ending = time.monotonic() + LONGEST_START
    while not store.check(keys):
        if time.monotonic() > ending:
            missing = ", ".join(str(other) for other, key in enumerate(keys) if not store.check([key]))
            raise QuantizeError(f"rank {missing} of {count} did not start within {LONGEST_START:.0f} s")
        time.sleep(LONGEST_PAUSE)
    places = [Place(**json.loads(store.get(key))) for key in keys]
    numbers = node_numbers([place.local for place in places])
    heart = Heart(
        store,
        rank,
        [f"rank {other} of {count} on {place.host}" for other, place in enumerate(places)],
        numbers,
        {other: place.pid for other, place in enumerate(places) if numbers[other] == numbers[rank]},
        prints=local == 0,
        launched="TORCHELASTIC_RUN_ID" in os.environ,
    )
    return Distributed(PrefixStore("dist", store), range(count), rank, places, heart)
