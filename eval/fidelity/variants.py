"""Variants of the models that are compared: as a kind of card serves them, and with an FP8 cache of keys and values.

The held-out texts go through each variant after the layer as it is stored, from the same stored tensors. On a card both
source and candidates are computed so, and compared there and with the source as stored; a cache concerns candidates
alone: once with the scales of its files, and once with 1, which a server takes where a checkpoint has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from quantizers.architectures.architecture import Architecture
from quantizers.checkpoint.reader import Checkpoint
from quantizers.device.devices import is_accelerator
from quantizers.formats.format import Format
from quantizers.hooks import required
from quantizers.model.activation_stream import ActivationStream
from quantizers.model.streamed_model import StreamedModel
from quantizers.recipe.cards import Card
from quantizers.system.progress import doing
from quantizers.walk.walk import LayerStep

from .figures import Figures, KvCache, OnCard
from .kv_cache import CALIBRATED, ONES, CachedModel
from .metrics import Text, table
from .scoring import Pair, Scores

ARITHMETIC = {
    False: "float32",
    True: "bfloat16, logits in float32, which alone takes the tiny model's KL from 0.0060 to 0.0066",
}
AS_SERVED = "as_served"
NewStream = Callable[[int, StreamedModel], ActivationStream]  # from a checkpoint's number and a model of it


@dataclass(frozen=True)
class Variants:
    """The streams of all variants; checkpoints are counted from the source, which is 0.

    Attributes:
        cards: by card the streams of all checkpoints, the source's first.
        caches: by the number of a candidate its streams with CALIBRATED scales and with ONES.
    """

    cards: dict[Card, list[ActivationStream]] = field(default_factory=dict)
    caches: dict[int, dict[str, ActivationStream]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[int, ActivationStream]]:
        for on_card in self.cards.values():
            yield from enumerate(on_card)
        for candidate, streams in self.caches.items():
            for stream in streams.values():
                yield candidate, stream

    def __bool__(self) -> bool:
        return bool(self.cards or self.caches)

    @property
    def streams(self) -> list[ActivationStream]:
        """All streams, in the order in which they pass through a layer."""
        return [stream for _, stream in self]

    def advance(self, step: LayerStep, stored: Sequence[Checkpoint]) -> None:
        """Take the texts of each variant through a layer, from the stored tensors of each checkpoint."""
        for checkpoint, stream in self:
            doing("as served")
            with stream.model.layer(step.number, stored[checkpoint]) as layer:
                stream.advance(layer)
        if self:
            step.watch.lap("as served")

    def pairs(self, source: ActivationStream) -> list[Pair]:
        """Pairs of streams to compare; `source` is the stream of the source as stored."""
        pairs: list[Pair] = []
        for source_there, *candidates in self.cards.values():
            pairs.append((source, source_there))
            for candidate in candidates:
                pairs += [(source_there, candidate), (source, candidate)]
        pairs += [(source, stream) for streams in self.caches.values() for stream in streams.values()]
        return pairs

    def on_cards(
        self,
        candidate: int,
        source: ActivationStream,
        scores: Mapping[Pair, Scores],
        texts: Sequence[Text],
        files: Checkpoint,
        *,
        experts: Format | None = None,
    ) -> dict[str, OnCard]:
        """Figures of a candidate by card, see `metrics.table`, with its kernels there.

        Args:
            files: the candidate; `experts`: how its experts are stored, if otherwise than in it.
        """

        def figures(first: ActivationStream, second: ActivationStream) -> Figures:
            return table(texts, np.stack([scores[source, first][0], *scores[first, second]]))

        by_card: dict[str, OnCard] = {}
        for card, streams in self.cards.items():
            kernels_of = required("kernels_of", AS_SERVED)
            by_card[card] = OnCard(
                served=figures(streams[0], streams[candidate]),
                card_alone=figures(source, streams[0]),
                from_stored=figures(source, streams[candidate]),
                kernels=kernels_of(streams[candidate].model, files, experts),
            )
        return by_card

    def with_cache(
        self, candidate: int, source: ActivationStream, scores: Mapping[Pair, Scores], texts: Sequence[Text]
    ) -> KvCache | None:
        """Figures of a candidate with an FP8 cache by kind of scales, see `metrics.table`; None without such scales."""
        if candidate not in self.caches:
            return None
        nll, streams = scores[source, source][0], self.caches[candidate]
        of_kind = {kind: table(texts, np.stack([nll, *scores[source, stream]])) for kind, stream in streams.items()}
        return KvCache(calibrated=of_kind[CALIBRATED], ones=of_kind[ONES])


def variants_of(
    checkpoints: Sequence[Checkpoint],
    facts: Architecture,
    device: torch.device,
    dtype: torch.dtype,
    cards: Sequence[Card],
    cached: Sequence[int],
    new: NewStream,
) -> Variants:
    """The variants of some checkpoints' models.

    Args:
        checkpoints: the source's, then the candidates', each with its tensors outside the layers.
        dtype: of the forward pass as stored, and with a cache.
        cards: on which all of them are computed.
        cached: the numbers of the candidates whose keys and values go through an FP8 cache.
        new: makes the stream of a model; called in the order of `Variants.streams`.

    Raises:
        InputError: cards are given, and this installation knows no kernels, see `quantizers.hooks`.
    """
    on_cards: dict[Card, list[ActivationStream]] = {}
    for card in cards:
        served_model = required("served_model", AS_SERVED)
        models = [served_model(checkpoint, facts, device, card) for checkpoint in checkpoints]
        on_cards[card] = [new(number, model) for number, model in enumerate(models)]
    caches = {}
    for n in cached:
        with_scales, with_ones = (
            CachedModel(checkpoints[n], facts, device, dtype, ones=ones) for ones in (False, True)
        )
        caches[n] = {CALIBRATED: new(n, with_scales), ONES: new(n, with_ones)}
    return Variants(on_cards, caches)


def as_stored(device: torch.device) -> str:
    """State which numbers and arithmetic the fidelity figures are of (docs/explanation/gpu.md has the cost)."""
    return (
        f"KL, perplexity and top-1 are of the files' numbers, computed in {ARITHMETIC[is_accelerator(device)]}, each "
        "against its own source. A card adds what its kernels round, such as activations to FP8; quantize eval "
        "--as-served CARD measures that too."
    )
