"""A checkpoint under the family's published tensor names, with one tensor for each expert's matrix.

llm-compressor's names of the experts (gate_proj, up_proj, down_proj) and transformers' names of modules (`mlp.` for
`block_sparse_moe.`) are mapped. transformers holds a layer's experts in two fused tensors:

    experts.gate_up_proj (E, 2I, H)   of each expert its gate (I, H) above its up (I, H)
    experts.down_proj    (E, H, I)    of each expert its down

The matrix of an expert is a range of its file's bytes, so nothing is rearranged: the checkpoint gets an entry for each
range, as if it had been saved so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import MATRICES, PROJECTIONS, Matrix
from quantizers.architectures.sizes import Sizes, sizes_of
from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import DTYPE_BYTES, FLOATING, Spec, Stored, TensorInfo
from quantizers.system.errors import CheckpointError

from .awq_gptq import is_awq_or_gptq
from .unsupported import refuse_unsupported

# Legend: E experts, I width of an expert, H hidden size

FUSED: dict[str, tuple[Matrix, ...]] = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
# FP8 would need its scales split as well.
REMEDY = "save the model with transformers' save_pretrained, which takes them apart"


@dataclass(frozen=True)
class Piece:
    """One expert's matrix within a fused tensor: its own name, its shape, and how many elements lie before it."""

    name: str
    shape: tuple[int, ...]
    before: int


def split_fused_experts(checkpoint: Checkpoint, facts: Architecture, sizes: Sizes) -> Checkpoint:
    """The checkpoint with an entry for each expert's matrix in place of every fused tensor.

    Raises:
        CheckpointError: a fused tensor has another layout or dtype, or its experts are stored separately as well.
    """
    pieces = _all_pieces(checkpoint.tensors, facts, sizes, str(checkpoint.folder))
    tensors: dict[str, TensorInfo] = {}
    for name, info in checkpoint.tensors.items():
        if name not in pieces:
            tensors[name] = info
        for piece in pieces.get(name, ()):
            start = info.start + piece.before * DTYPE_BYTES[info.dtype]
            end = start + math.prod(piece.shape) * DTYPE_BYTES[info.dtype]
            tensors[piece.name] = replace(info, name=piece.name, shape=piece.shape, start=start, end=end)
    return replace(checkpoint, tensors=tensors) if pieces else checkpoint


def split_fused_specs(specs: Mapping[str, Spec], facts: Architecture, sizes: Sizes, where: str) -> dict[str, Spec]:
    """The same for headers without files.

    Raises:
        CheckpointError: as `split_fused_experts`.
    """
    pieces = _all_pieces(specs, facts, sizes, where)
    apart = {name: spec for name, spec in specs.items() if name not in pieces}
    return apart | {piece.name: Spec(specs[name].dtype, piece.shape) for name in pieces for piece in pieces[name]}


def is_fused(name: str) -> bool:
    """Whether a name is that of a tensor with all experts of a layer."""
    return name.endswith(tuple(f".experts.{last}" for last in FUSED))


def _all_pieces(tensors: Mapping[str, Stored], facts: Architecture, sizes: Sizes, where: str) -> dict[str, list[Piece]]:
    """The pieces of every fused tensor, in the order of their bytes."""
    fused = {name: info for name, info in tensors.items() if is_fused(name) and not facts.is_unread(name)}
    layers = _layers(facts, sizes) if fused else {}
    result: dict[str, list[Piece]] = {}
    taken = set(tensors)
    for name, info in fused.items():
        shapes = [
            (matrix, sizes.shape(facts.expert_linears[matrix].shape)) for matrix in FUSED[name.rpartition(".")[2]]
        ]
        needed = [sizes["experts"], sum(rows for _, (rows, _) in shapes), shapes[0][1][1]]
        if name not in layers or list(info.shape) != needed or info.dtype not in FLOATING:
            raise CheckpointError(
                f"{where}: {name} holds all experts in one tensor, {info.dtype} {list(info.shape)}; only "
                f"{' or '.join(FLOATING)} {needed} in a layer with experts can be read; {REMEDY}"
            )
        result[name], before = [], 0
        for expert in range(sizes["experts"]):
            for matrix, shape in shapes:
                piece = Piece(f"{facts.expert(layers[name], expert, matrix)}.weight", shape, before)
                if piece.name in taken:
                    raise CheckpointError(f"{where}: {piece.name} is also a part of {name}; keep one")
                taken.add(piece.name)
                result[name].append(piece)
                before += math.prod(shape)
    return result


def _layers(facts: Architecture, sizes: Sizes) -> dict[str, int]:
    """The names that fused tensors can have, the family's own and transformers', with their layers."""
    published = facts.expert_prefix.partition("{expert}")[0].rstrip(".")
    return {
        facts.layer(layer, f"{experts}.{last}"): layer
        for layer in sizes.moe_layers
        for experts in (published, facts.modules.experts)
        for last in FUSED
    }


def published_names(checkpoint: Checkpoint, facts: Architecture) -> Checkpoint:
    """The checkpoint under the family's published tensor names, with fused experts split.

    Raises:
        CheckpointError: its format or its experts' layout is not supported, or two tensors get the same name.
    """
    where = f"{checkpoint.folder}/config.json"
    refuse_unsupported(checkpoint.config, where)
    qweight = next((name for name in checkpoint.tensors if name.endswith(".qweight")), None)
    if qweight is not None and not is_awq_or_gptq(checkpoint.config):
        raise CheckpointError(
            f"{where}: does not declare the AutoAWQ or GPTQ integers in the files ({qweight}); copy their "
            "quantization_config from quant_config.json or quantize_config.json, and add its quant_method"
        )
    tensors: dict[str, TensorInfo] = {}
    kinds = [part for dense in (False, True) for part in (facts.tensors(dense), facts.linears(dense))]
    known = {name for kind in kinds for name in kind}
    for name, info in checkpoint.tensors.items():
        published = _published(name, facts, known)
        if published in tensors:
            raise CheckpointError(f"{info.file}: {name} and {tensors[published].name} are the same tensor; keep one")
        tensors[published] = info
    renamed = replace(checkpoint, tensors={name: replace(info, name=name) for name, info in tensors.items()})
    if any(map(is_fused, tensors)):
        return split_fused_experts(renamed, facts, sizes_of(facts, checkpoint.config, where))
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
    expert = re.search(r"\.experts\.\d+\.(\w+)\.", name)
    if expert:
        for matrix in MATRICES:
            if expert[1] == PROJECTIONS[matrix]:
                at, end = expert.span(1)
                name = name[:at] + facts.expert_linears[matrix].name + name[end:]
    return name
