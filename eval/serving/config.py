"""A quantization_config as serving engines parse it: a scheme per target, and the ignored modules."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

SECTION = "quantization_config"


class Refused(Exception):
    """An engine refuses a module or section; the message says why. A finding, not an error of this program."""


@dataclass(frozen=True)
class ServedScheme:
    """The scheme of a config group. Two are equal if engines treat them alike, whichever group they come from."""

    type: str
    bits: int
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    symmetric: bool
    dynamic: bool
    activations: str | None = None
    format: str = ""
    group: str = field(default="", compare=False)
    target: str = field(default="", compare=False)

    def __str__(self) -> str:
        name = {"int": "INT", "float": "FP"}.get(self.type, self.type) + str(self.bits)
        if self.strategy == "block" and self.block:
            return f"{name} block {self.block[0]}x{self.block[1]}"
        return f"{name} group {self.group_size}" if self.strategy == "group" else f"{name} per {self.strategy}"

    @property
    def origin(self) -> str:
        """The group and target it comes from, for messages."""
        return f"group {self.group!r}, target {self.target!r}"


def scheme_of(weights: QuantizationArgs) -> ServedScheme:
    """The scheme of weights as compressed-tensors and vLLM hold it."""
    fields = weights.model_dump(mode="json")
    block = fields["block_structure"]
    return ServedScheme(
        fields["type"],
        fields["num_bits"],
        fields["strategy"],
        fields["group_size"],
        (block[0], block[1]) if block else None,
        fields["symmetric"],
        bool(fields["dynamic"]),
    )


@dataclass(frozen=True)
class Rules:
    """A parsed quantization_config.

    Attributes:
        targets: scheme by target, in file order; a repeated target keeps its first place and takes the later scheme.
        groups: each group's targets and scheme, in file order.
        ignore: names and expressions of modules that are not quantized.
        format: of the whole checkpoint.
    """

    targets: Mapping[str, ServedScheme]
    groups: tuple[tuple[tuple[str, ...], ServedScheme], ...]
    ignore: tuple[str, ...]
    format: str


def read_rules(section: Mapping[str, Any]) -> Rules:
    """Parse a quantization_config, as tolerantly as the servers do.

    Raises:
        Refused: it does not have the structure that they need.
    """
    from compressed_tensors.quantization import QuantizationArgs

    default_format = str(section.get("format"))
    targets: dict[str, ServedScheme] = {}
    groups: list[tuple[tuple[str, ...], ServedScheme]] = []
    try:
        for name, group in section["config_groups"].items():
            activations = group.get("input_activations")
            scheme = replace(
                scheme_of(QuantizationArgs.model_validate(group["weights"])),
                activations=json.dumps(activations, sort_keys=True) if activations else None,
                format=group.get("format") or default_format,
                group=name,
            )
            for target in group["targets"]:
                targets[target] = replace(scheme, target=target)
            groups.append((tuple(group["targets"]), scheme))
        ignore = tuple(section.get("ignore") or ())
        for pattern in (*targets, *ignore):
            if pattern.startswith("re:"):
                re.compile(pattern[3:])
    except re.error as failure:
        raise Refused(f"{failure.pattern!r} is not a regular expression ({failure.msg})") from None
    except (AttributeError, KeyError, TypeError, ValueError) as failure:  # pydantic's errors among them
        raise Refused(f"config_groups has an unexpected structure ({' '.join(str(failure).split())})") from None
    return Rules(targets, tuple(groups), ignore, default_format)


def validation_errors(section: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Key and message of every error of compressed-tensors' own QuantizationConfig."""
    from compressed_tensors.quantization import QuantizationConfig
    from pydantic import ValidationError

    try:
        QuantizationConfig.model_validate(copy.deepcopy(dict(section)))
    except ValidationError as failure:
        errors = []
        for error in failure.errors():
            # pydantic also tries a group as a list of targets, for a preset; that branch's message would mislead.
            if "list[str]" not in error["loc"]:
                path = [str(part) for part in error["loc"] if not str(part).startswith("function-")]
                errors.append((".".join([SECTION, *path]), error["msg"]))
        return errors
    except (KeyError, TypeError, ValueError) as failure:
        return [(SECTION, str(failure).strip("'\""))]
    return []
