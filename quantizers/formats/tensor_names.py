"""A checkpoint under the family's published tensor names, with one tensor for each expert's matrix.

llm-compressor's names of the experts (gate_proj, up_proj, down_proj) and transformers' names of modules (`mlp.` for
`block_sparse_moe.`) are mapped. transformers holds a layer's experts in two fused tensors:

    experts.gate_up_proj (E, 2I, H)   of each expert its gate (I, H) above its up (I, H)
    experts.down_proj    (E, H, I)    of each expert its down

Without a gate it is experts.up_proj (E, I, H) instead of the first. Some classes hold all of them transposed, and gate
and up then beside each other, or in turns.

In gpt-oss they are MXFP4, with quant_method mxfp4, and not transposed; transformers transposes them as it reads them:

    experts.gate_up_proj_blocks U8 (E, 2I, H / 32, 16), experts.gate_up_proj_scales U8 (E, 2I, H / 32)
    experts.down_proj_blocks    U8 (E, H, I / 32, 16),  experts.down_proj_scales    U8 (E, H, I / 32)

Other tensors of all experts are named by a family's facts (`fused`), gate and up in one or apart. One that holds a
single matrix of each may be FP8, with the scales of its blocks beside it. An expert's matrix is a range of its file's
bytes, or some columns of such a range, so the checkpoint gets an entry for each, as if it had been saved so.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import PROJECTIONS, Matrix
from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import DTYPE_BYTES, FLOATING, FP8, Columns, Rows, Stored, TensorInfo
from quantizers.system.errors import CheckpointError

from .awq_gptq import is_awq_or_gptq
from .e8m0 import BYTES, GROUP
from .format import SCALE
from .modelopt import refuse_undeclared
from .mxfp4 import BLOCKS, SCALES_OF_BLOCKS
from .unsupported import refuse_unsupported

# Legend: E experts, I width of an expert, H hidden size

Entry = TypeVar("Entry", bound=Stored)
SCALES = "_scale_inv"  # what follows the name of an FP8 weight in that of its blocks' scales
REMEDY = "save the model with transformers' save_pretrained, which takes them apart"


def split_fused_experts(checkpoint: Checkpoint, facts: Architecture) -> Checkpoint:
    """The checkpoint after `split_fused`."""
    return replace(checkpoint, tensors=split_fused(checkpoint.tensors, facts, str(checkpoint.folder)))


def fused_matrices(name: str, ends: Mapping[str, Sequence[Matrix]]) -> Sequence[Matrix]:
    """Which matrices of all experts of a layer a tensor of this name holds, one above the other; none for another.

    Args:
        ends: the model's `Architecture.fused_ends`.
    """
    for end, matrices in ends.items():
        if name.endswith(end):
            return matrices
    return ()


def split_fused(tensors: Mapping[str, Entry], facts: Architecture, where: str) -> dict[str, Entry]:
    """Header entries with one for each expert's matrix, in the order of their bytes, in place of every fused tensor.

    Raises:
        CheckpointError: a fused tensor has another layout or dtype, or its experts are stored separately as well.
    """
    # The names that fused tensors can have, the family's own and transformers'.
    published = facts.expert_prefix.partition("{expert}")[0].rstrip(".")
    names = [f"{experts}.{last}" for experts in (published, facts.modules.experts) for last in facts.expert_parameters]
    layers = {facts.layer(layer, name): layer for layer in facts.moe_layers for name in (*names, *facts.fused)}
    ends = facts.fused_ends
    result: dict[str, Entry] = {}
    for name, info in tensors.items():
        weight = name.removesuffix(SCALES)
        matrices = fused_matrices(weight, ends)
        packed = name.removesuffix(BLOCKS).removesuffix(SCALES_OF_BLOCKS)
        if packed != name and fused_matrices(packed, ends) and not facts.is_unread(name):
            result |= _mxfp4_experts(packed, name, info, facts, layers.get(packed), where)
            continue
        if not matrices or facts.is_unread(name):
            result[name] = info
            continue
        rows, columns = facts.expert_linears[matrices[0]].shape
        dtypes: tuple[str, ...] = FLOATING
        if len(matrices) == 1 and weight != name:  # whether they fit the matrix is asked where that is read
            rows, columns = (*info.shape, 0, 0)[1:3]
        elif len(matrices) == 1 and f"{weight}{SCALES}" in tensors:
            dtypes = (*FLOATING, FP8)
        count, transposed = len(matrices), facts.modules.transposed
        needed = (
            (facts.num_experts, columns, count * rows) if transposed else (facts.num_experts, count * rows, columns)
        )
        if weight not in layers or tuple(info.shape) != needed or info.dtype not in dtypes:
            raise CheckpointError(
                where,
                f"{name} holds all experts in one tensor, {info.dtype} {list(info.shape)}; only {' or '.join(dtypes)} "
                f"{list(needed)} in a layer with experts can be read",
                REMEDY,
            )
        size, place = rows * columns * DTYPE_BYTES[info.dtype], dict[str, Any]()
        alternating = facts.modules.interleaved and count > 1
        for number, (expert, matrix) in enumerate(product(range(facts.num_experts), matrices)):
            single = f"{facts.expert(layers[weight], expert, matrix)}.weight{name.removeprefix(weight)}"
            if single in tensors or single in result:
                raise CheckpointError(where, f"{single} is also a part of {name}", "keep one")
            if isinstance(info, TensorInfo):
                first, several = (number - number % count, count) if transposed else (number, 1)
                place = {"name": single, "start": info.start + first * size}
                place["end"] = place["start"] + several * size
                if transposed:
                    at = number % count
                    place["part"] = Columns(count * rows, at if alternating else at * rows, count if alternating else 1)
            result[single] = replace(info, shape=(rows, columns), **place)
    return result


def _mxfp4_experts(
    base: str, name: str, info: Entry, facts: Architecture, layer: int | None, where: str
) -> dict[str, Entry]:
    """Header entries for each expert's matrix in a tensor of MXFP4's bytes or scales; gate and up may take turns."""
    matrices, end = fused_matrices(base, facts.fused_ends), name.removeprefix(base)
    rows, columns = facts.expert_linears[matrices[0]].shape
    count, groups = len(matrices), columns // GROUP
    needed = (facts.num_experts, count * rows, groups, *((GROUP // 2,) if end == BLOCKS else ()))
    if layer is None or columns % GROUP or (info.dtype, tuple(info.shape)) != (BYTES, needed):
        raise CheckpointError(
            where,
            f"{name} holds all experts in MXFP4, {info.dtype} {list(info.shape)}; only {BYTES} {list(needed)} in a "
            f"layer with experts, whose {columns} columns are groups of {GROUP}, can be read",
            "give the published checkpoint",
        )
    width = groups * GROUP // 2 if end == BLOCKS else groups
    alternating, size = facts.modules.interleaved and count > 1, rows * width
    experts: dict[str, Entry] = {}
    for number, (expert, (at, matrix)) in enumerate(product(range(facts.num_experts), enumerate(matrices))):
        single = f"{facts.expert(layer, expert, matrix)}.{'weight' if end == BLOCKS else SCALE}"
        place: dict[str, Any] = {}
        if isinstance(info, TensorInfo):
            first, several = (number - at, count) if alternating else (number, 1)
            start = info.start + first * size
            part = Rows(at, count) if alternating else None
            place = {"name": single, "start": start, "end": start + several * size, "part": part}
        experts[single] = replace(info, shape=(rows, width), **place)
    return experts


def published_names(checkpoint: Checkpoint, facts: Architecture) -> Checkpoint:
    """The checkpoint under the family's published tensor names, with fused experts split.

    Raises:
        CheckpointError: its format or its experts' layout is not supported, or two tensors get the same name.
    """
    where = f"{checkpoint.folder}/config.json"
    refuse_unsupported(checkpoint.config, where)
    refuse_undeclared(checkpoint)
    qweight = next((name for name in checkpoint.tensors if name.endswith(".qweight")), None)
    if qweight is not None and not is_awq_or_gptq(checkpoint.config):
        raise CheckpointError(
            where,
            f"does not declare the AutoAWQ or GPTQ integers in the files ({qweight})",
            "copy their quantization_config from quant_config.json or quantize_config.json, and add its quant_method",
        )
    tensors: dict[str, TensorInfo] = {}
    known = {name for kind in facts.kinds for name in (*kind.tensors, *kind.linears)}
    for name, info in checkpoint.tensors.items():
        published = _published(name, facts, known)
        if published in tensors:
            raise CheckpointError(info.file, f"{name} and {tensors[published].name} are the same tensor", "keep one")
        tensors[published] = info
    renamed = replace(checkpoint, tensors={name: replace(info, name=name) for name, info in tensors.items()})
    ends = facts.fused_ends
    if any(fused_matrices(name.removesuffix(BLOCKS), ends) for name in tensors):
        return split_fused_experts(renamed, facts)
    return renamed


def _published(name: str, facts: Architecture, known: Collection[str]) -> str:
    within = re.sub(r"^.*?\.\d+\.", "", name)  # without the layer's prefix
    if within in known or within.rpartition(".")[0] in known:
        return name  # as published, although it may begin as a module of transformers' does
    for published, module in facts.modules.rename.items():
        name = name.replace(f".{module}.", f".{published}.", 1)
    for alias, published in facts.modules.aliases.items():
        if name.endswith(f".{alias}"):
            name = name.removesuffix(alias) + published
    matrices = {PROJECTIONS[matrix]: facts.expert_linears[matrix].name for matrix in facts.matrices}
    return re.sub(r"(\.experts\.\d+\.)(\w+)(?=\.)", lambda m: m[1] + matrices.get(m[2], m[2]), name, count=1)
