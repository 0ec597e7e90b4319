"""Facts about a model family, read from architectures/*.yaml and checked against config.json.

The differences between families are data: names, shapes, which tensors read a norm's output, where the router is.
A model type without a YAML file is refused, and so is a config.json that contradicts its file.
"""

from __future__ import annotations

import math
import reprlib
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from quantizers.system.errors import ArchitectureError
from quantizers.system.strict_yaml import load

from .matrices import Matrix

FOLDER = Path(__file__).parent
# A config.json with larger sizes than these is broken or hostile.
LIMITS = {"layers": 1000, "experts": 4096, "vocabulary": 10_000_000}
LARGEST_SIZE = 1 << 20
MOST_EXPERTS = 200_000  # over all layers


class Facts(BaseModel):
    """Base of the classes below: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorFacts(Facts):
    """A tensor's shape in terms of `sizes`, and its published dtype."""

    shape: list[str]
    dtype: str


class LinearFacts(Facts):
    """One matrix of an expert: its published name and its shape (rows, columns)."""

    name: str
    shape: list[str]


class Fold(Facts):
    """The norm into which AWQ folds its scales, and every tensor that reads the norm's output."""

    norm: str
    router: str
    experts: list[Literal["gate", "up"]]


class Modules(Facts):
    """The decoder layer in transformers: paths of submodules, and `rename`, from published to transformers' names."""

    rename: dict[str, str]
    norm: str
    router: str
    experts: str


class Published(Facts):
    """The models of this family on the Hub, the license fields of their cards, and their config.json."""

    models: list[str]
    license: dict[str, str]
    config: dict[str, Any]


class Architecture(Facts):
    """One model family. See architectures/minimax_m2.yaml for the meaning of each key."""

    model_type: str
    model_class: str
    sizes: dict[str, str]
    asserts: dict[str, Any]
    rotary_dim_key: str | None = None
    outside: dict[str, TensorFacts]
    embedding: str
    final_norm: str
    head: str
    layer_prefix: str
    in_layer: dict[str, TensorFacts]
    linears: dict[str, list[str]]
    expert_prefix: str
    expert_linears: dict[Matrix, LinearFacts]
    fold: Fold
    modules: Modules
    serving: dict[str, str] = {}
    published: Published | None = None

    def layer(self, layer: int, name: str) -> str:
        """The full name of a tensor or module of a layer: `model.layers.3.` + name."""
        return self.layer_prefix.format(layer=layer) + name

    def expert(self, layer: int, expert: int, matrix: Matrix) -> str:
        """The full name of an expert's linear module, without the suffix `.weight`."""
        prefix = self.expert_prefix.format(expert=expert)
        return self.layer(layer, prefix + self.expert_linears[matrix].name)

    def in_transformers(self, name: str) -> str:
        """transformers' name for a published tensor name, both without the layer's prefix."""
        for published, module in self.modules.rename.items():
            if name.startswith(published + "."):
                return module + name.removeprefix(published)
        return name


class Sizes(dict[str, int]):
    """The sizes of one model, by our names for them: layers, experts, chosen, hidden, width, …"""

    def shape(self, terms: list[str]) -> tuple[int, ...]:
        """Evaluate a shape such as `["heads * head_dim", "hidden"]`."""
        return tuple(math.prod(self[factor.strip()] for factor in term.split("*")) for term in terms)


