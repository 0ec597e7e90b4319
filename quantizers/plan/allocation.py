"""A scheme for each layer within a budget: which are possible, what each costs, what is chosen.

`experts.budget` is bytes of all shards as they lie on the disk, embeddings, attention and headers included;
the index and the tokenizer come on top. `experts.bits_per_weight` counts the experts alone: packed weights
and scales, in bits, over the number of weights. Both bound the sum of what the layers cost, exactly.

Possible is what divides the matrices, and what vLLM takes: groups that do not cross the cards that an
expert is split over. Pure: nothing is measured and no file is opened here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantizers.architectures.architecture import Sizes
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.recipe.schema import Experts
from quantizers.recipe.scheme import ALL, Scheme
from quantizers.system.byte_size import gib, parse_bytes
from quantizers.system.errors import RecipeError

from .knapsack import choose
from .plan import Action, Kind, Plan, file_size, stored_as

PARALLEL = (1, 2, 4, 8, 16)  # cards that vLLM may split an expert over, for what is shown


@dataclass(frozen=True)
class Allocation:
    """What there is to choose from.

    Attributes:
        candidates: in rising order of size.
        shard_bytes: of every layer's shard under each candidate.
        outside_bytes: of the shard of what lies outside the layers.
        weights: of all experts of one layer.
        width: of an expert.
        limit: of the sum of costs, in `unit`s.
        unit: `bytes` of all shards, or `bits` of the experts' weights and scales.
    """

    candidates: tuple[Scheme, ...]
    shard_bytes: tuple[tuple[int, ...], ...]
    outside_bytes: int
    weights: int
    width: int
    limit: int
    unit: str

    @property
    def costs(self) -> list[list[int]]:
        """For each layer what each candidate costs, in `unit`s."""
        if self.unit == "bytes":
            return [list(row) for row in self.shard_bytes]
        bits = [math.ceil(scheme.bits_per_weight * self.weights) for scheme in self.candidates]
        return [bits for _ in self.shard_bytes]

    def output_bytes(self, chosen: Sequence[int]) -> int:
        """Bytes of all shards for a candidate's number in each layer."""
        return self.outside_bytes + sum(row[i] for row, i in zip(self.shard_bytes, chosen, strict=True))

    def bits_per_weight(self, chosen: Sequence[int]) -> float:
        """Of the experts, scales included, over all layers."""
        return sum(self.candidates[i].bits_per_weight for i in chosen) / len(chosen)

    def cost(self, chosen: Sequence[int]) -> int:
        """In `unit`s, what lies outside the layers included."""
        outside = self.outside_bytes if self.unit == "bytes" else 0
        return outside + sum(row[i] for row, i in zip(self.costs, chosen, strict=True))

    def uniform(self, number: int) -> list[int]:
        """One candidate in every layer."""
        return [number] * len(self.shard_bytes)

    @property
    def exceeded(self) -> bool:
        """Whether the limit is above all that can be spent, so that every layer gets the best."""
        return self.cost(self.uniform(-1)) < self.limit

    def spell(self, chosen: Sequence[int]) -> list[Scheme]:
        """The schemes themselves."""
        return [self.candidates[i] for i in chosen]

    def best_uniform(self) -> list[Scheme]:
        """The largest scheme that fits when every layer takes it: for figures before anything is measured."""
        fitting = [n for n in range(len(self.candidates)) if self.cost(self.uniform(n)) <= self.limit]
        return self.spell(self.uniform(fitting[-1]))

    def choose(self, losses: Sequence[Mapping[str, float]]) -> list[int]:
        """The candidate's number for each layer, from each layer's loss by a candidate's name."""
        table = [[row[str(scheme)] for scheme in self.candidates] for row in losses]
        outside = self.outside_bytes if self.unit == "bytes" else 0
        chosen = choose(self.costs, table, self.limit - outside)
        assert chosen is not None, "limits below the smallest are refused when the plan is made"
        return chosen

    def as_dict(self) -> dict[str, Any]:
        """For `quantize plan` and report.json: the candidates with their sizes, and the bounds."""
        rows = []
        for number, scheme in enumerate(self.candidates):
            everywhere = self.uniform(number)
            of_layer = [row[number] for row in self.shard_bytes]
            rows.append(
                {
                    "scheme": str(scheme),
                    "bits_per_weight": scheme.bits_per_weight,
                    "tensor_parallel": [n for n in PARALLEL if self.width % (scheme.group_size * n) == 0],
                    "layer_bytes": [min(of_layer), max(of_layer)],
                    "output_bytes": self.output_bytes(everywhere),
                }
            )
        return {
            "candidates": rows,
            "limit": self.limit if self.unit == "bytes" else self.limit / (self.weights * len(self.shard_bytes)),
            "unit": "bytes" if self.unit == "bytes" else "bits per weight",
            "above_the_largest": self.exceeded,
        }


