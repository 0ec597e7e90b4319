"""Bytes of hidden states while a layer is worked on."""

from __future__ import annotations

from quantizers.architectures.sizes import Sizes


def between_bytes(sizes: Sizes, tokens: int, itemsize: int) -> int:
    """Of the calibration set: what goes from layer to layer.

    Args:
        itemsize: bytes of one element of a hidden state.
    """
    return tokens * itemsize * sizes["hidden"]


def recorded_bytes(sizes: Sizes, tokens: int, itemsize: int) -> int:
    """Of the calibration set: what a layer's experts are called with, see `forward.recorded.RecordedRows`."""
    return tokens * (itemsize * sizes["hidden"] + 8 * sizes["chosen"] + 1)


def calibration_bytes(sizes: Sizes, tokens: int, itemsize: int) -> int:
    """Of the calibration set: both."""
    return between_bytes(sizes, tokens, itemsize) + recorded_bytes(sizes, tokens, itemsize)


def lanes_bytes(sizes: Sizes, tokens: int, itemsize: int) -> int:
    """Of the held-out set on a device: what left the layer, of source and output, and what enters it of one of them."""
    return tokens * (3 * itemsize * sizes["hidden"] + 8 * sizes["chosen"])


def held_out_bytes(sizes: Sizes, tokens: int, itemsize: int) -> int:
    """Of the held-out set in files: the states before and after the layer, of source and output, and who was chosen."""
    return tokens * (4 * itemsize * sizes["hidden"] + 8 * sizes["chosen"])
