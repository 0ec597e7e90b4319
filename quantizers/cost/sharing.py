"""What several processes gain: the seconds of a layer that they share, and of it what each of them does in full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .cards import Card
from .counted_team import ALONE, Ranks
from .seconds import DISK, layer_seconds
from .visit import CountedVisit
from .work import together

PASSING = "passing on"


def shared_layer(visit: CountedVisit, card: Card, ranks: Ranks = ALONE, disk: float = DISK) -> dict[str, Any]:
    """A layer by one of several processes, each on a card: what was counted, and seconds.

    Args:
        ranks: by whom the visit was counted.
        disk: bytes a second that are read from or written to files.

    Returns:
        Operations, bytes of the card's memory and of the source's files, bytes sent and received; `phases` without
        what is passed on, which is `passing`; and the seconds of the `layer`, with those of the files that it may be
        waiting for.
    """
    work, seconds = together(visit.phases.values()), layer_seconds(visit, card, ranks, disk)
    return {
        "ranks": ranks.count,
        "machines": ranks.nodes,
        "operations": sum(work.flops.values()),
        "bytes_of_device": work.read + work.written,
        "bytes_of_source": visit.source // ranks.here,
        "bytes_sent": work.sent,
        "bytes_received": work.received,
        "bytes_between_machines": work.between,
        "broadcasts": work.broadcasts,
        "phases": {name: card.seconds(one) - card.passing(one) for name, one in visit.phases.items()},
        PASSING: card.passing(work),
        "reading": seconds.reading,
        "writing": seconds.writing,
        "files": seconds.files,
        "computing": sum(seconds.phases.values()),
        "layer": seconds.layer,
        "waits_for_files": seconds.layer > sum(seconds.phases.values()),
    }


def serial(alone: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a layer that do not become fewer with more processes, the most first, from `shared_layer` of both.

    Of a phase that takes a + b / n seconds with n processes it is a, which is never less than 0: where a card has room
    for more with several processes, a phase gains more than their number. What is passed on counts in full.
    """
    count = shared["ranks"]
    parts = {
        name: max(0.0, (count * shared["phases"].get(name, 0.0) - seconds) / (count - 1))
        for name, seconds in alone["phases"].items()
    }
    parts[PASSING] = shared[PASSING]
    return dict(sorted(parts.items(), key=lambda one: -one[1]))
