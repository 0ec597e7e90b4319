"""Which rows a process computes and keeps, for any sequences and any number of processes; attention's batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_threads import together

from quantizers.distributed.process_group import ProcessGroup
from quantizers.model.activation_store import MOST_PADDING, ActivationStore, batches
from quantizers.model.moe_inputs import MoeInputs, moe_input_store

CHUNK = 8
# Sequences within a block, across some, and across the shares of three processes; the last ones in batches of two.
LENGTHS = [3, 30, 1, 7, 9, 2, 25, 6, 2, 2, 3, 1, 1]
LENGTH = st.integers(1, 40)


def shares(lengths: list[int], count: int) -> list[ActivationStore]:
    teams = [ProcessGroup() for _ in range(count)]
    for rank, dist in enumerate(teams):
        dist.rank, dist.world_size = rank, count
    return [ActivationStore(None, lengths, 1, torch.float32, dist=dist, chunk=CHUNK) for dist in teams]


@settings(deadline=None, max_examples=100)
@given(st.lists(LENGTH, max_size=12), st.integers(1, 7))
def test_every_row_is_computed_once_in_the_blocks_of_one_process(lengths: list[int], count: int) -> None:
    (alone,) = shares(lengths, 1)
    parts = shares(lengths, count)
    cut = [(block.start + one.start, block.stop + one.start) for one in parts for block in one.chunks()]
    assert cut == [(block.start, block.stop) for block in alone.chunks()]
    assert [i for one in parts for i in one.owned] == list(range(len(lengths)))
    assert [batch for one in parts for batch in one.owned_batches] == alone.batches
    for one in parts:
        assert one.start == alone.offsets[one.sequences.start]
        assert one.start + len(one.flat) == alone.offsets[one.sequences.stop]
        first, last = one.rows
        touched = [b for b in alone.batches if alone.offsets[b.start] < last and alone.offsets[b.stop] > first]
        assert list(one.sequences) == ([n for batch in touched for n in batch] if first < last else [])
        assert set(one.owned) <= set(one.sequences)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_rows_at_the_borders_are_passed_on(count: int) -> None:
    """Afterwards every process has all rows of the sequences that it keeps, as whoever computed them has them."""
    whole = torch.arange(3.0 * sum(LENGTHS)).view(-1, 3)

    def work(dist: ProcessGroup) -> None:
        rows = ActivationStore(None, LENGTHS, 3, torch.float32, dist=dist, chunk=CHUNK)
        rows.flat.fill_(-1)
        for block in rows.chunks():
            rows.flat[block] = whole[rows.start + block.start : rows.start + block.stop]
        rows.complete()
        assert len(rows) == len(rows.sequences)
        for number in rows.sequences:
            first = rows.offsets[number]
            assert torch.equal(rows[number], whole[first : first + LENGTHS[number]])

    assert together(count, work) == count * [None]


@pytest.mark.parametrize("count", [2, 5])
def test_rank_0_collects_and_deals_all_rows(count: int) -> None:
    whole = torch.arange(2.0 * sum(LENGTHS)).view(-1, 2)

    def work(dist: ProcessGroup) -> None:
        share = ActivationStore(None, LENGTHS, 2, torch.float32, dist=dist, chunk=CHUNK)
        share.flat.fill_(-1)
        share.deal(whole if dist.is_main else None)
        assert torch.equal(share.flat, whole[share.start : share.offsets[share.sequences.stop]])
        back = torch.zeros_like(whole) if dist.is_main else None
        share.collect(back)
        assert back is None or torch.equal(back, whole)

    assert together(count, work) == count * [None]


def test_every_process_gets_what_the_experts_are_called_with() -> None:
    sizes: Any = SimpleNamespace(expert_inputs=5, top_k=2)
    total = sum(LENGTHS)
    x = torch.randn(total, 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    chosen = torch.arange(2 * total).view(-1, 2)
    weight = torch.rand(total, 2, generator=torch.Generator().manual_seed(2))
    usable = torch.arange(total) % 3 > 0

    def work(dist: ProcessGroup) -> None:
        recorded = moe_input_store(
            lambda _, width, dtype: ActivationStore(None, LENGTHS, width, dtype), sizes, torch.bfloat16
        )
        share = ActivationStore(None, LENGTHS, 1, torch.float32, dist=dist, chunk=CHUNK)
        for block in share.chunks():
            rows = slice(share.start + block.start, share.start + block.stop)
            recorded.put(rows, MoeInputs(x[rows], chosen[rows], weight[rows], usable[rows]))
        recorded.complete(share)
        (found,) = recorded.chunks(torch.device("cpu"), total)
        assert torch.equal(found.x, x)
        assert torch.equal(found.chosen, chosen.int())
        assert torch.equal(found.weight, weight)
        assert torch.equal(found.usable, usable)

    assert together(4, work) == 4 * [None]


def waste(lengths: list[int]) -> tuple[int, int]:
    """Rows of a batch, and how many of them are padding."""
    rows = len(lengths) * max(lengths)
    return rows, rows - sum(lengths)


@settings(deadline=None)
@given(st.lists(LENGTH, max_size=15), st.integers(1, 100))
def test_batches_are_consecutive_and_as_large_as_they_may_be(lengths: list[int], most: int) -> None:
    found = batches(lengths, most)
    assert [number for batch in found for number in batch] == list(range(len(lengths)))
    for i, batch in enumerate(found):
        rows, padding = waste(lengths[batch.start : batch.stop])
        assert len(batch) == 1 or (rows <= most and padding <= MOST_PADDING * rows)
        if i + 1 < len(found):
            rows, padding = waste(lengths[batch.start : batch.stop + 1])
            assert rows > most or padding > MOST_PADDING * rows
