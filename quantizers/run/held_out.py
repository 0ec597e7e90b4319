"""The held-out set, as the texts that are scored and what a report says about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eval.fidelity.figures import Measured, Text, figures
from eval.fidelity.held_out import cut, past_the_model, positions, texts
from quantizers.calibration.render import load_tokenizer
from quantizers.calibration.samples import CalibrationData, token_tensors
from quantizers.checkpoint.reader import Checkpoint
from quantizers.system.errors import QuantizeError


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
        """Figures of the candidate called `name`, see `eval.fidelity.figures.figures`, with `evaluated_on`.

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
