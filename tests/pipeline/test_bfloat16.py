"""The accelerator's path on a CPU: bfloat16 weights and states, float32 sums and solving."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Finished
from one_layer import GROUP, make_layer, sliced

from quantizers.architectures.gates import plain_gate
from quantizers.architectures.matrices import MATRICES
from quantizers.commands import evaluate as measure
from quantizers.model.moe_inputs import MoeInputs, capture_moe_inputs
from quantizers.pipeline import placement, quantize
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.device_memory import Residents
from quantizers.planning.job import prepare
from quantizers.recipe.schema import Awq, Experts
from quantizers.solve.hessians import collect_down_hessian, sweep
from quantizers.solve.routing_weights import routing_statistics
from quantizers.solve.solver import solve

silu = torch.nn.functional.silu
BFLOAT16 = torch.bfloat16


def rounded_layer() -> Any:
    """A layer whose weights and recorded inputs bfloat16 holds exactly, so that only the arithmetic differs."""
    layer = make_layer(5, tokens=200)
    layer.gate_up, layer.down = layer.gate_up.bfloat16().float(), layer.down.bfloat16().float()
    return layer, [capture_moe_inputs(r.x.bfloat16().float(), r.chosen, r.weight) for r in layer.recorded()]


def in_bfloat16(blocks: list[MoeInputs]) -> list[MoeInputs]:
    return [capture_moe_inputs(r.x.bfloat16(), r.chosen, r.weight) for r in blocks]


def test_sums_of_bfloat16_inputs_are_float32_sums() -> None:
    """Oracle: float64. Σ x xᵀ of all tokens to float32's rounding; Σ h hᵀ to bfloat16's rounding of h itself."""
    layer, blocks = rounded_layer()
    half = in_bfloat16(blocks)
    x = torch.cat([r.x for r in blocks]).double()
    found = routing_statistics(half, 5, 0.0, 96)
    sums, _ = sweep(half, found, [], x.shape[1], with_all=True)
    assert sums is not None
    length = (x.square().sum(0)).sqrt()
    assert sums.hessian.dtype == torch.float32
    assert ((sums.hessian.double() - x.mT @ x).abs() <= 1e-6 * length[:, None] * length).all()
    got = collect_down_hessian(half, found, layer.gate_up.bfloat16(), gate=plain_gate(silu), batch=(0, 5))
    assert got.hessian.dtype == torch.float32
    gate, up = (x @ layer.gate_up.double().mT).chunk(2, dim=-1)
    h = silu(gate) * up
    wanted = h.mT @ h / len(x)
    length = wanted.diagonal(dim1=-2, dim2=-1).sqrt()
    error = (got.hessian.double() - wanted).abs() / (length.unsqueeze(-1) * length.unsqueeze(-2))
    assert float(error.max()) < 2**-7
    assert float(error.mean()) < 2**-11


@pytest.mark.parametrize("rounding", ["gptq", "nearest"])
def test_a_layer_solved_in_bfloat16_is_as_good(rounding: Any) -> None:
    """Errors on the calibration inputs within 5 % of those of float32: an expert may get the scale next to its own."""
    layer, blocks = rounded_layer()
    settings = Experts(group_size=GROUP, awq=Awq(grid=8), rounding=rounding)
    options: Any = {"norm": layer.norm, "router": layer.router, "gate": plain_gate(silu), "settings": settings}
    options |= {"shape": layer.router.shape, "batch_size": 5, "residents": Residents(1, 5, 0)}
    whole = solve(blocks, layer.weights(), **options)
    half = solve(in_bfloat16(blocks), sliced(layer.gate_up.bfloat16(), layer.down.bfloat16()), **options)
    for name in ("gate_up_rounding", "down_rounding", "norm_search_after", "down_search_after"):
        assert half.error[name] == pytest.approx(whole.error[name], rel=0.05)
    for matrix in MATRICES:
        assert half.codes[matrix].dtype == torch.int8
        assert half.scales[matrix].dtype == BFLOAT16


@pytest.mark.slow
def test_the_whole_run_in_bfloat16_has_the_same_kl(
    tmp_path: Path, finished: Finished, write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibrated and propagated in bfloat16, measured in float32. With so few tokens KL varies by tens of percent."""
    for module in (quantize, placement):
        monkeypatch.setattr(module, "forward_dtype", lambda _device: BFLOAT16)
    assert measure.forward_dtype(torch.device("cpu")) == torch.float32
    report = run(prepare(str(write_recipe(tmp_path))), Options(tmp_path / "output", torch.device("cpu")))
    assert report["audit"]["differences"] == []
    assert report["kl"]["mean"] == pytest.approx(finished.report["kl"]["mean"], rel=0.3)
