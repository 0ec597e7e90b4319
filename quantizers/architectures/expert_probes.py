"""A module of routed experts by itself: how it holds their matrices, and probes of what it computes.

It runs with the matrices of one expert for all, so that a module of a large model takes no memory.

Legend: E experts, H the numbers that an expert reads and returns, I width of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from quantizers.system.errors import ArchitectureError

from .experts_call import weighs_inputs
from .gates import Gate, gate_of
from .matrices import FUSED, WITHOUT_GATE, as_held
from .skeleton import NOT_QUANTIZED, first

LARGE = 20.0  # times ordinary activations: a product that is clamped shows only there


def relative_distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a part of the largest value of the second; infinite if a value is not finite."""
    distance = float((actual - expected).abs().max() / (expected.abs().max() + 1e-30))
    return math.inf if math.isnan(distance) else distance


class ExpertsModule:
    """transformers' module of a layer's routed experts, see `probes`.

    Its matrices are `gate_up_proj` (E, 2I, H), or `up_proj` (E, I, H) without a gate, and `down_proj` (E, H, I), or
    each is transposed. Most modules say which; of others the shapes do, and where both fit, the probes refute a wrong
    one.

    Raises:
        ArchitectureError: it holds their matrices in a way that is not known here; `model` is the model's name.
    """

    def __init__(self, module: Any, model: str) -> None:
        self.module = module
        shapes = {name: list(p.shape) for name, p in module.named_parameters()}
        self.weighs_inputs = weighs_inputs(module)
        self.held = FUSED if "gate_up_proj" in shapes else WITHOUT_GATE
        self.has_gate = self.held == FUSED
        self.interleaved = not getattr(module, "is_concatenated", True)
        biases = {f"{name}_bias" for name in self.held}
        self.biased = biases <= set(shapes)
        known = set(shapes) == set(self.held) | (biases if self.biased else set())
        known = known and all(len(shapes[name]) == 3 for name in self.held)
        if known:
            (rows_of, *reading), (self.count, *down) = (shapes[name] for name in self.held)
            self.identities = max(rows_of - self.count, 0)  # what reads for them is never used
            matrices = 1 + self.has_gate
            as_usual = reading == [matrices * down[1], down[0]]
            self.transposed = bool(getattr(module, "is_transposed", not as_usual))
            self.inputs, self.width = reversed(down) if self.transposed else down
            wanted = [matrices * self.width, self.inputs]
            known = rows_of >= self.count and reading == (wanted[::-1] if self.transposed else wanted)
        if not known:
            held = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise ArchitectureError(
                model,
                f"its experts hold {held}, not gate_up_proj [E, 2I, H], or up_proj [E, I, H], and down_proj [E, H, I], "
                "or each transposed, with or without biases",
                NOT_QUANTIZED,
            )

    def probes(self, generator: torch.Generator) -> dict[str, float]:
        """The probes `tokens` to `gate` of `roles.probe`, each a difference as a part of the largest value."""
        width, inputs = self.width, self.inputs
        reading = torch.randn((1 + self.has_gate) * width, inputs, generator=generator) * inputs**-0.5
        down = torch.randn(inputs, width, generator=generator) * width**-0.5
        scale = torch.exp(0.5 * torch.randn(width, 1, generator=generator))
        biases = [torch.randn(size, generator=generator) * 0.5 for size in (len(reading), inputs)]
        first_bias, last_bias = (bias.unsqueeze(1) if self.biased else 0.0 for bias in biases)
        run = partial(self._run, biases)
        x = torch.randn(8, inputs, generator=generator)
        weight = torch.rand(8, 1, generator=generator) + 0.5

        def moved(rows: torch.Tensor, degree: int = 1) -> float:
            *gate, up = reading.chunk(1 + self.has_gate)
            scaled = run(torch.cat([*gate, up / scale]), down * scale.T**degree, rows, weight)
            return relative_distance(scaled, run(reading, down, rows, weight))

        def product(rows: torch.Tensor, gate: Gate) -> float:
            h = gate(reading @ rows.mT + first_bias)
            return relative_distance((down @ h + last_bias).mT * weight, run(reading, down, rows, weight))

        plain = gate_of(self.module, own=False)
        output = run(reading, down, x, weight)
        backwards = run(reading, down, x.flip(0), weight.flip(0)).flip(0)
        unweighted = run(reading, down, x, torch.ones_like(weight))
        errors = {
            "tokens": max(relative_distance(backwards, output), relative_distance(unweighted * weight, output)),
            "product": product(x, plain),
        }
        if not self.has_gate:
            degrees = {name: max(moved(x, n), moved(LARGE * x, n)) for n, name in ((1, "up_down"), (2, "squared"))}
            return errors | degrees | {"large": product(LARGE * x, plain), "gate": 1.0}
        own = gate_of(self.module, own=True) if hasattr(self.module, "_apply_gate") else None
        return errors | {
            "up_down": moved(x),
            "large": max(product(LARGE * x, plain), moved(LARGE * x)),
            "gate": max(product(x, own), product(LARGE * x, own)) if own else 1.0,
        }

    def _run(
        self,
        biases: Sequence[torch.Tensor],
        reading: torch.Tensor,
        down: torch.Tensor,
        rows: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """The module's output, all of whose experts have these matrices, for rows that go through the first."""
        held = as_held(reading, down, transposed=self.transposed, interleaved=self.interleaved)
        for name, matrix in zip(self.held, held, strict=True):
            every = matrix.expand(self.count + self.identities, *matrix.shape)
            setattr(self.module, name, torch.nn.Parameter(every, requires_grad=False))
        for name, bias in zip(self.held, biases, strict=True) if self.biased else ():
            rearranged = bias.unflatten(0, (2, -1)).mT.flatten() if self.interleaved and name != "down_proj" else bias
            every = rearranged.expand(self.count, len(bias))
            setattr(self.module, f"{name}_bias", torch.nn.Parameter(every, requires_grad=False))
        if self.weighs_inputs:  # its rows are those of the first, the last and all between
            blocks = rows.new_zeros(self.count, *rows.shape)
            blocks[0] = rows
            return first(self.module(blocks.flatten(0, 1))).view_as(blocks)[0] * weights
        # A second expert with a weight of 0: LongCat's class takes no call with one.
        index = torch.tensor([0, self.count - 1]).expand(len(rows), 2)
        return first(self.module(rows, index, torch.cat([weights, torch.zeros_like(weights)], 1)))
