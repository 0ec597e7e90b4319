"""Held-out samples as what the evaluation reads.

Nothing is scored past the positions that a model was made for: a text that is longer than its
`max_position_embeddings` is cut there, and counted. What a model does beyond is no property of its quants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quantizers.calibration.texts import scored_bytes

from .figures import Text

if TYPE_CHECKING:
    import torch

    from quantizers.calibration.data import Sample


def positions(config: dict[str, Any]) -> int | None:
    """The most tokens of one sequence that a model was made for; None where its config.json does not say."""
    return int(config.get("max_position_embeddings") or 0) or None


def cut(tokens: Sequence[torch.Tensor], most: int | None) -> list[torch.Tensor]:
    """Sequences (T,), each with its first `most` tokens at most."""
    return [sequence[:most] for sequence in tokens]


def texts(samples: Sequence[Sample], tokens: Sequence[torch.Tensor], tokenizer: Any) -> list[Text]:
    """What is scored of each sample.

    Args:
        tokens: of each sample, (T,) int64, cut already.
        tokenizer: theirs; it says how many bytes they stand for.
    """
    return [
        Text(sequence, sample.category, scored_bytes(tokenizer, sequence.tolist()), sample.long)
        for sample, sequence in zip(samples, tokens, strict=True)
    ]


def past_the_model(samples: Sequence[Sample], most: int | None) -> dict[str, int | None]:
    """For report.json: `positions` of the model, and how many `texts` were cut there and lost how many `tokens`."""
    lost = [len(sample.tokens) - most for sample in samples if most is not None and len(sample.tokens) > most]
    return {"positions": most, "texts": len(lost), "tokens": sum(lost)}
