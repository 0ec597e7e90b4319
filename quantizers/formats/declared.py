"""The forms of weights that a source's config.json declares, by module: what is known of them without its files."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantizers.checkpoint.safetensors_header import Spec
from quantizers.system.errors import CheckpointError

from .dequantization import row_formats
from .format import SCALE, QuantizedFormat
from .fp8 import SCALE_INV, Fp8, Fp8Blocks, declared_block
from .modelopt import MODELOPT, algorithm
from .mxfp8 import Mxfp8

UNCONVERTED = ("modules_to_not_convert", "ignored_layers")  # keys of quant_method fp8 and mxfp8
EVERY_LINEAR = "Linear"  # the target of compressed-tensors that is a class


@dataclass(frozen=True)
class Declared:
    """The forms that config groups declare.

    Attributes:
        groups: for each its targets, as compressed-tensors reads them, and its form.
        ignore: targets that no group applies to.
        scale: the last name of the scales of FP8 and MXFP8.
        unconverted: patterns of modules that have plain numbers, as transformers reads them.
    """

    groups: tuple[tuple[tuple[str, ...], QuantizedFormat], ...] = ()
    ignore: tuple[str, ...] = ()
    scale: str = SCALE
    unconverted: tuple[str, ...] = ()

    def of(self, module: str) -> QuantizedFormat | None:
        """The form of a linear module's weight, by its full name; None for plain numbers."""
        from compressed_tensors.utils.match import match_name

        if any(match_name(module, target) for target in self.ignore):
            return None
        for pattern in self.unconverted:
            if _is_of(module, pattern):
                return None
        for targets, form in self.groups:
            if any(target == EVERY_LINEAR or match_name(module, target) for target in targets):
                return form
        return None

    def specs(self, module: str, shape: tuple[int, ...], scale_dtype: str) -> dict[str, Spec]:
        """The tensors of a linear module's weight (R, C), by their full names; FP8's scales have this dtype."""
        form = self.of(module)
        if form is None:
            return {f"{module}.weight": Spec("BF16", shape)}
        if not isinstance(form, Fp8 | Mxfp8):
            return form.specs(module, shape)
        (codes, spec), (_, scale) = form.parts(shape)
        dtype = scale_dtype if isinstance(form, Fp8) else scale.dtype
        return {f"{module}.{codes}": spec, f"{module}.{self.scale}": Spec(dtype, scale.shape)}


def declared_forms(config: Mapping[str, Any], where: str) -> Declared:
    """The forms that the content of config.json declares; `where` is its path, for messages.

    Raises:
        CheckpointError: it declares weights that no source can have, or does not say of which modules.
    """
    section = config.get("quantization_config")
    if not section:
        return Declared()
    block, method = declared_block(config, where), section.get("quant_method")
    if method == "compressed-tensors":
        ignore = section.get("ignore")
        return Declared(group_forms(config, where), tuple(ignore) if isinstance(ignore, list) else ())
    if method == MODELOPT and algorithm(section) == "MXFP8" and not _beyond_head(section):
        return Declared((((EVERY_LINEAR,), Mxfp8()),))
    if method == "mxfp8":
        return Declared((((EVERY_LINEAR,), Mxfp8()),), scale=SCALE_INV, unconverted=_unconverted(section, where))
    if method != "fp8" or config.get("expert_dtype") not in (None, "fp8"):
        raise CheckpointError(
            f"{where}: quantization_config",
            "does not say how each matrix is stored, so that nothing can be planned without the files' headers",
            "give the folder with the shards, or --hub",
        )
    form = Fp8Blocks(*block)
    return Declared((((EVERY_LINEAR,), form),), scale=SCALE_INV, unconverted=_unconverted(section, where))


def _unconverted(section: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The patterns of modules that have plain numbers where quant_method is fp8 or mxfp8."""
    patterns = list[str]()
    for key in UNCONVERTED:
        given = section.get(key) or []
        if not isinstance(given, list):
            raise CheckpointError(
                f"{where}: quantization_config.{key}", f"is {reprlib.repr(given)}", "a list of names is needed"
            )
        for pattern in given:
            try:
                re.compile(pattern)
            except (re.error, TypeError):
                problem = f"{reprlib.repr(pattern)} is no regular expression"
                raise CheckpointError(
                    f"{where}: quantization_config.{key}", problem, "download config.json again"
                ) from None
            patterns.append(pattern)
    return tuple(patterns)


def _is_of(module: str, pattern: str) -> bool:
    """Whether a pattern is of a module: transformers 5.24's `should_convert_module`.

    Earlier ones take `mlp.gate_proj` for `mlp.gate`, and to import it takes seconds.
    """
    return module.endswith(pattern) or re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module) is not None


def _beyond_head(section: Mapping[str, Any]) -> list[Any]:
    """The modules besides the head that ModelOpt left as they were."""
    inner = section.get("quantization")
    sections = [section, *([inner] if isinstance(inner, Mapping) else [])]
    given = [keys.get(key) or [] for keys in sections for key in ("ignore", "exclude_modules")]
    names = [name for value in given for name in (value if isinstance(value, list) else [value])]
    return [name for name in names if "lm_head" not in str(name)]


def group_forms(config: Mapping[str, Any], where: str) -> tuple[tuple[tuple[str, ...], QuantizedFormat], ...]:
    """The targets and the form of each config group of compressed-tensors; `where` is the path of config.json.

    Raises:
        CheckpointError: a group declares weights that no source can have.
    """
    section = config["quantization_config"]
    forms = [form for form in row_formats() if issubclass(form, QuantizedFormat)]
    given, groups = section.get("config_groups"), list[tuple[tuple[str, ...], QuantizedFormat]]()
    for name, group in (given if isinstance(given, Mapping) and given else {"group_0": None}).items():
        keys: Mapping[str, Any] = group if isinstance(group, Mapping) else {}
        stated = keys.get("weights")
        weights: Mapping[str, Any] = stated if isinstance(stated, Mapping) else {}
        targets = keys.get("targets")
        # What becomes of activations is the server's: integers are read alike with it.
        inputs = (keys.get("input_activations"), None)
        read = (kind.of_config_group(weights, of_inputs) for of_inputs in inputs for kind in forms)
        form = next(filter(None, read), None)
        if form is None or not weights.get("symmetric", True):
            declared = f"{weights.get('type')}{weights.get('num_bits')} {weights.get('strategy')}"
            raise CheckpointError(
                f"{where}: quantization_config.config_groups",
                f"{name}: weights are {declared if weights else reprlib.repr(stated)}, symmetric: "
                f"{str(weights.get('symmetric', True)).lower()}; no source in this form can be quantized",
                "give the model's FP8 or BF16 release",
            )
        groups.append((tuple(targets) if isinstance(targets, list) else (), form))
    return tuple(groups)
