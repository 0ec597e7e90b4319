"""An FP8 cache of keys and values: the scales with which servers fill it, and a layer that reads from it.

A server stores keys after rotation, and values, as FP8 (E4M3) of x / scale, one scale for each in a layer. What is
beyond the largest number is clipped, and a scale twice as large costs nothing. Hence HEADROOM: for texts that the
calibration set does not have, and for AMD's FP8 (fnuz), which ends at 240.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from quantizers.architectures.attention import keys_and_values
from quantizers.distributed.process_group import ProcessGroup
from quantizers.formats.fp8 import LARGEST, to_fp8

from .streamed_model import DecoderLayer

HEADROOM = 2.0


class Peaks:
    """The largest magnitudes of a layer's keys and of its values; `values` is (2,) float32 on their device."""

    values: Tensor | None = None

    def see(self, _: torch.nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take some keys and values (B, heads, T, channels) into account; they are returned as they are."""
        seen = torch.stack([keys.abs().amax().float(), values.abs().amax().float()])
        self.values = seen if self.values is None else torch.maximum(self.values, seen)
        return keys, values

    def of_all(self, dist: ProcessGroup, device: torch.device) -> Tensor:
        """Largest magnitudes over all processes, (2,) float32."""
        own = {} if self.values is None else {"peaks": self.values.unsqueeze(0)}
        return dist.all_gather(own, device)["peaks"].amax(0)


def scales_of(peaks: Tensor) -> Tensor:
    """The scales (2,) float32 of keys and values with these largest magnitudes; 1 for one that is 0."""
    return torch.where(peaks > 0, HEADROOM * peaks / LARGEST, 1.0)


def cached(x: Tensor, scale: Tensor) -> Tensor:
    """Keys or values as attention reads them from an FP8 cache, in their own dtype."""
    return to_fp8(x.float(), scale).to(x.dtype)


@contextlib.contextmanager
def through_cache(layer: DecoderLayer, scales: Tensor) -> Iterator[None]:
    """Let a layer's attention read its keys and values from an FP8 cache with these scales (2,) in the block."""

    def through(_: torch.nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return cached(keys, scales[0]), cached(values, scales[1])

    with keys_and_values(layer.module, through):
        yield
