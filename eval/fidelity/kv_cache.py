"""A candidate whose keys and values go through an FP8 cache: what the cache costs, and what its scales are worth.

Its texts go through it twice more: with the scales of its files, and with scales of 1, which a server takes where a
checkpoint has none. Left out: a query that is quantized too, as FlashAttention 3 and Triton do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.checkpoint.reader import Checkpoint
from quantizers.model.kv_cache import through_cache
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.planning.plan import KV_SCALES

CALIBRATED, ONES = "calibrated", "ones"  # kinds of scales


class CachedModel(StreamedModel):
    """A streamed model that reads keys and values from an FP8 cache, with its own scales or, for `ones`, 1."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        facts: Architecture,
        device: torch.device,
        dtype: torch.dtype,
        *,
        ones: bool,
    ) -> None:
        super().__init__(checkpoint, facts, device, dtype)
        self._ones = ones

    @contextlib.contextmanager
    def layer(self, number: int, stored: Checkpoint | None = None, *, experts: bool = True) -> Iterator[DecoderLayer]:
        """A decoder layer with its cache; see `StreamedModel.layer`. A layer without scales has an unquantized one."""
        files, attention = stored or self.checkpoint, self.facts.of_layer(number).cached
        names = [self.facts.layer(number, f"{attention}.{name}") for name in KV_SCALES]
        with super().layer(number, stored, experts=experts) as layer, contextlib.ExitStack() as stack:
            if attention is not None and files.tensors.keys() >= {*names}:
                scales = torch.cat([files.tensor(name).view(1) for name in names]).to(self.device, torch.float32)
                stack.enter_context(through_cache(layer, torch.ones_like(scales) if self._ones else scales))
            yield layer
