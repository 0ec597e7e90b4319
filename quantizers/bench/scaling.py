"""How cost grows with tokens, experts, grid points and layers: varies one of them at a time and fits exponents.

Seconds ~ size^p: p is the slope of a straight line through the logarithms.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quantizers.architectures.families import architecture_for
from quantizers.architectures.sizes import Sizes, sizes_of
from quantizers.checkpoint.held import held_tensors, hold, layer_names
from quantizers.checkpoint.reader import CONFIG
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.device.devices import forward_dtype, machine
from quantizers.device.kind import accelerated
from quantizers.device.timing import Clock, listening
from quantizers.forward.halves import finish
from quantizers.forward.layered_model import LayeredModel
from quantizers.forward.recorded import recorded
from quantizers.forward.weights import ExpertWeights
from quantizers.plan.making import make_plan
from quantizers.plan.units import unit_of_experts
from quantizers.recipe.schema import Awq, Experts
from quantizers.solve.gram_engine import solve
from quantizers.solve.layer import solve_layer
from quantizers.system.residents import Residents
from stitch.write.shard import layer_tensors

from .compare import layer_sizes, observed
from .random_model import BLOCK, published, resized, write_random

BASE = {"tokens": 8192, "experts": 16, "grid": 20, "layers": 2}
STEPS = {
    "tokens": (4096, 8192, 16384, 32768, 65536),
    "experts": (4, 8, 16, 32),
    "grid": (5, 10, 20, 40),
    "layers": (1, 2, 4),
}
LENGTH = 512


def measure_scaling(hidden: int, width: int, repeats: int, device: torch.device, factor: float = 1.0) -> dict[str, Any]:
    """Vary one size at a time around `BASE`.

    Args:
        hidden, width: sizes of the layer.
        repeats: seconds are the median of as many runs.
        factor: multiplies all numbers of tokens; below 1 for a quick look.

    Returns:
        For every varied size, a table of seconds by phase and the exponents fitted to it.
    """
    results = {}
    for name, values in STEPS.items():
        rows = []
        for value in values:
            at = BASE | {name: value}
            at["tokens"] = max(16, int(at["tokens"] * factor))
            runs = [_run(at, hidden, width, device, whole=name == "layers") for _ in range(repeats)]
            seconds = {phase: statistics.median(run[phase] for run in runs) for phase in runs[0]}
            rows.append({name: at[name]} | seconds)
        phases = [phase for phase in rows[0] if phase != name]
        exponents = {phase: slope([row[name] for row in rows], [row[phase] for row in rows]) for phase in phases}
        results[name] = {"rows": rows, "exponents": exponents}
    return {"base": BASE, "hidden": hidden, "width": width, "varied": results, "machine": machine(device)}


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """p of seconds ~ size^p, by least squares on the logarithms."""
    return statistics.linear_regression([math.log(s) for s in sizes], [math.log(max(t, 1e-9)) for t in seconds]).slope


def _run(at: dict[str, int], hidden: int, width: int, device: torch.device, *, whole: bool) -> dict[str, float]:
    """Seconds by phase for one layer; with `whole`, the total for all layers of a model."""
    settings = Experts(awq=Awq(grid=at["grid"]))
    if whole:
        sizes = layer_sizes(at["experts"], hidden, width) | {"layers": at["layers"]}
        return {"all layers": _model_seconds(sizes, at["tokens"] // 4, settings, device)}
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    norm = (1 + 0.2 * normal(hidden)).bfloat16()
    norm[:4] *= 8
    router, dtype = 0.2 * normal(at["experts"], hidden), forward_dtype(device)
    length = min(LENGTH, at["tokens"])
    blocks = []
    for _ in range(at["tokens"] // length):
        x = normal(length, hidden) * norm.float()
        # Always two experts per token, so that the cost of a token does not depend on the number of experts.
        weight, chosen = torch.sigmoid(x @ router.mT).topk(2, dim=-1)
        weight /= weight.sum(-1, keepdim=True)
        blocks.append(recorded(x.to(device, dtype), chosen.to(device), weight.to(device)))
    gate_up = (normal(at["experts"], 2 * width, hidden) * hidden**-0.5).to(device, dtype)
    down = (normal(at["experts"], hidden, width) * width**-0.5).to(device, dtype)
    with torch.no_grad(), listening(Clock(device)) as clock:
        solve(
            blocks, lambda some: (gate_up[some], down[some]),
            norm=norm.to(device), router=router.to(device), activation=torch.nn.functional.silu,
            settings=settings, unit=unit_of_experts(accelerated(device), hidden, width),
            residents=Residents.all_of(at["experts"]),
        )  # fmt: skip
    seconds = clock.seconds()
    return seconds | {"search + rounding": seconds["search"] + seconds["rounding"]}


def _model_seconds(sizes: dict[str, int], tokens: int, settings: Experts, device: torch.device) -> float:
    """Seconds to solve and propagate through all layers of a random model."""
    config = resized(published("minimax-m2.1"), **sizes) | {"bos_token_id": 0, "eos_token_id": 1}
    facts = architecture_for(config, CONFIG)
    size: Sizes = sizes_of(facts, config, CONFIG)
    length = min(LENGTH, tokens)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        dtype = forward_dtype(device)
        source = write_random(Path(folder) / "model", config, torch.device("cpu"))
        specs = {name: Spec(info.dtype, info.shape) for name, info in source.tensors.items()}
        plan = make_plan(facts, size, specs, settings, "random", BLOCK)
        model = LayeredModel(source, facts, size, device, dtype)
        states: Sequence[torch.Tensor] = [
            torch.randn(length, size["hidden"]).to(dtype) for _ in range(max(1, tokens // length))
        ]
        started = time.perf_counter()
        for number in range(size["layers"]):
            source_part = hold(source, layer_names(source, facts, number))
            held = source_part.to(device)
            with model.layer(number, held, experts=False) as layer:
                residual, seen = observed(model, layer, states)
                norm = held.tensor(facts.layer(number, facts.norm.tensor))
                weights = ExpertWeights(held, facts, size, number, device, dtype)
                residents = Residents.all_of(size["experts"])
                solved = solve_layer(model, layer, norm, seen, settings, weights=weights.unit, residents=residents)
            made = held_tensors(held, layer_tensors(plan, number, source_part, solved, near=held).device, Path(folder))
            with model.layer(number, made) as layer:
                finish(model, layer, residual, f"layer {number}")
            states = residual
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started
