"""Bit allocation: a scheme for each layer with experts within a budget; which are possible, and what each costs.

Fewer than 4 bits, which most servers do not take, are possible only where 4 bits in every layer are not.
`experts.budget` bounds the bytes of all shards on disk, without the index and the tokenizer; `experts.bits_per_weight`
only the experts: bits of packed weights and scales, divided by the number of weights. Both are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from quantizers.architectures.architecture import Architecture
from quantizers.formats.format import ExpertFormat
from quantizers.formats.packed_integers import CANDIDATES
from quantizers.recipe.schema import Experts
from quantizers.system.errors import RecipeError
from quantizers.system.formatting import parse_bytes, size, size_from

from .plan import Plan, file_size, stored_as

MOST_SERVERS = 4  # bits, from which on an output is served by more than vLLM's Humming
PARALLEL = (1, 2, 4, 8, 16)  # numbers of GPUs for which `as_dict` says whether vLLM could split an expert


@dataclass(frozen=True)
class Allocation:
    """The possible schemes, their costs and the limit. A "choice" is the index of a candidate for each of `layers`."""

    layers: tuple[int, ...]  # the numbers of those with experts
    decoder_layers: int  # how many there are in all
    candidates: tuple[ExpertFormat, ...]  # in ascending order of size
    shard_bytes: tuple[tuple[int, ...], ...]  # for each of `layers`, the bytes of its shard with each candidate
    outside_bytes: int  # of all other shards
    weights: int  # number of weights in all experts of one layer
    width: int  # of an expert
    limit: int  # on the total cost, in `unit`s: bytes of all shards, or bits of the experts' weights and scales
    unit: Literal["bytes", "bits"]

    @property
    def _costs(self) -> tuple[Sequence[Sequence[int]], int]:
        """For each layer the cost of each candidate, and that of all else, in `unit`s."""
        if self.unit == "bytes":
            return self.shard_bytes, self.outside_bytes
        bits = [math.ceil(scheme.bits_per_weight * self.weights) for scheme in self.candidates]
        return [bits] * len(self.layers), 0

    def output_bytes(self, choice: Sequence[int]) -> int:
        """Bytes of all shards."""
        return self.outside_bytes + sum(row[i] for row, i in zip(self.shard_bytes, choice, strict=True))

    def bits_per_weight(self, choice: Sequence[int]) -> float:
        """Mean bits per weight of the experts in all layers, including scales."""
        return sum(self.candidates[i].bits_per_weight for i in choice) / len(choice)

    def cost(self, choice: Sequence[int]) -> int:
        """The total cost in `unit`s."""
        costs, outside = self._costs
        return outside + sum(row[i] for row, i in zip(costs, choice, strict=True))

    def uniform(self, number: int) -> list[int]:
        """The same candidate in every layer."""
        return [number] * len(self.layers)

    @property
    def exceeded(self) -> bool:
        """Whether the limit exceeds the largest possible cost, so that every layer gets the largest scheme."""
        return self.cost(self.uniform(-1)) < self.limit

    def schemes(self, choice: Sequence[int]) -> list[ExpertFormat]:
        """A choice as one scheme for every decoder layer; one without experts has the first layer's."""
        by_layer = {layer: self.candidates[i] for layer, i in zip(self.layers, choice, strict=True)}
        return [by_layer.get(layer, by_layer[self.layers[0]]) for layer in range(self.decoder_layers)]

    @property
    def uniforms(self) -> list[int]:
        """The candidates that fit when all layers use them."""
        return [n for n in range(len(self.candidates)) if self.cost(self.uniform(n)) <= self.limit]

    def best_uniform(self) -> list[ExpertFormat]:
        """The largest of these for every layer, for estimates before anything is measured."""
        return self.schemes(self.uniform(self.uniforms[-1]))

    @property
    def most_bytes(self) -> int:
        """Bytes of all shards with a choice that fills the limit; of the largest one where the limit is above it."""
        best = self.uniform(self.uniforms[-1])
        spare = self.limit - self.cost(best)
        largest = self.output_bytes(self.uniform(-1))
        return min(largest, self.output_bytes(best) + (spare if self.unit == "bytes" else spare // 8))

    def choose(self, losses: Sequence[Mapping[str, float]]) -> list[int]:
        """The best choice, from each layer's losses by candidate name."""
        table, (costs, outside) = [[row[str(scheme)] for scheme in self.candidates] for row in losses], self._costs
        return cheapest_loss(costs, table, self.limit - outside)

    def as_dict(self) -> dict[str, Any]:
        """For `quantize plan` and report.json: the candidates with their sizes, and the limit."""
        rows = [
            {
                "scheme": str(scheme),
                "bits_per_weight": scheme.bits_per_weight,
                "tensor_parallel": [n for n in PARALLEL if scheme.fits(self.width, n)],
                "layer_bytes": [pick(row[number] for row in self.shard_bytes) for pick in (min, max)],
                "output_bytes": self.output_bytes(self.uniform(number)),
            }
            for number, scheme in enumerate(self.candidates)
        ]
        return {
            "candidates": rows,
            "limit": self.limit if self.unit == "bytes" else self.limit / (self.weights * len(self.layers)),
            "unit": "bytes" if self.unit == "bytes" else "bits per weight",
            "above_the_largest": self.exceeded,
        }


def candidates(facts: Architecture, parallel: int) -> tuple[ExpertFormat, ...]:
    """The schemes whose groups divide the inputs of an expert's matrices, of down (w2) each part on `parallel` GPUs."""
    return tuple(
        scheme
        for scheme in CANDIDATES
        if scheme.fits(facts.expert_inputs) and scheme.fits(facts.expert_width, parallel)
    )


def _shard_bytes(plan: Plan, layers: Sequence[int], possible: Sequence[ExpertFormat]) -> Iterator[tuple[int, ...]]:
    """For each of these layers the bytes of its shard with each scheme."""
    sizes: dict[object, tuple[int, ...]] = {}  # alike for layers with the same tensors, whose names are as long
    for actions in map(plan.of_layer, layers):
        key = tuple((len(action.source), action.kind, action.spec) for action in actions)
        if key not in sizes:
            sizes[key] = tuple(
                file_size({n: spec for action in actions for n, spec in stored_as(action, scheme).outputs.items()})
                for scheme in possible
            )
        yield sizes[key]


def allocation(plan: Plan, facts: Architecture, experts: Experts, where: str) -> Allocation:
    """The possible schemes, their costs and the limit for a recipe with a budget; `where` is its file, line and key.

    Raises:
        RecipeError: no group size fits the matrices, or the budget is smaller than the smallest output.
    """
    parallel, layers = experts.tensor_parallel or 1, tuple(facts.moe_layers)
    if not (possible := candidates(facts, parallel)):
        fewer = next((n for n in range(parallel, 0, -1) if candidates(facts, n)), None)
        raise RecipeError(
            where,
            f"no group of 32, 64 or 128 divides the experts' width {facts.expert_width} over {parallel} GPUs",
            f"give experts.tensor_parallel: {fewer}" if fewer else "give another model",
        )
    rows = tuple(_shard_bytes(plan, layers, possible))
    weights = facts.num_experts * facts.expert_numbers
    outside = sum(file_size(plan.shard(part)) for part in plan.parts if part not in layers)
    unit: Literal["bytes", "bits"] = "bits"
    if experts.budget is not None:
        limit, unit = parse_bytes(experts.budget, where), "bytes"
    else:
        assert experts.bits_per_weight is not None
        limit = math.floor(experts.bits_per_weight * weights * len(layers))
    result = Allocation(layers, plan.layers, possible, rows, outside, weights, facts.expert_width, limit, unit)
    few = sum(scheme.bits < MOST_SERVERS for scheme in possible)
    if few < len(possible) and result.cost(result.uniform(few)) <= limit:
        return replace(result, candidates=possible[few:], shard_bytes=tuple(row[few:] for row in rows))
    least = result.cost(result.uniform(0))
    if least <= limit:
        return result
    given = f"{experts.bits_per_weight}"
    smallest = ""
    give = f"{possible[0].bits_per_weight:g}"
    if unit == "bytes":
        given = size(limit)
        smallest = f", {size(least)}"
        give = size_from(least)
    raise RecipeError(
        where,
        f"{given} is less than the smallest possible{smallest} ({possible[0]} in every layer)",
        f"give {give} or more",
    )


def cheapest_loss(costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], limit: int) -> list[int]:
    """One option for each layer with a small sum of losses, greedily: the upgrade that gains most per cost comes next.

    Upgrades of falling worth are the optimum of the Lagrangian relaxation at each budget that they just fill; between
    two it is at most one upgrade away. The rest of the limit goes to the best upgrade that still fits.

    Args:
        costs: of each option for each layer, integers >= 0, in ascending order; the first fit together.
        losses: of each option for each layer, finite, >= 0.
        limit: bound on the sum of the chosen costs.
    """
    chosen, left = [0] * len(costs), limit - sum(row[0] for row in costs)

    def cost(layer: int, option: int) -> int:
        return costs[layer][option] - costs[layer][chosen[layer]]

    def gain(layer: int, option: int) -> float:
        return losses[layer][chosen[layer]] - losses[layer][option]

    while True:
        options = [(layer, option) for layer, row in enumerate(costs) for option in range(chosen[layer] + 1, len(row))]
        upgrades = [upgrade for upgrade in options if cost(*upgrade) <= left and gain(*upgrade) > 0]
        if not upgrades:
            return chosen
        layer, option = max(upgrades, key=lambda upgrade: gain(*upgrade) / max(cost(*upgrade), 1))
        left -= cost(layer, option)
        chosen[layer] = option
