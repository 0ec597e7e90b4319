"""The tensors of a model's files that its class in transformers would write, for planning without the files.

Names and shapes are the class's own, forms of weights those that config.json declares. What the class does not load,
such as a layer that predicts further tokens, is not among them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch

from quantizers.system.errors import ArchitectureError

from .derive import skeleton_of
from .skeleton import Skeleton
from .stored_tensors import EXPERT, OF_ALL_EXPERTS, Header, tied_parameters

FP8 = "F8_E4M3"
SCALE, TABLE_SCALE = "_scale_inv", "weight_scale"  # ends of names
FILES = "give the files, or leave them on the Hub, of which headers are read"
DTYPES = {torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL"}


def class_tensors(config: dict[str, Any]) -> dict[str, Header]:
    """The header entries by name: floating ones in bfloat16, or float32 where the class keeps it, or in FP8.

    Raises:
        ArchitectureError: transformers cannot make the class, config.json declares another form of weights, or a layer
            has several sets of experts.
    """
    return dict(_class_tensors(json.dumps(config)))


@cache
def _class_tensors(text: str) -> dict[str, Header]:
    config = json.loads(text)
    section = config.get("quantization_config")
    block = _block(section)
    skeleton = skeleton_of({key: value for key, value in config.items() if key != "quantization_config"})
    matrices = _matrices(skeleton)
    tensors: dict[str, Header] = {}
    for name, parameter, header in _written(skeleton):
        tensors[name] = header
        if block is None or header.dtype != "BF16":
            continue
        if parameter in matrices and _is_converted(name, section):
            tensors[name] = Header(FP8, header.shape)
            *several, rows, columns = header.shape
            blocks = (*several, math.ceil(rows / block[0]), math.ceil(columns / block[1]))
            tensors[f"{name}{SCALE}"] = Header("F32", blocks)
        elif (table := _table_of(name, section)) is not None:
            tensors[name] = Header(FP8, header.shape)
            tensors[f"{table}.{TABLE_SCALE}"] = Header("BF16", (1,))
    return tensors


def _block(section: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Rows and columns of an FP8 block; None where weights are not FP8."""
    if not section:
        return None
    block = section.get("weight_block_size")
    if section.get("quant_method") != "fp8" or not isinstance(block, list) or len(block) != 2:
        raise ArchitectureError(
            "quantization_config",
            "which tensors it means is not known without the files: only FP8 in blocks is, or no quantization_config",
            FILES,
        )
    return block[0], block[1]


def _written(skeleton: Skeleton) -> Iterator[tuple[str, str | None, Header]]:
    """The tensors that transformers writes of the model, with the class's parameter that each is, or is a part of.

    Those of one expert stand for all while it is asked.
    """
    from transformers.core_model_loading import build_glob_alternation, revert_weight_conversion

    kept = list(getattr(skeleton.model, "_keep_in_fp32_modules_strict", None) or ())
    precise = build_glob_alternation(kept)[0] if kept else None
    fused = [name for name, t in skeleton.parameters.items() if OF_ALL_EXPERTS.search(name) and t.dim() == 3]
    of_one = {name: t[:1] if name in fused else t for name, t in skeleton.parameters.items()}
    tied = tied_parameters(skeleton)
    # By module; experts without matrices have a row in what reads, and none in down.
    counts = {name.rpartition(".")[0]: skeleton.parameters[name].shape[0] for name in fused if "down_proj" in name}
    for name, tensor in revert_weight_conversion(skeleton.model, of_one).items():
        parameter, shape = _parameter(skeleton, name), tuple(tensor.shape)
        if parameter in tied:  # written once, as the other
            continue
        is_precise = precise is not None and parameter is not None and precise.search(parameter)
        dtype = DTYPES.get(tensor.dtype, "F32" if is_precise else "BF16")
        if parameter is None or parameter not in fused:
            yield name, parameter, Header(dtype, shape)
            continue
        count, expert = counts[parameter.rpartition(".")[0]], EXPERT.search(name)
        if expert is None:
            yield name, parameter, Header(dtype, (count, *shape[1:]))
        elif expert[2] != "0":
            problem = (
                f"{skeleton.name} has several sets of experts; which have which numbers is not known without files"
            )
            raise ArchitectureError(name, problem, FILES)
        for number in range(count) if expert else ():
            yield EXPERT.sub(rf"\g<1>{number}\3", name), parameter, Header(dtype, shape)


def _parameter(skeleton: Skeleton, name: str) -> str | None:
    """The class's name of the parameter that a stored tensor is loaded to; None if the model does without it."""
    place = skeleton.place(name)
    if place is None:
        return None
    return place.parameter if place.layer is None else f"{skeleton.path}.{place.layer}.{place.parameter}"


def _matrices(skeleton: Skeleton) -> set[str]:
    """The class's names of the weights that may be FP8 in blocks: those of linear modules and of experts."""
    modules = skeleton.model.named_modules()
    linears = {f"{path}.weight" for path, module in modules if isinstance(module, torch.nn.Linear)}
    return linears | {name for name in skeleton.parameters if OF_ALL_EXPERTS.search(name)}


def _is_converted(name: str, section: Mapping[str, Any]) -> bool:
    """Whether a matrix is FP8 in blocks, since it is not excluded."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    module, _, last = name.rpartition(".")
    return last == "weight" and should_convert_module(module, section.get("modules_to_not_convert") or [])


def _table_of(name: str, section: Mapping[str, Any]) -> str | None:
    """The module of an FP8 table that a tensor is of, by its published name; None if it is of none."""
    modules = section.get("modules_to_convert") or []
    return next((m[0] for end in modules if (m := re.match(rf".*{re.escape(end)}(?=\.)", name))), None)
