"""Facts that fit one checkpoint, made from the built-in facts of a family, for `quantize new MODEL --facts`."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.facts import SizeFacts
from quantizers.architectures.families import known
from quantizers.architectures.sizes import sizes_of
from quantizers.checkpoint.reader import CONFIG, open_folder
from quantizers.checkpoint.safetensors_header import Spec, printed
from quantizers.formats.fp8 import declared_block
from quantizers.formats.tensor_names import split_fused_specs
from quantizers.system.errors import ArchitectureError
from quantizers.system.strict_yaml import parse

from .assign_actions import mtp_layers
from .differences import Difference, compare
from .fit_sizes import fit_sizes
from .fit_tensors import fit_known, fit_scales
from .fit_unknown import fit_unknown

NOT_TAKEN_OVER = ("published",)  # true of the published models, and maybe not of this one


@dataclass(frozen=True)
class Fitted:
    """Facts that fit a checkpoint as far as facts can.

    Attributes:
        family: of the built-in facts that they were made from.
        values: the new facts as in YAML.
        differences: from the built-in facts, all of them.
        suspects: the names in the new facts of unknown tensors that may read the norm before the experts; there they
            are among its readers.
    """

    family: str
    values: dict[str, Any]
    differences: list[Difference]
    suspects: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For --json, without the facts themselves."""
        differences = [asdict(one) for one in self.differences]
        return {"family": self.family, "differences": differences, "check": self.suspects, "fits": self.fits}

    @property
    def fits(self) -> bool:
        """Whether a checkpoint with these facts can be planned."""
        return all(one.written is not None for one in self.differences)


def read_headers(model: str) -> tuple[dict[str, Any], dict[str, Spec], str]:
    """config.json and every header of a checkpoint, and its name for messages.

    Args:
        model: a folder, or a Hub id, of which nothing but headers is fetched.

    Raises:
        CheckpointError: it is neither, or one of its files is wrong.
    """
    if Path(model).is_dir():
        opened = open_folder(Path(model))
        specs = {name: Spec(info.dtype, info.shape) for name, info in opened.tensors.items()}
        return opened.config, specs, str(opened.folder / CONFIG)
    from quantizers.planning.hub_headers import read_hub

    config, specs, _ = read_hub(model, "main")
    return config, specs, model


def fit_facts(config: Mapping[str, Any], tensors: Mapping[str, Spec], where: str, like: str | None = None) -> Fitted:
    """Change the built-in facts of a family until they fit a checkpoint.

    Args:
        config: config.json.
        tensors: every header.
        where: the checkpoint's name, for messages.
        like: the family; that of config.json's model_type by default.

    Raises:
        ArchitectureError: there is no such family, or config.json contradicts itself.
        CheckpointError: a size is in neither config.json nor the headers.
    """
    config, family = dict(config), _family(config, where, like)
    values: dict[str, Any] = copy.deepcopy(parse(known()[family])[0])
    for key in NOT_TAKEN_OVER:
        values.pop(key, None)
    differences = [*_another_family(values, config, family), *_asserts(values, config)]
    facts = _read(values)
    for name, size in fit_sizes(facts, config, tensors, where).items():
        values["sizes"][name] = size.key if size.otherwise is None else _in_yaml(size)
        kept = facts.sizes[name]
        written = f"{name}: {size.key if size.otherwise is None else size.otherwise}"
        differences.append(Difference("size", kept.key, kept.otherwise or "the key", "no such key", written))
    facts = _read(values).of_model(config)
    sizes = sizes_of(facts, config, where)
    tensors = split_fused_specs(tensors, facts, sizes, where)
    differences += fit_known(values, facts, compare(facts, sizes, config, tensors, where))
    facts = _read(values).of_model(config)
    compared = compare(facts, sizes, config, tensors, where)
    differences += fit_scales(values, facts, compared.scales)
    mtp = mtp_layers(facts, sizes, tensors)
    unknown, suspects = fit_unknown(values, facts, sizes, compared.unknown, declared_block(config, where), mtp)
    _read(values)
    return Fitted(family, values, [*differences, *unknown], suspects)


def _in_yaml(size: SizeFacts) -> dict[str, Any]:
    term = str(size.otherwise)
    return {"key": size.key, "otherwise": int(term) if term.isdigit() else term}


def _read(values: Mapping[str, Any]) -> Architecture:
    return Architecture.model_validate(values)


def _family(config: Mapping[str, Any], where: str, like: str | None) -> str:
    families, model_type = known(), config.get("model_type")
    if not isinstance(model_type, str):
        raise ArchitectureError(f"{where}: model_type is missing; give a transformers checkpoint")
    if like is not None and like not in families:
        raise ArchitectureError(f"--like {like}: no such family; give one of {', '.join(families)}")
    if like is None and model_type not in families:
        raise ArchitectureError(
            f"{where}: model_type {reprlib.repr(model_type)} is not known; name the family that is most like it: "
            f"--like {' or --like '.join(families)}"
        )
    return like or model_type


def _another_family(values: dict[str, Any], config: Mapping[str, Any], family: str) -> list[Difference]:
    """Take over the names of a family that is not known; no server is known to know it."""
    if config["model_type"] == family:
        return []
    values["model_type"] = config["model_type"]
    model_type = printed(config["model_type"])
    differences = [Difference("family", "model_type", family, model_type, model_type)]
    classes = config.get("architectures")
    if isinstance(classes, list) and classes and isinstance(classes[0], str) and classes[0] != values["model_class"]:
        name = printed(classes[0])
        differences.append(Difference("family", "model_class", values["model_class"], name, name))
        values["model_class"] = classes[0]
    if servers := values.pop("servers", None):
        differences.append(Difference("family", "servers", ", ".join(servers), "not known", "none"))
    return differences


def _asserts(values: dict[str, Any], config: Mapping[str, Any]) -> list[Difference]:
    """Write what the forward pass relies on as the checkpoint has it."""
    differing = {key: kept for key, kept in values["asserts"].items() if key in config and config[key] != kept}
    values["asserts"] |= {key: config[key] for key in differing}
    return [
        Difference("assert", key, reprlib.repr(kept), reprlib.repr(config[key]), reprlib.repr(config[key]))
        for key, kept in differing.items()
    ]
