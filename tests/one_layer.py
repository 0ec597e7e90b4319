"""One small layer of experts with inputs, for solving it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from quantizers.architectures.gates import plain_gate
from quantizers.architectures.matrices import MATRICES
from quantizers.model.moe_inputs import MoeInputs
from quantizers.model.moe_inputs import capture_moe_inputs as seen
from quantizers.solve import hessians
from quantizers.solve.awq import Weights
from quantizers.solve.result import LayerResult

EXPERTS, HIDDEN, WIDTH, GROUP = 5, 96, 64, 32


silu = torch.nn.functional.silu
plain = plain_gate(silu)


@dataclass
class Layer:
    """One MoE block: norm and its readers, and the normalised inputs of three sequences before the norm's weight."""

    norm: torch.Tensor
    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    normed: list[torch.Tensor]

    def recorded(self, chosen: int = 2) -> list[MoeInputs]:
        out = []
        for normed in self.normed:
            x = normed * self.norm.float()
            scores = torch.sigmoid(x @ self.router.mT)
            scores[:, -1] = -1
            weight, index = scores.topk(chosen, dim=-1)
            out.append(seen(x, index, weight / weight.sum(-1, keepdim=True)))
        return out

    def to(self, device: torch.device) -> Layer:
        """The same layer on another device."""
        here = (self.norm, self.router, self.gate_up, self.down)
        return Layer(*(tensor.to(device) for tensor in here), [normed.to(device) for normed in self.normed])

    def weights(self) -> Weights:
        """The experts' matrices as the engine asks for them."""
        return sliced(self.gate_up, self.down)


def sliced(gate_up: torch.Tensor, down: torch.Tensor) -> Weights:
    """Copies of some experts' matrices, from those of all."""
    return lambda experts: (gate_up[experts], down[experts])


def batches_cached(patched: pytest.MonkeyPatch) -> list[int]:
    """The number of expert batches of each sweep from now on."""
    counted: list[int] = []
    real = hessians.sweep

    def sweep(blocks: Any, found: Any, waiting: Any, *arguments: Any, **named: Any) -> Any:
        counted.append(len(waiting))
        return real(blocks, found, waiting, *arguments, **named)

    patched.setattr(hessians, "sweep", sweep)
    return counted


def make_layer(
    seed: int = 0, experts: int = EXPERTS, tokens: int = 60, hidden: int = HIDDEN, width: int = WIDTH
) -> Layer:
    """Random, with outlier channels in a bfloat16 norm, a zero in it, and a last expert that is never chosen."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    norm = 1 + 0.2 * normal(hidden)
    norm[[3, 40, 77]] *= 12
    norm[11] = 0
    router = 0.2 * normal(experts, hidden)
    normed = [normal(tokens + 7 * i, hidden) for i in range(3)]
    return Layer(
        norm.bfloat16(),
        router,
        normal(experts, 2 * width, hidden) * hidden**-0.5,
        normal(experts, hidden, width) * normal(width).exp() * width**-0.5,
        normed,
    )


def assert_same(a: LayerResult, b: LayerResult) -> None:
    """Every tensor equal bit for bit."""
    for matrix in MATRICES:
        assert torch.equal(a.codes[matrix], b.codes[matrix]), matrix
        assert torch.equal(a.scales[matrix], b.scales[matrix]), matrix
    for ours, theirs in ((a.global_scales, b.global_scales), (a.input_scales, b.input_scales)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[matrix], theirs[matrix]) for matrix in ours)
    assert torch.equal(a.norm, b.norm)
    assert torch.equal(a.smooth, b.smooth)
    assert (a.router is None) == (b.router is None)
    assert a.router is None or b.router is None or torch.equal(a.router, b.router)
