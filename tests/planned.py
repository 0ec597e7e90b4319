"""Facts, sizes, tensors and plan of a model without files: the tiny one, or a published one, as it is or smaller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tiny

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.derive import KEYS
from quantizers.architectures.families import architecture_for, published_config
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.planning.assign_actions import expected_tensors, make_plan
from quantizers.planning.plan import Plan
from quantizers.recipe.schema import Experts

BLOCK = (128, 128)


@dataclass(frozen=True)
class Model:
    """A model that was never written."""

    facts: Architecture
    config: dict[str, Any]
    tensors: dict[str, Spec]

    def plan(self, tensors: dict[str, Spec] | None = None, **experts: Any) -> Plan:
        """The plan of a checkpoint `here` with these tensors, by default those that the facts expect."""
        found = self.tensors if tensors is None else tensors
        return make_plan(self.facts, found, Experts.model_validate(experts), "here", BLOCK)


def of_config(config: dict[str, Any]) -> Model:
    facts = architecture_for(config, "config.json")
    return Model(facts, config, expected_tensors(facts, config, "config.json"))


def tiny_model(**changes: Any) -> Model:
    """The tiny MiniMax-M2, with other keys of its config.json."""
    return of_config(tiny.config(**changes))


def published_with(model: str, **changes: Any) -> dict[str, Any]:
    """config.json of a published model with other values, by this program's words for sizes or by their keys."""
    config = published_config(model)
    assert config is not None

    def key(word: str) -> str:
        return next((one for one in KEYS.get(word, ()) if one in config), word)

    return config | {key(word): value for word, value in changes.items()}


def published(model: str, **changes: Any) -> Model:
    """A published model, see `published_with`."""
    return of_config(published_with(model, **changes))
