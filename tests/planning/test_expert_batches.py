"""Sizes of expert batches and token chunks follow from the kind of device and a layer's shape, for every family."""

from __future__ import annotations

import pytest
import torch
from conftest import REPOSITORY

from quantizers.architectures.families import all_published, architecture_for
from quantizers.planning.expert_batches import batch_sizes, by_load, expert_batches, experts_per_batch, tokens_per_chunk

GIB = 2**30
# Others' shapes, as their config.json has them: hidden size and an expert's width.
DEEPSEEK_V3, GLM_4_6 = (7168, 2048), (5120, 1536)


@pytest.mark.parametrize(
    ("hidden", "width", "size"),
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
def test_a_batch_on_a_gpu_is_the_largest_power_of_two_within_6_gib(hidden: int, width: int, size: int) -> None:
    """Six square matrices of float32 for each expert, of the larger of the two sizes."""
    assert experts_per_batch(True, hidden, width) == size
    arrays = 6 * 4 * max(hidden, width) ** 2
    assert size == 1 or size * arrays < 6 * GIB
    assert size == 16 or 2 * size * arrays >= 6 * GIB


@pytest.mark.parametrize(("hidden", "width", "size"), [(3072, 1536, 1), (64, 32, 8), (256, 128, 8), (512, 512, 2)])
def test_a_batch_on_a_cpu_has_its_weights_in_6_mib(hidden: int, width: int, size: int) -> None:
    assert experts_per_batch(False, hidden, width) == size


@pytest.mark.parametrize(("experts", "size"), [(1, 4), (3, 4), (32, 4), (30, 4), (7, 1), (256, 16)])
def test_experts_of_a_batch_have_about_as_many_tokens(experts: int, size: int) -> None:
    """Batches cover all experts; no expert outside of one has a number of tokens between those inside of it."""
    tokens = torch.randint(50, (experts,), generator=torch.Generator().manual_seed(experts)).tolist()
    order, batches = by_load(tokens, size), expert_batches(experts, size)
    assert sorted(order) == [e for first, last in batches for e in range(first, last)] == list(range(experts))
    assert {last - first for first, last in batches[:-1]} <= {size}
    for first, last in batches:
        inside = [tokens[expert] for expert in order[first:last]]
        outside = [tokens[expert] for expert in (*order[:first], *order[last:])]
        assert not [count for count in outside if min(inside) < count < max(inside)]


@pytest.mark.parametrize(("processes", "most"), [(2, 1.2), (4, 1.4), (8, 1.9)])
def test_every_process_gets_busy_experts_and_idle_ones(processes: int, most: float) -> None:
    """Consecutive batches in each process's share, of log-normal routing: the largest share, to the average."""
    shares = (0.6 * torch.randn(256, generator=torch.Generator().manual_seed(0))).softmax(0)
    tokens = (8 * 131072 * shares).long().tolist()
    each, falling = 256 // processes, sorted(tokens, reverse=True)
    loads = [sum(tokens[e] for e in by_load(tokens, 16)[first : first + each]) for first in range(0, 256, each)]
    assert max(loads) < most * sum(tokens) / processes < sum(falling[:each])


def test_the_table_in_the_docs_is_what_the_program_does() -> None:
    """A row for each published model of each family, by its shape."""
    page = (REPOSITORY / "docs/explanation/memory-and-time.md").read_text()
    for _, published in all_published():
        facts = architecture_for(published.config | {"num_hidden_layers": 4}, "config.json")
        experts, hidden, width = (facts.num_experts, facts.hidden_size, facts.expert_width)
        on_gpu, on_cpu = (batch_sizes(accelerator, facts)["experts"] for accelerator in (True, False))
        row = f"| {experts} | {hidden:,} | {width:,} | {on_gpu} | {on_cpu} |"
        assert row in page, f"{published.models[0]}: {row}"
    for accelerator in (True, False):
        assert f"{tokens_per_chunk(accelerator):,}" in page
