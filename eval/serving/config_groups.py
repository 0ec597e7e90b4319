"""What a quantization_config says: the scheme of each config group, its targets, and what is not quantized.

How a serving engine matches its modules with these targets is in rules.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


class Refused(Exception):
    """An engine stops at this module; the message says where and why. A finding, not an error of this program."""


@dataclass(frozen=True)
class ServedScheme:
    """What a config group says about a weight. Schemes compare equal if engines treat them alike, in any group."""

    type: str
    bits: int
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    symmetric: bool
    dynamic: bool
    activations: str | None
    format: str
    group: str = field(compare=False)
    target: str = field(compare=False)

    def __str__(self) -> str:
        name = {"int": "INT", "float": "FP"}.get(self.type, self.type) + str(self.bits)
        if self.strategy == "block" and self.block:
            return f"{name} block {self.block[0]}x{self.block[1]}"
        return f"{name} group {self.group_size}" if self.strategy == "group" else f"{name} per {self.strategy}"

    @property
    def origin(self) -> str:
        """The group and target it comes from, for messages."""
        return f"group {self.group!r}, target {self.target!r}"


@dataclass(frozen=True)
class Rules:
    """A quantization_config in the form that the matching needs.

    Attributes:
        targets: scheme by target, in the order of the file; a target that occurs twice keeps its first place
            and takes the later group's scheme.
        groups: the groups' targets and schemes, in order.
        ignore: names and expressions of modules that are not quantized.
        format: the format of the whole checkpoint.
    """

    targets: Mapping[str, ServedScheme]
    groups: tuple[tuple[tuple[str, ...], ServedScheme], ...]
    ignore: tuple[str, ...]
    format: str


def read_rules(section: Mapping[str, Any]) -> Rules:
    """The rules of a quantization_config.

    Raises:
        Refused: it does not have the structure that the engines need.
    """
    try:
        whole_format = str(section.get("format"))
        targets: dict[str, ServedScheme] = {}
        groups: list[tuple[tuple[str, ...], ServedScheme]] = []
        for name, group in section["config_groups"].items():
            scheme = scheme_of(name, group, whole_format)
            for target in group["targets"]:
                targets[target] = replace(scheme, target=target)
            groups.append((tuple(group["targets"]), scheme))
        ignore = tuple(section.get("ignore") or ())
        for pattern in (*targets, *ignore):
            if pattern.startswith("re:"):
                re.compile(pattern[3:])
    except re.error as failure:
        raise Refused(f"{failure.pattern!r} is not a regular expression ({failure.msg})") from None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as failure:
        raise Refused(f"config_groups is not shaped as the engines need it ({failure!r})") from None
    return Rules(targets, tuple(groups), ignore, whole_format)


def scheme_of(name: str, group: Mapping[str, Any], whole: str) -> ServedScheme:
    """The scheme of a config group; `whole` is the checkpoint's format, used if the group has none of its own."""
    weights = group["weights"]
    size, block = weights.get("group_size"), weights.get("block_structure")
    strategy = weights.get("strategy") or ("tensor" if size is None else "group" if size > 0 else "channel")
    activations = group.get("input_activations")
    return ServedScheme(
        type=weights.get("type", "int"),
        bits=int(weights.get("num_bits", 8)),
        strategy=strategy,
        group_size=size,
        block=(int(block[0]), int(block[1])) if block else None,
        symmetric=bool(weights.get("symmetric", True)),
        dynamic=bool(weights.get("dynamic", False)),
        activations=json.dumps(activations, sort_keys=True) if activations else None,
        format=group.get("format") or whole,
        group=name,
        target="",
    )
