"""The fixed units of work: they follow from the kind of device and a layer's shape, for every family."""

from __future__ import annotations

import pytest
import torch
from conftest import REPOSITORY

from quantizers.architectures.families import all_published, architecture_for
from quantizers.architectures.sizes import sizes_of
from quantizers.planning.units import by_load, rows_of_block, unit_of_experts, units_of, work_units

GIB = 2**30
# Others' shapes, as their config.json has them: hidden size and an expert's width.
DEEPSEEK_V3, KIMI_K2, GLM_4_6 = (7168, 2048), (7168, 2048), (5120, 1536)


@pytest.mark.parametrize(
    ("hidden", "width", "unit"),
    [
        (3072, 1536, 16),
        (2048, 768, 16),
        (*DEEPSEEK_V3, 4),
        (*GLM_4_6, 8),
        (6144, 2560, 4),
        (4096, 14336, 1),
        (64, 32, 16),
    ],
)
def test_an_accelerators_unit_is_the_largest_power_of_two_within_6_gib(hidden: int, width: int, unit: int) -> None:
    """Six square matrices of float32 for each expert, of the larger of the two sizes."""
    assert unit_of_experts(True, hidden, width) == unit
    arrays = 6 * 4 * max(hidden, width) ** 2
    assert unit == 1 or unit * arrays < 6 * GIB
    assert unit == 16 or 2 * unit * arrays >= 6 * GIB


@pytest.mark.parametrize(("hidden", "width", "unit"), [(3072, 1536, 1), (64, 32, 8), (256, 128, 8), (512, 512, 2)])
def test_a_cpus_unit_has_its_weights_in_6_mib(hidden: int, width: int, unit: int) -> None:
    assert unit_of_experts(False, hidden, width) == unit


def test_units_cover_the_experts_in_their_order() -> None:
    for experts in (1, 5, 16, 160, 256):
        for unit in (1, 4, 16):
            units = units_of(experts, unit)
            assert [e for first, last in units for e in range(first, last)] == list(range(experts))
            assert {last - first for first, last in units[:-1]} <= {unit}


@pytest.mark.parametrize(("experts", "unit"), [(1, 4), (3, 4), (32, 4), (30, 4), (7, 1)])
def test_experts_of_a_unit_have_about_as_many_tokens(experts: int, unit: int) -> None:
    """No expert outside of a unit has more tokens than its least busy one and fewer than its busiest one."""
    tokens = torch.randint(50, (experts,), generator=torch.Generator().manual_seed(experts)).tolist()
    order = by_load(tokens, unit)
    assert sorted(order) == list(range(experts))
    for first, last in units_of(experts, unit):
        own = [tokens[expert] for expert in order[first:last]]
        others = [tokens[expert] for expert in (*order[:first], *order[last:])]
        assert not [count for count in others if min(own) < count < max(own)]


@pytest.mark.parametrize(("processes", "most"), [(2, 1.2), (4, 1.4), (8, 1.9)])
def test_every_process_gets_busy_experts_and_idle_ones(processes: int, most: float) -> None:
    """Consecutive units in each process's share, of log-normal routing: the largest share, to the average."""
    shares = (0.6 * torch.randn(256, generator=torch.Generator().manual_seed(0))).softmax(0)
    tokens = (8 * 131072 * shares).long().tolist()
    each, falling = 256 // processes, sorted(tokens, reverse=True)
    loads = [sum(tokens[e] for e in by_load(tokens, 16)[first : first + each]) for first in range(0, 256, each)]
    assert max(loads) < most * sum(tokens) / processes < sum(falling[:each])


def test_the_documents_table_is_what_the_program_does() -> None:
    """A row for each published model of each family, by its shape."""
    page = (REPOSITORY / "docs" / "long-runs.md").read_text()
    for _, published in all_published():
        facts = architecture_for(published.config, "config.json")
        sizes = sizes_of(facts, published.config, "config.json")
        experts, hidden, width = (sizes[name] for name in ("experts", "hidden", "width"))
        on_gpu, on_cpu = (work_units(accelerator, sizes)["experts"] for accelerator in (True, False))
        row = f"| {experts} | {hidden:,} | {width:,} | {on_gpu} | {on_cpu} |"
        assert row in page, f"{published.models[0]}: {row}"
    for accelerator in (True, False):
        assert f"{rows_of_block(accelerator):,}" in page
