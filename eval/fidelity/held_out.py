"""Turns held-out samples into the texts that the evaluation scores.

Nothing is scored past the model's `max_position_embeddings`: longer texts are truncated there and counted.
How a model behaves beyond that says nothing about its quantization.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quantizers.calibration.render import scored_bytes

from .figures import Text

if TYPE_CHECKING:
    import torch

    from quantizers.calibration.samples import Sample


def positions(config: dict[str, Any]) -> int | None:
    """The longest sequence, in tokens, that a model was made for; None if its config.json does not say."""
    return int(config.get("max_position_embeddings") or 0) or None


def cut(tokens: Sequence[torch.Tensor], most: int | None) -> list[torch.Tensor]:
    """Sequences (T,), each truncated to its first `most` tokens; None truncates nothing."""
    return [sequence[:most] for sequence in tokens]


def texts(samples: Sequence[Sample], tokens: Sequence[torch.Tensor], tokenizer: Any) -> list[Text]:
    """The text to score for each sample.

    Args:
        tokens: of each sample, (T,) int64, already truncated.
        tokenizer: the one that made the tokens; used to count their bytes.
    """
    return [
        Text(sequence, sample.category, scored_bytes(tokenizer, sequence.tolist()), sample.long)
        for sample, sequence in zip(samples, tokens, strict=True)
    ]


def past_the_model(samples: Sequence[Sample], most: int | None) -> dict[str, int | None]:
    """For report.json: the model's `positions`, how many `texts` were truncated there, and the `tokens` they lost."""
    lost = [len(sample.tokens) - most for sample in samples if most is not None and len(sample.tokens) > most]
    return {"positions": most, "texts": len(lost), "tokens": sum(lost)}
