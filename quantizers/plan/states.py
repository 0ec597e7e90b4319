"""Bytes of hidden states while a layer is worked on."""

from __future__ import annotations

from quantizers.architectures.sizes import Sizes


def calibration_bytes(sizes: Sizes, tokens: int, itemsize: int, rows: int = 2) -> int:
    """Of the calibration set: what goes through the layer, and what its experts are called with.

    Args:
        itemsize: bytes of one element of a hidden state.
        rows: hidden states of each token; measuring for a budget keeps one more.
    """
    return tokens * (rows * itemsize * sizes["hidden"] + 8 * sizes["chosen"])


def held_out_bytes(sizes: Sizes, tokens: int, itemsize: int) -> int:
    """Of the held-out set: the states before and after the layer, of source and output, and the experts chosen."""
    return tokens * (4 * itemsize * sizes["hidden"] + 8 * sizes["chosen"])
