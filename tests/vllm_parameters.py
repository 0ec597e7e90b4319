"""The parameters of one of vLLM's models, compared with the tensors of a checkpoint."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

# vLLM's fused layers, and the stored layers whose rows they hold, in this order.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
# The matrices of the vocabulary in a model that predicts further tokens (MTP): their names in the layer, and the main
# model's, whose values it takes where the layer has none of its own.
SHARED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
# Between these vLLM may convert while it loads. Codes and packed integers must keep their dtype: a cast would load
# without an error, and be wrong.
CONVERTIBLE = (torch.bfloat16, torch.float16, torch.float32)


def parameters_of(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, Tensor]]:
    """Parameters by name, with the module they belong to; a tied one occurs once.

    Without those of `Attention`: they are placeholders for scales of a KV cache, which keep vLLM's 1.0 where a
    checkpoint has none. A checkpoint that has some is found out, since its tensors then have no place.
    """
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name, _ in model.named_parameters()}
    return {name: (owners[name], p) for name, p in model.named_parameters() if not isinstance(owners[name], Attention)}


def fill(parameter: Tensor) -> None:
    """Set every byte to 0xFF."""
    parameter.data.view(torch.uint8).fill_(0xFF)


def places(name: str, module: Any, parameter: Tensor, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Names of stored tensors, and the parts of a parameter that must equal them, in the stored layout.

    Args:
        name: the parameter's, for example `model.layers.0.self_attn.qkv_proj.weight_scale`.
        module: the vLLM module that has it.
        parameter: rows of all parts of a fused layer; of experts, [experts, rows, columns] (or transposed, and then
            marked so), with gate above up in `w13`.
        tensors: the stored ones; their rows say where the parts of a fused layer end.
    """
    prefix, _, kind = name.rpartition(".")
    parent, _, layer = prefix.rpartition(".")
    if isinstance(module, RoutedExperts):
        fused, _, kind = kind.partition("_")
        gate, up, down = module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name
        parts = {"w13": (gate, up), "w2": (down,)}[fused]
        transposed = getattr(parameter, "is_transposed", False)
        for expert, held in enumerate(parameter.data):
            whole = held.t() if transposed else held
            # The shape is one pair of numbers, for gate and up alike: vLLM writes both into the same place.
            views = [whole] * len(parts) if kind == "weight_shape" else whole.chunk(len(parts))
            for part, view in zip(parts, views, strict=True):
                yield f"{prefix.removesuffix('.routed_experts')}.{expert}.{part}.{kind}", view
    elif layer in FUSED:
        start = 0
        for part in FUSED[layer]:
            stored_name = f"{parent}.{part}.{kind}"
            end = start + len(tensors.get(stored_name, ()))
            yield stored_name, parameter.data[start:end]
            start = end
    else:
        yield name, parameter.data


def mtp_names(parameters: Mapping[str, Any], names: set[str]) -> dict[str, str]:
    """The stored names of an MTP model's parameters (fused ones keep vLLM's last word), by its own for them.

    vLLM puts a decoder layer into such a layer as `mtp_block`, and has the embedding once for all of them.
    """
    (prefix,) = {match[0] for name in parameters if (match := re.match(r"model\.layers\.\d+\.", name))}
    found = {}
    for name in parameters:
        own = name.replace(".mtp_block.", ".")
        own = own if own.startswith(prefix) else prefix + own.removeprefix("model.")
        found[name] = own if own in names else SHARED.get(own.removeprefix(prefix), own)
    return found


def filled(parameter: Tensor) -> int:
    """How many elements `fill` has left, or something that has the same bytes."""
    return int((raw(parameter) == 0xFF).all(1).sum())


def raw(tensor: Tensor) -> Tensor:
    """Bytes, uint8 [elements, bytes of an element]."""
    return tensor.reshape(-1).contiguous().view(torch.uint8).view(tensor.numel(), tensor.element_size())


def difference(name: str, tensor: Tensor, view: Tensor) -> str | None:
    """What keeps a part of a parameter from being the stored tensor; None if it is, bit by bit in vLLM's dtype."""
    if tensor.shape != view.shape:
        return f"stored as {list(tensor.shape)}, but vLLM has {list(view.shape)} for it"
    convertible = tensor.dtype in CONVERTIBLE and view.dtype in CONVERTIBLE
    if tensor.dtype != view.dtype and not convertible and not name.endswith(".weight_shape"):
        return f"stored as {tensor.dtype}, but vLLM holds it as {view.dtype}"
    unequal = (raw(view) != raw(tensor.to(view.dtype))).any(1)
    return f"{int(unequal.sum())} of {len(unequal)} elements differ" if unequal.any() else None


def compare(
    model: torch.nn.Module, mtp: torch.nn.Module | None, names: set[str], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Every parameter of a loaded model, and of its MTP model, with the stored tensors.

    Args:
        model, mtp: loaded, their weights not yet rearranged; what they hold is lost.
        names: of all tensors in the folder that vLLM has read.
        tensors: the values to compare with.

    Returns:
        The figures of the report: `parameters`, `tensors` (those found once and equal), `conversions` (dtypes by
        name without numbers), `problems`.
    """
    problems: list[str] = []
    found: Counter[str] = Counter()
    equal: set[str] = set()
    conversions: dict[str, Counter[str]] = {}
    parameters = [(name, name, *held) for name, held in parameters_of(model).items()]
    if mtp is not None:
        drafted = parameters_of(mtp)
        parameters += [(name, own, *drafted[name]) for name, own in mtp_names(drafted, names).items()]
    again = set(SHARED.values()) if mtp is not None else set()
    for name, own, module, whole in parameters:
        padded = isinstance(module, VocabParallelEmbedding)  # with zeros, to a multiple of 64 rows
        parameter = whole[: module.org_vocab_size] if padded else whole
        placed, right = list(places(own, module, parameter, tensors)), []
        for stored_name, view in placed:
            found[stored_name] += 1
            tensor = tensors.get(stored_name)
            if tensor is None or stored_name not in names:
                problems.append(f"{stored_name}: not in the checkpoint, but vLLM has {name} for it")
            elif problem := difference(stored_name, tensor, view):
                problems.append(f"{stored_name}: {problem}")
            else:
                right.append(view)
                equal.add(stored_name)
            if tensor is not None and tensor.dtype != view.dtype:
                exact = torch.equal(raw(tensor.to(view.dtype).to(tensor.dtype)), raw(tensor))
                text = f"{tensor.dtype} to {view.dtype}, {'exact' if exact else 'rounded'}".replace("torch.", "")
                conversions.setdefault(re.sub(r"\.\d+\.", ".N.", stored_name), Counter())[text] += 1
        # What is right may have any bytes; of the rest, 0xFF says that vLLM has not written it.
        for view in right:
            view.zero_()
        if count := filled(parameter):
            problems.append(f"{name}: {count} of {parameter.numel()} elements were never written")
        # All values have been compared, so the same bytes can show which elements no stored tensor accounts for.
        fill(parameter)
        for _, view in placed:
            view.zero_()
        if count := filled(parameter):
            problems.append(f"{name}: {count} of {parameter.numel()} elements belong to no stored tensor")
    placed_well = {name for name in names if found[name] == 1 or (found[name] == 2 and name in again)}
    problems += [f"{name}: found in {found[name]} places of vLLM's model" for name in sorted(names - placed_well)]
    return {
        "parameters": len(parameters),
        "tensors": len(placed_well & equal),
        "conversions": conversions,
        "problems": problems,
    }