def candidates(sizes: Sizes, parallel: int) -> tuple[Scheme, ...]:
    """The schemes whose groups divide an expert's inputs, w2's also when they are split over `parallel` cards."""
    return tuple(
        scheme
        for scheme in ALL
        if sizes["hidden"] % scheme.group_size == 0 and sizes["width"] % (scheme.group_size * parallel) == 0
    )


def _shard_bytes(plan: Plan, possible: Sequence[Scheme]) -> Iterator[tuple[int, ...]]:
    """For each layer the bytes of its shard under each scheme."""
    # Layers alike but for a number of as many digits have shards of one size: few are worked out of many.
    known: dict[tuple[tuple[int, Kind, Spec], ...], tuple[int, ...]] = {}
    by_layer: list[list[Action]] = [[] for _ in range(plan.layers)]
    for action in plan.actions:
        if action.layer is not None:
            by_layer[action.layer].append(action)
    for actions in by_layer:
        alike = tuple((len(action.source), action.kind, action.spec) for action in actions)
        if alike not in known:
            known[alike] = tuple(
                file_size({n: spec for action in actions for n, spec in stored_as(action, scheme).outputs.items()})
                for scheme in possible
            )
        yield known[alike]


def allocation(plan: Plan, sizes: Sizes, experts: Experts, where: str) -> Allocation:
    """What a recipe's budget leaves to choose from.

    Args:
        where: the recipe's file, line and key, for messages.

    Raises:
        RecipeError: no group fits the matrices, or the budget is below the smallest possible.
    """
    parallel = experts.tensor_parallel or 1
    possible = candidates(sizes, parallel)
    if not possible:
        raise RecipeError(
            f"{where}: no group of 32, 64 or 128 divides the experts' width {sizes['width']} over {parallel} cards; "
            "lower experts.tensor_parallel"
        )
    rows = tuple(_shard_bytes(plan, possible))
    weights = 3 * sizes["experts"] * sizes["hidden"] * sizes["width"]
    outside = file_size(plan.shard(None))
    if experts.budget is not None:
        found = Allocation(
            possible, rows, outside, weights, sizes["width"], parse_bytes(experts.budget, where), "bytes"
        )
    else:
        assert experts.bits_per_weight is not None
        limit = math.floor(experts.bits_per_weight * weights * plan.layers)
        found = Allocation(possible, rows, outside, weights, sizes["width"], limit, "bits")
    least = found.uniform(0)
    if found.cost(least) > found.limit:
        bytes_ = found.output_bytes(least)
        wanted = (
            f"{gib(found.limit)} are less than the smallest possible, {gib(bytes_)} ({possible[0]} in every layer); "
            f"give {bytes_}B or more"
            if found.unit == "bytes"
            else f"{experts.bits_per_weight:g} is less than the smallest possible ({possible[0]} in every layer); "
            f"give {possible[0].bits_per_weight:g} or more"
        )
        raise RecipeError(f"{where}: {wanted}")
    return found
