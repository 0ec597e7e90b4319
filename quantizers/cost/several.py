"""What a run needs and takes by several machines with several GPUs each, beside one process with one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantizers.plan.job import Job
from quantizers.plan.solve_memory import DeviceMemory
from quantizers.plan.states import between_bytes, recorded_bytes

from .cards import Card, link_rates
from .counted_team import Ranks
from .seconds import DISK, HASH
from .sharing import serial, shared_layer
from .visit import texts_of
from .whole_run import CountedRun, count_run

ITEMSIZE = 2  # bytes of one element of a hidden state on a GPU


def several_needs(
    job: Job,
    lengths: Sequence[int],
    held_out: Sequence[int],
    output: int,
    card: Card,
    memory: DeviceMemory,
    run: CountedRun,
    ranks: Ranks,
    disk: float = DISK,
) -> dict[str, Any]:
    """Memory, time and network of a run by several processes.

    Args:
        lengths, held_out: tokens of each sequence of the two sets.
        output: bytes of the finished checkpoint.
        memory: what is held on the card of one of them.
        run: that of one process.
        disk: bytes a second that each machine reads from or writes to files.

    Returns:
        Sizes in bytes and times in seconds: of a process the memory of its card; of a machine the host memory for what
        its processes have in common; of a layer with experts what `shared_layer` says; of the whole run `seconds`
        beside those `alone`, and what only rank 0 does, `by_rank_0`.
    """
    runs = run, count_run(job, lengths, texts_of(held_out), memory, output, ranks, card.capability)
    layers = [shared_layer(one.routed, card, one.ranks, disk) for one in runs]
    alone, together = (one.seconds(card, disk) for one in runs)
    parts = serial(*layers)
    return {
        "machines": ranks.nodes,
        "gpus": ranks.here,
        "card": card.name,
        "memory": memory.as_dict(),
        "host": _in_common(job, sum(lengths), memory, ranks),
        "layer": layers[1],
        "alone": alone,
        "seconds": together,
        "speed_up": alone["all"] / together["all"],
        "serial": parts,
        "serial_share": sum(parts.values()) / layers[0]["computing"],
        "by_rank_0": sum(runs[1].by_one_process(card, disk)),
        "assumptions": [
            link_rates(card),
            f"each machine {disk / 1e9:g} GB/s read from or written to files, each thread {HASH / 1e9:g} GB/s hashed; "
            f"the last reading by {card.readers} threads of rank 0",
        ],
    }


def _in_common(job: Job, tokens: int, memory: DeviceMemory, ranks: Ranks) -> int:
    """Bytes of host memory that a machine's processes have in common: two layers, and states that fit on no card."""
    layer = max(sum(action.spec.bytes for action in job.plan.of_layer(n)) for n in range(job.plan.layers))
    inputs = 0 if memory.inputs else recorded_bytes(job.sizes, tokens, ITEMSIZE)
    states = 0 if memory.states else between_bytes(job.sizes, -(-tokens // ranks.nodes), ITEMSIZE)
    return 2 * layer + inputs + states
