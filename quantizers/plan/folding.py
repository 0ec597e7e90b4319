"""Whether scales are folded into the norm before the experts: only where everything that reads it can follow."""

from __future__ import annotations

from typing import Literal

from quantizers.architectures.architecture import Architecture
from quantizers.recipe.schema import Experts
from quantizers.system.errors import RecipeError


def obstacle(facts: Architecture, engine: Literal["gram", "llmcompressor"]) -> str | None:
    """Why scales cannot be folded into the norm of a family by one of the engines; None if they can."""
    if facts.also_reads_the_norm:
        others = ", ".join(facts.also_reads_the_norm)
        return f"{facts.norm.tensor} is also read by {others}, which would have to change with it and keeps its bytes"
    if facts.norm.offset and engine == "llmcompressor":
        return (
            f"llm-compressor divides {facts.norm.tensor} itself, but the model multiplies by {facts.norm.offset} + it"
        )
    return None


def folds(facts: Architecture, experts: Experts, where: str) -> bool:
    """Whether these settings fold scales into the norm before the experts.

    Raises:
        RecipeError: they demand it, but the norm has readers that cannot be compensated.
    """
    if not experts.awq or experts.awq.fold is False:
        return False
    against = obstacle(facts, experts.engine)
    if against and experts.awq.fold:
        raise RecipeError(f"{where}: experts.awq.fold: {against}; remove the key, or set it to false")
    return against is None
