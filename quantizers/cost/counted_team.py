"""One process of several that are not there: what it would send and receive is counted.

It is the one that has most to do, for which the others wait. What rank 0 does besides is said in seconds.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quantizers.forward.share import Share
from quantizers.plan.units import rows_of_block
from quantizers.system.errors import InputError
from quantizers.team.team import Team

from .counting import Counting


@dataclass(frozen=True)
class Ranks:
    """So many processes, each with a GPU.

    Attributes:
        count: of all.
        gpus: of one machine.
    """

    count: int = 1
    gpus: int = 1

    def __post_init__(self) -> None:
        if self.count > self.gpus and self.count % self.gpus:
            raise InputError(
                f"--ranks {self.count}: do not fill machines of {self.gpus} GPUs; give a multiple of --gpus"
            )

    @property
    def nodes(self) -> int:
        """Machines."""
        return -(-self.count // self.gpus)

    @property
    def here(self) -> int:
        """Processes of a machine."""
        return min(self.count, self.gpus)

    def __str__(self) -> str:
        return f"{self.nodes} x {self.here}" if self.nodes > 1 else str(self.count)


ALONE = Ranks()


def busiest(ranks: Ranks, routed: Sequence[int], chosen: int, texts: Sequence[int]) -> int:
    """The rank with most units of experts, and of these the one that takes most rows through experts: calibration rows
    that are routed to its own, and held-out tokens of its texts, through the experts of source and output.

    Args:
        routed: rows of each unit's experts, in the order in which units are solved.
        chosen: experts of a token.
        texts: tokens of each held-out text.
    """

    def work(rank: int) -> tuple[int, int, int]:
        team = _member(ranks, rank)
        own, held_out = team.share(len(routed)), sum(texts[i] for i in _share(texts, team).owned)
        return len(own), sum(routed[unit] for unit in own) + 2 * chosen * held_out, rank

    return max(range(ranks.count), key=work)


def own_texts(ranks: Ranks, rank: int, texts: Sequence[int]) -> list[int]:
    """The numbers of the texts that a rank compares and scores."""
    return list(_share(texts, _member(ranks, rank)).owned)


def _share(texts: Sequence[int], team: Team) -> Share:
    return Share(texts, team, rows_of_block(accelerator=True))


def _member(ranks: Ranks, rank: int) -> Team:
    team = Team()
    team.rank, team.count = rank, ranks.count
    return team


class CountedTeam(Team):
    """What one of the ranks takes the team for.

    Args:
        rank: which it is.
        experts: rows of whatever is gathered.
    """

    def __init__(self, counting: Counting, ranks: Ranks, rank: int, experts: int) -> None:
        self.rank, self.count, self.nodes = rank, ranks.count, ranks.nodes
        self.node, self.local = divmod(rank, ranks.here)
        self._counting, self._ranks, self._experts = counting, ranks, experts

    @property
    def heads(self) -> Team:
        """As its machine's first process has it: every process waits for what the machines pass on."""
        return CountedTeam(self._counting, Ranks(self.nodes), self.node, self._experts)

    def ranks_of(self, node: int) -> range:
        return range(node * self._ranks.here, (node + 1) * self._ranks.here)

    def barrier(self) -> None:
        self._counting.asked()

    def tell(self, value: Any = None) -> Any:
        self._counting.asked()
        return value

    def collect(self, value: Any) -> list[Any]:
        """This one's value for all: enough where no number depends on it."""
        self._counting.asked()
        return [value] * self.count

    def broadcast(self, tensor: torch.Tensor, owner: int = 0) -> None:
        if self.several:
            self._counting.passed(tensor, sends=owner == self.rank, between=self.nodes > 1)

    def gather(self, parts: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """The parts of this process's experts, and room for those of the others."""
        self._counting.asked()
        whole = {}
        for name, part in parts.items():
            whole[name] = torch.empty(self._experts, *part.shape[1:], dtype=part.dtype, device=device)
            whole[name][: len(part)].copy_(part)
            others = whole[name][len(part) :]
            if len(others):
                self._counting.passed(others, sends=False, between=self.nodes > 1, times=self.count - 1)
            self.broadcast(part, self.rank)
        return whole
