"""AutoAWQ and GPTQ checkpoints, made by the formats' own formulas: bits are put into words one position at a time."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from whole_models import source_weights

from quantizers.checkpoint.reader import side_files

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output lies in bits 4i to 4i + 3 of a word


@dataclass(frozen=True)
class Kind:
    """How a matrix is quantized and stored.

    Attributes:
        group: columns that share a scale; -1 for all of them.
        symmetric: zero points are all 2^(bits - 1); otherwise as the group's range needs them.
        shuffled: the columns of a group lie anywhere (GPTQ's act-order), so that g_idx decides.
        g_idx: whether g_idx is written.
        missing: what GPTQ's first version takes off each zero point.
    """

    layout: str
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    shuffled: bool = False
    g_idx: bool = True
    missing: int = 1

    def section(self) -> dict[str, Any]:
        common = {"bits": self.bits, "group_size": self.group}
        if self.layout == "awq":
            return common | {
                "quant_method": "awq",
                "version": "gemm",
                "zero_point": True,
                "modules_to_not_convert": None,
            }
        version = "gptq" if self.missing else "gptq_v2"
        return common | {
            "quant_method": "gptq", "checkpoint_format": version, "desc_act": self.shuffled, "sym": self.symmetric,
            "static_groups": False, "true_sequential": True, "lm_head": False, "pack_dtype": "int32",
        }  # fmt: skip


def quantized(weight: torch.Tensor, kind: Kind, seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix (R, C) as its tensors, and the numbers that they stand for, by the definition and in float32."""
    matrix = weight.float().numpy().astype(np.float64)
    rows, columns = matrix.shape
    size, top = (columns if kind.group == -1 else kind.group), 2**kind.bits - 1
    of_column = np.arange(columns) // size
    if kind.shuffled:
        np.random.default_rng(seed).shuffle(of_column)
    count = of_column.max() + 1
    scales, zeros = np.zeros((count, rows), np.float16), np.zeros((count, rows), np.int64)
    codes, numbers = np.zeros((rows, columns), np.int64), np.zeros((rows, columns), np.float32)
    for group in range(count):
        part = matrix[:, of_column == group]
        low, high = part.min(1), part.max(1)
        if kind.symmetric:
            low, high = -abs(part).max(1), abs(part).max(1)
        scales[group] = np.maximum((high - low) / top, 1e-5).astype(np.float16)
        scale = scales[group].astype(np.float64)
        zeros[group] = 2 ** (kind.bits - 1) if kind.symmetric else np.clip(-np.round(low / scale), 0, top)
        code = np.clip(np.round(part / scale[:, None]) + zeros[group][:, None], 0, top)
        codes[:, of_column == group] = code
        numbers[:, of_column == group] = (code - zeros[group][:, None]) * scale[:, None]
    tensors = {"scales": torch.from_numpy(scales)}
    if kind.layout == "awq":
        tensors["qweight"] = words(codes.T, 4, AWQ_ORDER)
        tensors["qzeros"] = words(zeros, 4, AWQ_ORDER)
    else:
        order = tuple(range(32 // kind.bits))
        tensors["qweight"] = words(codes, kind.bits, order).T.contiguous()
        tensors["qzeros"] = words((zeros - kind.missing) % (top + 1), kind.bits, order)
        if kind.g_idx:
            tensors["g_idx"] = torch.from_numpy(of_column.astype(np.int32))
    return tensors, torch.from_numpy(numbers)


def words(codes: np.ndarray, bits: int, order: tuple[int, ...]) -> torch.Tensor:
    """(N, M) numbers as (N, M·bits/32) words; place i of a word holds number order[i] of its 32/bits."""
    in_word = len(order)
    result = np.zeros((codes.shape[0], codes.shape[1] // in_word), np.uint32)
    for place, source in enumerate(order):
        result |= codes[:, source::in_word].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(result.view(np.int32))


def checkpoint(
    source: Path,
    folder: Path,
    kind: Kind,
    *,
    chosen: Callable[[str], Kind | None] | None = None,
    section: Mapping[str, Any] | None = None,
    edit: Callable[[dict[str, torch.Tensor]], None] = lambda _: None,
) -> dict[str, torch.Tensor]:
    """A checkpoint as these programs save one: all linear layers as integers, everything else in FP16.

    Args:
        source: FP8 or BF16, of any family.
        chosen: the kind of a module, None for one that stays plain; `kind` for all but head, router, embeddings.
        section: keys of quantization_config beside or instead of the usual ones.
        edit: of the finished tensors.

    Returns:
        Every parameter as a number, by published name.
    """
    linear = re.compile(r".*(_proj|\.w[123])")
    pick = chosen or (lambda module: kind if linear.fullmatch(module) else None)
    numbers, tensors = {}, {}
    for position, (name, weight) in enumerate(source_weights(source)[1].items()):
        module = name.removesuffix(".weight")
        how = pick(module) if weight.dim() == 2 else None
        if how is None:
            tensors[name] = numbers[name] = weight.half()
            continue
        parts, numbers[name] = quantized(weight, how, seed=position)
        tensors |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    edit(tensors)
    config = json.loads((source / "config.json").read_text())
    tiny.write(
        folder,
        config | {"torch_dtype": "float16", "quantization_config": kind.section() | dict(section or {})},
        tensors,
    )
    for file in side_files(source):
        shutil.copyfile(file, folder / file.name)
    return numbers
