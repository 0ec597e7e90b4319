"""A small layer, counted: shared by the tests of what counting finds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantizers.bench.count import published_job
from quantizers.cost.counted_team import ALONE, Ranks
from quantizers.cost.visit import CountedVisit, count_visit, texts_of
from quantizers.plan.solve_memory import device_memory

ROWS = 16384  # of a block


@dataclass(frozen=True)
class Size:
    """E experts of H x I in units of 16, B blocks of rows, K experts of a token; else as MiniMax-M2.1."""

    E: int
    H: int
    I: int  # noqa: E741  # as in the formulas
    B: int = 1
    K: int = 8

    @property
    def N(self) -> int:
        """Units."""
        return self.E // 16


def counted(
    size: Size,
    texts: list[int] | None = None,
    ranks: Ranks = ALONE,
    *,
    in_host_memory: bool = False,
    capability: tuple[int, int] | None = None,
    spread: float = 0.0,
) -> CountedVisit:
    """A visit to a layer with experts, with held-out texts of these lengths.

    Args:
        ranks: by whom; counted is the one that has most to do.
        in_host_memory: whether no hidden states lie on the device.
        capability, spread: see `count_visit`; all experts get as many rows, so that formulas can say what is done.
    """
    job = published_job("minimax-m2.1", size.E, hidden=size.H, width=size.I)
    held_out = sum(texts or ())
    memory = device_memory(job.plan, job.sizes, ROWS, True, None, ROWS * size.B, ranks.count, held_out=held_out)
    if in_host_memory:
        memory = replace(memory, inputs=False, states=False, texts=False)
    return count_visit(job, 0, [ROWS] * size.B, texts_of(texts or []), memory, ranks, capability, spread)
