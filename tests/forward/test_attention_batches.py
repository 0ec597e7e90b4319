"""Which sequences go through attention together, and that none of them is changed by going with others."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantizers.forward.attention_batches import MOST_PADDING, batches, padded, unpadded

LENGTHS = st.lists(st.integers(1, 40), max_size=15)


def waste(lengths: list[int]) -> tuple[int, int]:
    """Rows of a batch, and how many of them are padding."""
    rows = len(lengths) * max(lengths)
    return rows, rows - sum(lengths)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 100))
def test_batches_are_consecutive_and_as_large_as_they_may_be(lengths: list[int], most: int) -> None:
    found = batches(lengths, most)
    assert [number for batch in found for number in batch] == list(range(len(lengths)))
    for i, batch in enumerate(found):
        rows, padding = waste(lengths[batch.start : batch.stop])
        assert len(batch) == 1 or (rows <= most and padding <= MOST_PADDING * rows)
        if i + 1 < len(found):
            rows, padding = waste(lengths[batch.start : batch.stop + 1])
            assert rows > most or padding > MOST_PADDING * rows


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_padding_comes_last_and_goes_again(lengths: list[int]) -> None:
    rows = torch.arange(1.0, 3 * sum(lengths) + 1).view(-1, 3)
    batch = padded(rows, lengths)
    assert batch.shape == (len(lengths), max(lengths), 3)
    for sequence, length in zip(batch, lengths, strict=True):
        assert bool((sequence[:length] > 0).all())
        assert not sequence[length:].any()
    assert torch.equal(unpadded(batch, lengths), rows)
    assert (batch.data_ptr() == rows.data_ptr()) == (len(set(lengths)) == 1)
