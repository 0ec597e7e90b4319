"""Calibration samples as the token tensors that the layer loop and the evaluation read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .data import CalibrationData


def token_tensors(data: CalibrationData, vocabulary: int) -> list[torch.Tensor]:
    """(T,) int64 for each sample.

    Raises:
        CalibrationError: a token id is outside the model's vocabulary.
    """
    from quantizers.system.errors import CalibrationError

    tensors = [torch.from_numpy(sample.tokens).long() for sample in data.samples]
    for sample, tokens in zip(data.samples, tensors, strict=True):
        if int(tokens.max()) >= vocabulary:
            raise CalibrationError(
                f"{data.name}: {sample.source}: token {int(tokens.max())} lies outside the model's vocabulary of "
                f"{vocabulary}; the tokenizer belongs to another model"
            )
    return tensors


def scored_bytes(tokenizer: Any, tokens: Sequence[int]) -> int:
    """UTF-8 bytes of all tokens except the first, which is not scored. Losses per byte compare across tokenizers."""
    whole, first = (len(tokenizer.decode(part).encode()) for part in (list(tokens), list(tokens[:1])))
    return max(1, whole - first)
