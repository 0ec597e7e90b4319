"""The held-out set: the texts that are scored, and what a report says about them.

Nothing is scored past the model's `max_position_embeddings`: longer texts are truncated there and counted.
How a model behaves beyond that says nothing about its quantization.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quantizers.calibration.render import load_tokenizer, scored_bytes
from quantizers.calibration.samples import CalibrationData, Sample, token_tensors
from quantizers.checkpoint.reader import Checkpoint
from quantizers.system.errors import QuantizeError

from .metrics import Measured, Text, figures


@dataclass(frozen=True)
class HeldOut:
    """One set.

    Attributes:
        texts: to be scored, truncated at the model's positions.
        about: for the report: name and digest of the set, and how much of it lies past the model's positions.
    """

    texts: list[Text]
    about: dict[str, Any]

    def figures(self, measured: Measured, name: str) -> dict[str, Any]:
        """Figures of the candidate called `name`, see `metrics.figures`, with `evaluated_on`.

        Raises:
            QuantizeError: a perplexity is not a number.
        """
        try:
            return figures(measured, self.texts) | {"evaluated_on": self.about}
        except OverflowError as failure:
            raise QuantizeError(
                f"{name}: its perplexity, or its source's, is not a number ({failure}): logits overflow, and "
                "nothing can be compared; without verify.perplexity in its recipe a run ends without these figures"
            ) from None


def held_out(data: CalibrationData, source: Checkpoint, vocabulary: int, trust_remote_code: bool) -> HeldOut:
    """The texts of a set whose samples were tokenized with the source's tokenizer.

    Args:
        vocabulary: size of the model's, for the check of token ids.
        trust_remote_code: whether the tokenizer may run code of its own.
    """
    limit = positions(source.config)
    tokens = cut(token_tensors(data, vocabulary), limit)
    scored = texts(data.samples, tokens, load_tokenizer(str(source.folder), trust_remote_code=trust_remote_code))
    return HeldOut(
        scored,
        {"name": data.name, "digest": data.digest, "past_the_model": past_the_model(data.samples, limit)},
    )


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
