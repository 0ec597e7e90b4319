"""How long counted work takes on a card, by the rates that its vendor states and the shares of them that are reached.

An operation takes as long as its bytes or its arithmetic, whichever is more, and never less than the smallest kernel.
Launching goes on beside it, and so do the copies of a stream of their own: a phase takes the time of its operations, of
launching them, or of those copies, whichever is most; and that of all other copies over the bus, which are waited for.
None of this has been measured on a GPU by this program so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantizers.plan.cards import GIB, SEEN
from quantizers.system.errors import InputError, did_you_mean
from quantizers.system.thread_map import THREADS

from .work import Operation, Work

# Seconds: for this process to launch an operation, to make a view, to wait for the device; the smallest kernel; and
# what a kernel needs at least for each of its turns, see `Operation`.
LAUNCH, VIEW, SYNC, KERNEL, TURN = 6e-6, 0.8e-6, 20e-6, 2e-6, 0.25e-6
# What passes between processes: of a card's link, and the network of a machine, in bytes a second; then seconds of a
# broadcast, and of a round of words through the store.
LINKED, NETWORK, BROADCAST, ROUND = 2 / 3, 0.9 * 50e9, 0.5e-3, 1e-3
BUS, PINNED = 8e9, 20e9  # bytes a second over PCIe 4, from and to memory that is not pinned, and that is
HOST = 10e9  # bytes a second that this process's operations on the host's memory move
# What of a stated rate is reached. Cholesky factors and triangular solves of a batch are far from the products' rate.
BANDWIDTH, REACHED = 0.8, {"bfloat16": 0.6, "tf32": 0.6, "float32": 0.75, "float64": 0.8, "factorization": 0.15}


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        name: as it is printed.
        capability: its compute capability.
        memory: bytes that torch sees.
        bandwidth: bytes a second, as stated.
        link: bytes a second from it to another card of its machine, as stated: NVLink, or else its bus.
        bfloat16, float32, float64: operations a second, as stated; products of matrices in bfloat16 with float32 sums.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    bandwidth: float
    link: float
    bfloat16: float
    float32: float
    float64: float

    @property
    def readers(self) -> int:
        """Threads of its machine that read files at once: such a machine has cores for them."""
        return THREADS

    def rate(self, kind: str) -> float:
        """Operations a second that are reached."""
        stated = {"factorization": self.float32, "tf32": self.bfloat16 / 2}
        return float(stated[kind] if kind in stated else getattr(self, kind)) * REACHED[kind]

    def seconds(self, work: Work) -> float:
        """How long a phase takes."""
        on_it = sum(self._one(operation) * times for operation, times in work.operations.items())
        return max(on_it, launching(work), work.beside / PINNED) + crossing(work) + self.passing(work)

    def passing(self, work: Work) -> float:
        """How long what is passed on between processes takes; nothing else is done meanwhile."""
        here = work.sent + work.received - work.between
        waits = work.broadcasts * BROADCAST + work.rounds * ROUND
        return here / (LINKED * self.link) + work.between / NETWORK + waits

    def _one(self, operation: Operation) -> float:
        moved = (operation.read + operation.written) / (BANDWIDTH * self.bandwidth)
        computed = operation.flops / self.rate(operation.kind) if operation.kind else 0.0
        return max(moved, computed, KERNEL * operation.launches + TURN * operation.turns)


def launching(work: Work) -> float:
    """Seconds that this process needs to ask for a phase's work."""
    return work.launches * LAUNCH + work.views * VIEW + work.syncs * SYNC + work.host_bytes / HOST


def crossing(work: Work) -> float:
    """Seconds that a phase's copies take on the bus, without those beside its work."""
    return (work.to_device + work.to_host - work.pinned) / BUS + (work.pinned - work.beside) / PINNED


def _card(name: str, seen: str, capability: tuple[int, int], *rates: float) -> Card:
    return Card(name, capability, int(SEEN[seen] * GIB), *(1e12 * rate for rate in rates))


# TB/s of the memory, and of the link one way; then TFLOP/s in bfloat16, float32 and float64, without sparsity.
CARDS: Mapping[str, Card] = {
    "h100": _card("H100", "H100", (9, 0), 3.35, 0.45, 989, 67, 33.5),
    "h200": _card("H200", "H200", (9, 0), 4.8, 0.45, 989, 67, 33.5),
    "a100": _card("A100", "A100", (8, 0), 2.04, 0.3, 312, 19.5, 9.7),
    "rtx-pro-6000": _card("RTX PRO 6000", "RTX-PRO-6000", (12, 0), 1.79, 0.064, 504, 125, 1.95),
    "4090": _card("RTX 4090", "RTX-4090", (8, 9), 1.01, 0.032, 165, 83, 1.29),
}


def card_of(name: str) -> Card:
    """The card of a name.

    Raises:
        InputError: none is known by it; the message lists those that are.
    """
    found = CARDS.get(name.lower())
    if found is None:
        raise InputError(
            f"--card {name}: its rates are not known{did_you_mean(name.lower(), CARDS)}; give one of {', '.join(CARDS)}"
        )
    return found


def link_rates(card: Card) -> str:
    """The rates behind the seconds of what is passed on, in one line."""
    return (
        f"between processes: {LINKED * card.link / 1e9:.0f} GB/s reached of {card.link / 1e9:g} stated between two "
        f"{card.name} of a machine, {NETWORK / 1e9:g} of 400 Gbit/s (50 GB/s) between machines; {BROADCAST * 1e3:g} ms "
        f"a broadcast, {ROUND * 1e3:g} ms a round of words; nothing is computed meanwhile"
    )


def rates(cards: Sequence[Card]) -> list[str]:
    """The rates behind the seconds on some cards, one line each."""
    of_cards = "; ".join(
        f"{card.name} {card.bandwidth / 1e12:g} TB/s, {card.bfloat16 / 1e12:g} and {card.float32 / 1e12:g} TFLOP/s"
        for card in cards
    )
    return [
        f"stated, bfloat16 and float32: {of_cards}",
        f"reached: {BANDWIDTH:.0%} of the bandwidth, {REACHED['bfloat16']:.0%} in bfloat16 (TF32 half as fast), "
        f"{REACHED['float32']:.0%} in float32, {REACHED['factorization']:.0%} of float32 in batched factorizations",
        f"{LAUNCH * 1e6:g} us a launch, {VIEW * 1e6:g} us a view, {SYNC * 1e6:g} us a synchronisation, at least "
        f"{KERNEL * 1e6:g} us a kernel, {TURN * 1e6:g} us a column that it rounds; {BUS / 1e9:g} GB/s over the bus, "
        f"{PINNED / 1e9:g} from and to pinned memory, "
        f"{HOST / 1e9:g} GB/s on the host",
    ]
