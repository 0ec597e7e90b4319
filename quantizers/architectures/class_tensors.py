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
from .stored_tensors import EXPERT, OF_ALL_EXPERTS, Header

FP8 = "F8_E4M3"
SCALE, TABLE_SCALE = "_scale_inv", "weight_scale"  # ends of names
DTYPES = {torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL"}
FORMS = "fp8 in blocks, and none"  # of quantization_config, that are known here


def class_tensors(config: dict[str, Any]) -> dict[str, Header]:
    """The header entries by name: floating ones in bfloat16, or float32 where the class keeps it, or in FP8.

    Raises:
        ArchitectureError: transformers cannot make the class, or config.json declares another form of weights.
    """
    return dict(_class_tensors(json.dumps(config)))


@cache
def _class_tensors(text: str) -> dict[str, Header]:
    config = json.loads(text)
    section = config.get("quantization_config")
    block = _block(section)
    skeleton = skeleton_of({key: value for key, value in config.items() if key != "quantization_config"})
    tensors: dict[str, Header] = {}
    for name, header in _written(skeleton):
        if block is None or header.dtype != "BF16":
            tensors[name] = header
        elif _is_converted(skeleton, name, section):
            tensors[name] = Header(FP8, header.shape)
            shape = tuple(math.ceil(size / edge) for size, edge in zip(header.shape, block, strict=True))
            tensors[f"{name}{SCALE}"] = Header("F32", shape)
        elif (table := _table_of(name, section)) is not None:
            tensors[name] = Header(FP8, header.shape)
            tensors[f"{table}.{TABLE_SCALE}"] = Header("BF16", (1,))
        else:
            tensors[name] = header
    return tensors


def _block(section: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Rows and columns of an FP8 block; None where weights are not FP8."""
    if not section:
        return None
    block = section.get("weight_block_size")
    if section.get("quant_method") != "fp8" or not isinstance(block, list) or len(block) != 2:
        raise ArchitectureError(
            "quantization_config",
            f"which tensors it means is not known without the files ({FORMS}: is)",
            "give the files, or leave them on the Hub, of which headers are read",
        )
    return block[0], block[1]


def _written(skeleton: Skeleton) -> Iterator[tuple[str, Header]]:
    """The tensors that transformers writes of the model; those of one expert stand for all while it is asked."""
    from transformers.core_model_loading import revert_weight_conversion

    precise = tuple(getattr(skeleton.model, "_keep_in_fp32_modules_strict", None) or ())
    fused = [name for name, t in skeleton.parameters.items() if OF_ALL_EXPERTS.search(name) and t.dim() == 3]
    of_one = {name: t[:1] if name in fused else t for name, t in skeleton.parameters.items()}
    counts = {name.rpartition(".")[0].partition(".experts")[0]: skeleton.parameters[name].shape[0] for name in fused}
    (count,) = set(counts.values()) or {0}
    own = skeleton.parameters
    for name, tensor in revert_weight_conversion(skeleton.model, of_one).items():
        dtype = DTYPES.get(tensor.dtype, "F32" if name.endswith(precise) and precise else "BF16")
        if (expert := EXPERT.search(name)) and expert[2] == "0":
            for number in range(count):
                yield EXPERT.sub(rf"\g<1>{number}\3", name), Header(dtype, tuple(tensor.shape))
        elif fused and tensor.dim() == 3 and tensor.shape[0] == 1 and (name not in own or name in fused):
            yield name, Header(dtype, (count, *tensor.shape[1:]))
        else:
            yield name, Header(dtype, tuple(tensor.shape))


def _is_converted(skeleton: Skeleton, name: str, section: Mapping[str, Any]) -> bool:
    """Whether a tensor is FP8 in blocks: a linear module's, or an expert's matrix, and not excluded."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    module, _, last = name.rpartition(".")
    if last != "weight" or not should_convert_module(module, section.get("modules_to_not_convert") or []):
        return False
    return _is_linear(skeleton, EXPERT.sub(r"\g<1>0\3", name))


@cache
def _is_linear(skeleton: Skeleton, name: str) -> bool:
    place = skeleton.place(name)
    if place is None:
        return False
    if EXPERT.search(name) or OF_ALL_EXPERTS.search(place.parameter):
        return True
    start = "" if place.layer is None else f"{skeleton.path}.{place.layer}."
    path = f"{start}{place.parameter}".removesuffix(".weight")
    modules = dict(skeleton.model.named_modules())
    return isinstance(modules.get(path), torch.nn.Linear)


def _table_of(name: str, section: Mapping[str, Any]) -> str | None:
    """The module of an FP8 table that a tensor is of, by its published name; None if it is of none."""
    modules = section.get("modules_to_convert") or []
    return next((m[0] for end in modules if (m := re.match(rf".*{re.escape(end)}(?=\.)", name))), None)
