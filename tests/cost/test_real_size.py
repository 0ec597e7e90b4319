"""Layers of real size, counted: a model of every family, and MiniMax-M2.1 with little memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantizers.bench.count import count_layer, published_job
from quantizers.cost.visit import count_visit
from quantizers.plan.solve_memory import device_memory
from quantizers.plan.units import rows_of_block

GIB = 2**30
MODELS = (
    "minimax-m2.1", "qwen3-235b-a22b-instruct-2507-fp8", "mixtral-8x7b-instruct-v0.1", "glm-4.5-air-fp8",
    "glm-4.7-flash", "deepseek-v3", "kimi-k2-instruct",
)  # fmt: skip
CASES = {**{model: (model, 80 * GIB) for model in MODELS}, "22 GiB": ("minimax-m2.1", 22 * GIB)}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_layer_stays_within_its_memory_and_crosses_the_bus_once(case: str) -> None:
    model, limit = CASES[case]
    found = count_layer(model, 131_072, limit=limit)
    memory = found["memory"]
    # Without the lanes of held-out texts: the layer's own bytes, and its result.
    phases = {name: work for name, work in found["phases"].items() if name not in ("reference", "candidate")}
    to_device, to_host, waits, launches = (
        sum(work[key] for work in phases.values())
        for key in ("bytes_to_device", "bytes_to_host", "synchronisations", "launches")
    )
    print(
        f"\n{case}: {launches:,} launches, {to_device / 1e9:.2f} GB to the device, {to_host / 1e9:.2f} GB to the host, "
        f"{waits} synchronisations, {found['peak_bytes'] / GIB:.1f} GiB alive, {memory['peak'] / GIB:.1f} set aside"
    )
    assert memory["inputs"]
    assert found["source_bytes"] <= to_device <= 1.001 * found["source_bytes"]
    assert to_host <= 1.001 * found["written_bytes"]
    assert waits <= 20
    assert found["peak_bytes"] <= memory["peak"] <= limit


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_with_little_held_no_more_is_alive_than_is_set_aside(model: str) -> None:
    """Where the layer passes on what it was given as well as where it is solved; with experts wide and narrow."""
    job, tokens = published_job(model), 2 * rows_of_block(True)
    memory = device_memory(job.plan, job.sizes, tokens // 2, True, None, tokens)
    memory = replace(memory, resident=1, inputs=False, states=False, texts=False, early=False)
    visit = count_visit(job, job.sizes.moe_layers[0], [tokens // 2] * 2, [], memory)
    assert 0.75 * memory.smallest <= visit.peak <= memory.smallest
