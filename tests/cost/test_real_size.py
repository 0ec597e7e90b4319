"""Layers of real size, counted: a model of every family, and MiniMax-M2.1 with little memory."""

from __future__ import annotations

from typing import Any

import pytest

from quantizers.bench.count import count_layer

GIB = 2**30
MODELS = (
    "minimax-m2.1", "qwen3-235b-a22b-instruct-2507-fp8", "mixtral-8x7b-instruct-v0.1", "glm-4.5-air-fp8",
    "glm-4.7-flash", "deepseek-v3", "kimi-k2-instruct",
)  # fmt: skip
CASES = {**{model: (model, 80 * GIB) for model in MODELS}, "22 GiB": ("minimax-m2.1", 22 * GIB)}


@pytest.fixture(scope="module", params=CASES)
def layer(request: pytest.FixtureRequest) -> dict[str, Any]:
    model, limit = CASES[request.param]
    found = count_layer(model, 131_072, limit=limit)
    layer, memory = found["layer"], found["memory"]
    print(
        f"\n{request.param}: {layer['launches']:,} launches, {layer['bytes_to_device'] / 1e9:.2f} GB to the device, "
        f"{layer['synchronisations']} synchronisations, {found['peak_bytes'] / GIB:.1f} GiB alive, "
        f"{memory['peak'] / GIB:.1f} set aside"
    )
    return found


@pytest.mark.slow
def test_what_crosses_the_bus_and_how_often_it_is_waited_for(layer: dict[str, Any]) -> None:
    """Without the lanes of held-out texts: the layer's own bytes, once, and its result, once."""
    assert layer["memory"]["inputs"]
    phases = {name: work for name, work in layer["phases"].items() if name not in ("reference", "candidate")}
    to_device, to_host, waits = (
        sum(work[key] for work in phases.values()) for key in ("bytes_to_device", "bytes_to_host", "synchronisations")
    )
    assert layer["source_bytes"] <= to_device <= 1.001 * layer["source_bytes"]
    assert to_host <= 1.001 * layer["written_bytes"]
    assert waits <= 20


@pytest.mark.slow
def test_what_is_alive_is_within_what_is_set_aside(layer: dict[str, Any]) -> None:
    assert layer["peak_bytes"] <= layer["memory"]["peak"] <= layer["memory"]["limit"]