def known() -> dict[str, Path]:
    """The known model types, with their YAML files."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def architecture_for(config: dict[str, Any], where: str) -> Architecture:
    """The facts for a config.json.

    Args:
        config: config.json.
        where: its path, for the message.

    Raises:
        ArchitectureError: config.json has no model type, or there are no facts for it.
    """
    model_type = config.get("model_type")
    files = known()
    if not isinstance(model_type, str):
        raise ArchitectureError(f"{where}: model_type is missing; give a transformers checkpoint")
    if model_type not in files:
        is_moe = any("expert" in key for key in config)
        reason = "no facts for this architecture" if is_moe else "not a mixture-of-experts model that is known here"
        raise ArchitectureError(f"{where}: model_type {model_type!r}: {reason}; give one of {', '.join(files)}")
    return _facts(files[model_type])


@cache
def _facts(file: Path) -> Architecture:
    # A command asks four times or more, and reading the file takes longer than all else that it does with it.
    return load(file, Architecture, ArchitectureError)


def published_config(model: str) -> tuple[Architecture, dict[str, Any]] | None:
    """Facts and config.json kept here for a model on the Hub, to plan without a network; None for other models."""
    for path in known().values():
        facts = load(path, Architecture, ArchitectureError)
        if facts.published and model in facts.published.models:
            return facts, facts.published.config
    return None


def published_models() -> list[str]:
    """Every model on the Hub whose config.json we keep."""
    families = [load(path, Architecture, ArchitectureError).published for path in known().values()]
    return [model for published in families if published for model in published.models]


def sizes_of(facts: Architecture, config: dict[str, Any], where: str) -> Sizes:
    """Read the sizes from config.json and check it against the facts.

    Raises:
        ArchitectureError: a size is missing or absurd, or a value contradicts the facts.
    """
    sizes = Sizes()
    for name, key in facts.sizes.items():
        value = config.get(key)
        limit = LIMITS.get(name, LARGEST_SIZE)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= limit:
            raise ArchitectureError(
                f"{where}: {key} is {reprlib.repr(value)}; a whole number from 1 to {limit} is needed"
            )
        sizes[name] = value
    for key, expected in facts.asserts.items():
        if key in config and config[key] != expected:
            raise ArchitectureError(
                f"{where}: {key} is {reprlib.repr(config[key])}, but the facts of {facts.model_type} rely on "
                f"{expected!r}; such a model would be computed wrongly and is refused; give another model"
            )
    if sizes["chosen"] > sizes["experts"]:
        raise ArchitectureError(
            f"{where}: {facts.sizes['chosen']} is larger than {facts.sizes['experts']}; correct this file"
        )
    if sizes["layers"] * sizes["experts"] > MOST_EXPERTS:
        raise ArchitectureError(
            f"{where}: {facts.sizes['layers']} {sizes['layers']} with {facts.sizes['experts']} {sizes['experts']} is "
            "more than any model has; correct this file"
        )
    if sizes["heads"] % sizes["kv_heads"]:
        raise ArchitectureError(
            f"{where}: {facts.sizes['kv_heads']} {sizes['kv_heads']} does not divide {facts.sizes['heads']} "
            f"{sizes['heads']}; correct this file"
        )
    rotary_factor(facts, config, where)
    return sizes


def rotary_factor(facts: Architecture, config: dict[str, Any], where: str = "config.json") -> float | None:
    """The share of each attention head that is rotated; None if the family or config.json has no key for it.

    Raises:
        ArchitectureError: the key is out of range, or contradicts rope_parameters.
    """
    if facts.rotary_dim_key is None or facts.rotary_dim_key not in config:
        return None
    rotary, head = config[facts.rotary_dim_key], config[facts.sizes["head_dim"]]
    if not isinstance(rotary, int) or not 0 < rotary <= head or rotary % 2:
        raise ArchitectureError(
            f"{where}: {facts.rotary_dim_key} is {reprlib.repr(rotary)}; an even number up to {head} is needed"
        )
    factor: float = rotary / head
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ArchitectureError(f"{where}: rope_parameters is {reprlib.repr(rope)}; an object is needed")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if not isinstance(theta, (int, float)) or not 0 < theta < math.inf:
        raise ArchitectureError(f"{where}: rope_theta is {reprlib.repr(theta)}; a positive number is needed")
    stated = rope.get("partial_rotary_factor", factor)
    if stated != factor:
        raise ArchitectureError(
            f"{where}: rope_parameters.partial_rotary_factor is {reprlib.repr(stated)}, but {facts.rotary_dim_key} "
            f"means {factor}; one of them is wrong"
        )
    return factor


def transformers_config(facts: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    """config.json for transformers: with the rotary factor in rope_parameters, without quantization_config."""
    adapted = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    factor = rotary_factor(facts, config)
    if factor is not None:
        rope = dict(config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config["rope_theta"]})
        adapted["rope_parameters"] = rope | {"partial_rotary_factor": factor}
    return adapted
