"""One layer of a published model's real size by more and more processes, counted: what each does and passes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantizers.cost.cards import card_of, link_rates, rates
from quantizers.cost.counted_team import Ranks
from quantizers.cost.estimate import OF_A_CARD
from quantizers.cost.routing import TAKEN
from quantizers.cost.seconds import DISK, HASH
from quantizers.cost.sharing import serial, shared_layer
from quantizers.cost.visit import count_visit
from quantizers.plan.solve_memory import device_memory
from quantizers.system.errors import InputError
from quantizers.system.progress import progress

from .count import described, published_job, sequences


def count_ranks(
    like: str,
    tokens: int,
    counts: Sequence[int],
    *,
    gpus: int = 8,
    length: int = 8192,
    experts: int | None = None,
    card: str = "h100",
    limit: int | None = None,
    disk: float = DISK,
    **sizes: int,
) -> dict[str, Any]:
    """Count the visit to a layer with experts by one process, and by each number of them.

    Args:
        like, tokens, length, experts, sizes: see `count.count_layer`.
        counts: numbers of processes, each with a card.
        gpus: cards of a machine; what is more is spread over several.
        card: see `cards.card_of`.
        limit: bytes of each card's memory; None for what it has.
        disk: bytes a second that each machine reads from or writes to files.

    Returns:
        For each number of processes, 1 first, what `shared_layer` says of the one that has most to do, and the
        `speed_up`; `apart` is the speed-up with one card a machine. `serial` has the seconds that do not become fewer,
        and `serial_share` their share of one process's layer.

    Raises:
        InputError: no facts are kept for this model, the card is not known, the memory is too small, or processes do
            not fill machines.
    """
    job, known = published_job(like, experts, **sizes), card_of(card)
    if limit is None:
        limit = int(OF_A_CARD * known.memory)
    lengths, texts = sequences(tokens, length)
    held_out = sum(len(text.tokens) for text in texts)

    def one(ranks: Ranks) -> dict[str, Any]:
        memory = device_memory(job.plan, job.sizes, max(lengths), True, limit, tokens, ranks.count, held_out=held_out)
        visit = count_visit(job, job.sizes.moe_layers[0], lengths, texts, memory, ranks, known.capability)
        return shared_layer(visit, known, ranks, disk) | {"memory": memory.as_dict()}

    wanted = [Ranks(count, gpus) for count in sorted({1, *counts})]
    if len(wanted) == 1:
        raise InputError("--ranks 1: there is nothing to compare; give more numbers, such as 1,2,4,8")
    rows: list[dict[str, Any]] = []
    with progress("counting", 2 * len(wanted) - 1) as step:
        for ranks in wanted:
            row = one(ranks)
            step(f"{ranks.count} processes")
            apart = row
            if ranks.count > 1:
                apart = one(Ranks(ranks.count)) if ranks.gpus > 1 else row
                step(f"{ranks.count} machines")
            alone = rows[0] if rows else row
            rows.append(row | {"speed_up": alone["layer"] / row["layer"], "apart": alone["layer"] / apart["layer"]})
    parts = serial(rows[0], rows[-1])
    return described(job, lengths, texts) | {
        "card": known.name,
        "gpus": gpus,
        "rows": rows,
        "serial": parts,
        "serial_share": sum(parts.values()) / rows[0]["computing"],
        "assumptions": [
            TAKEN,
            *rates([known]),
            link_rates(known),
            f"each machine {disk / 1e9:g} GB/s read from or written to files, each thread {HASH / 1e9:g} GB/s hashed",
        ],
    }
