"""Audits a checkpoint of AutoAWQ, GPTQ or AutoRound against the model that it was made from.

There is no plan that such a checkpoint could be held against. So every tensor of the source gets an account of what
became of it:

    kept       the same bytes
    converted  the same numbers in another dtype: FP16 of BF16, or of FP8 by way of BF16
    folded     a norm that was divided by AWQ's scale; a router, or a matrix that is no integer, multiplied by it
    quantized  integers of a format, and how far they are from the source, with AWQ's scales undone

What is none of these is a difference, and so is a tensor that is missing or that nothing accounts for. AWQ's scales are
undone as far as the checkpoint shows them: norms by their ratio; those between two matrices, such as up and down, by
least squares. The facts say where there may be any (`smoothing`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import MATRICES
from quantizers.architectures.sizes import Sizes
from quantizers.checkpoint.integer_words import PARTS, words_of
from quantizers.checkpoint.reader import Checkpoint
from quantizers.forward.smoothing import (
    CLOSE_ENOUGH,
    SAME_FACTOR,
    State,
    matrix_errors,
    reader_state,
    router_state,
    row_scale,
    stored_norm_ratio,
)
from quantizers.forward.weights import read_weight
from quantizers.system.errors import CheckpointError

from .layer import NOT_COMPENSATED, WITHOUT_A_FOLD, LayerAudit, missing_layer

SCALES = (".weight_scale_inv", ".weight_scale")  # of FP8
OTHERS = ("torch_dtype", "dtype", "transformers_version", "_name_or_path", "use_cache")  # which saving a model changes
SECTION_FILES = ("quantize_config.json", "quant_config.json")  # where these programs write their section a second time


@dataclass
class Account:
    """What became of the source's tensors.

    Attributes:
        became: number of tensors by what became of them.
        error: the largest relative error of a quantized matrix.
        read: the candidate's tensors that were accounted for.
    """

    became: Counter[str] = field(default_factory=Counter)
    error: float = 0.0
    read: set[str] = field(default_factory=set)

    def lines(self) -> list[str]:
        """One line for each fate, the most frequent first."""
        lines = [f"{count:,} {what}" for what, count in self.became.most_common()]
        return [*lines, f"quantized matrices: at most {self.error:.3f} away from the source's"] if self.error else lines


def comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without the keys that describe how the model was saved."""
    return {key: value for key, value in config.items() if key not in OTHERS}


def audit_words_layer(
    layer: int | None,
    facts: Architecture,
    sizes: Sizes,
    source: Checkpoint,
    candidate: Checkpoint,
    *,
    device: torch.device,
    account: Account,
) -> LayerAudit:
    """Account for the tensors of one layer, or for those outside the layers.

    Args:
        source, candidate: under published names.
        account: of the whole checkpoint; added to.

    Raises:
        CheckpointError: the source is broken. A fault of the candidate's is a difference.
    """
    audit = LayerAudit()
    inside = facts.layer(layer, "") if layer is not None else None
    layers = tuple(facts.layer(number, "") for number in (*range(sizes["layers"]), *sizes.mtp))
    if (
        layer is not None
        and layer in sizes.mtp
        and not any(name.startswith(facts.layer(layer, "")) for name in candidate.tensors)
    ):
        audit.tensors = sum(name.startswith(facts.layer(layer, "")) for name in source.tensors)
        if audit.tensors:
            audit.differences.append(missing_layer(facts, layer, audit.tensors))
        return audit
    ratios = {} if layer is None else _ratios(layer, facts, source, candidate, audit)
    folded = {} if layer is None else _folded(layer, facts, sizes, source, candidate, ratios=ratios, audit=audit)
    quantized: list[str] = []
    for name, info in source.tensors.items():
        belongs = name.startswith(inside) if inside is not None else not name.startswith(layers)
        if not belongs or facts.is_unread(name):
            continue
        audit.tensors += 1
        module = name.removesuffix(".weight")
        if name.endswith(SCALES) and f"{name.rpartition('.')[0]}.weight" in source.tensors:
            account.became["scales of FP8, taken up by their matrices"] += 1
            continue
        if f"{module}.qweight" in candidate.tensors:
            quantized.append(module)
            account.read |= {f"{module}.{part}" for part in (*PARTS, "bias")}
            account.became[f"quantized to {describe(candidate, module)}"] += 1
        elif name not in candidate.tensors:
            audit.differences.append(f"{name}: missing; the source has it")
        else:
            account.read.add(name)
            became = _plain(name, source, candidate, device)
            if became is None and name in folded:
                became = folded[name]
            if became is None:
                audit.differences.append(f"{name}: {info.dtype} {list(info.shape)} of the source, but other numbers")
            else:
                audit.kept += became == "kept byte for byte"
                account.became[became] += 1
    found = _errors(layer, facts, sizes, source, candidate, quantized, device=device, ratios=ratios, audit=audit)
    account.error = max(account.error, *found.values(), 0.0)
    return audit


def describe(candidate: Checkpoint, module: str) -> str:
    """The format of a module's integers, in words."""
    words = words_of(candidate)
    bits, group = words.of(module) or (words.bits, words.group)
    name = {"awq": "AutoAWQ", "gptq": "GPTQ"}[words.layout]
    return f"{name} INT{bits} {'per channel' if group == -1 else f'group {group}'}"


def _plain(name: str, source: Checkpoint, candidate: Checkpoint, device: torch.device) -> str | None:
    """What became of a tensor that is stored as numbers; None if they are others than the source's."""
    before, after = source.tensors[name], candidate.tensors[name]
    if before.dtype == after.dtype and before.shape == after.shape and source.sha256(name) == candidate.sha256(name):
        return "kept byte for byte"
    if before.shape != after.shape or after.dtype not in ("F16", "BF16", "F32"):
        return None
    if before.dtype == "F8_E4M3":
        numbers = read_weight(source, name.removesuffix(".weight"), device).cpu()
    else:
        numbers = source.tensor(name).float()
    found = candidate.tensor(name)
    ways = (numbers.to(found.dtype), numbers.bfloat16().to(found.dtype))
    return f"converted to {after.dtype}" if any(torch.equal(way, found) for way in ways) else None


def _ratios(
    layer: int, facts: Architecture, source: Checkpoint, candidate: Checkpoint, audit: LayerAudit
) -> dict[str, torch.Tensor]:
    """What each of a layer's norms was divided by, by the norm's name in the layer.

    One that cannot be compared is not among them; why is added to the differences, but for one that is missing: the
    source's absence is the family's, and the candidate's is reported by its account.
    """
    found: dict[str, torch.Tensor] = {}
    linears = facts.linears(dense=True) | facts.linears(dense=False)
    for short in dict.fromkeys((facts.norm.tensor, *(before for before in facts.smoothing if before not in linears))):
        name = facts.layer(layer, short)
        if name not in source.tensors or name not in candidate.tensors:
            continue
        try:
            ratio = stored_norm_ratio(source, candidate, name, facts.norm.offset)
        except CheckpointError as failure:
            audit.differences.append(str(failure))
        else:
            found[short] = ratio
    return found


def _folded(
    layer: int,
    facts: Architecture,
    sizes: Sizes,
    source: Checkpoint,
    candidate: Checkpoint,
    *,
    ratios: Mapping[str, torch.Tensor],
    audit: LayerAudit,
) -> dict[str, str]:
    """A layer's norms, router and matrices that carry a scale of AWQ's; adds what lacks it to the differences.

    Matrices that are quantized are compared in `_errors`.

    Args:
        ratios: see `_ratios`.
    """
    divided = {short: ratio for short, ratio in ratios.items() if bool((ratio != 1).any())}
    folded = {facts.layer(layer, short): "norms divided by a scale" for short in divided}
    for short, scale in divided.items():
        left = []
        others = facts.also_reads_the_norm if short == facts.norm.tensor else []
        for linear in dict.fromkeys((*facts.smoothing.get(short, ()), *others)):
            name = facts.layer(layer, f"{linear}.weight")
            if name in candidate.tensors and name in source.tensors:
                state = _reader_state(name, source, candidate, scale)
                if state == "compensated":
                    folded[name] = "matrices multiplied by their norm's scale"
                elif state == "not compensated":
                    left.append(linear)
        if left:
            audit.differences.append(
                f"{facts.layer(layer, left[0])}: {NOT_COMPENSATED} {facts.layer(layer, short)} was divided in "
                f"{int((scale != 1).sum())} of {len(scale)} channels: {' and '.join(left)} read it and have the "
                f"source's numbers; {WITHOUT_A_FOLD}"
            )
    ratio = divided.get(facts.norm.tensor)
    norm, router = facts.layer(layer, facts.norm.tensor), facts.layer(layer, facts.router.tensor)
    if layer in sizes.dense or ratio is None or router not in candidate.tensors:
        return folded
    if candidate.tensors[router].shape != source.tensors[router].shape:
        return folded  # which its account reports
    state = router_state(source.tensor(router), candidate.tensor(router), ratio)
    if state == "compensated":
        folded[router] = "routers multiplied by their norm's scale"
    elif state == "not compensated":
        audit.differences.append(
            f"{router}: {NOT_COMPENSATED} {norm} was divided in {int((ratio != 1).sum())} of {len(ratio)} channels: "
            "the router chooses other experts than the source's"
        )
    return folded


def _reader_state(name: str, source: Checkpoint, candidate: Checkpoint, ratio: torch.Tensor) -> State:
    """Whether a matrix that is no integer was multiplied by its norm's ratio; one of another shape is "unclear"."""
    if candidate.tensors[name].shape != source.tensors[name].shape:
        return "unclear"  # which its account reports
    cpu = torch.device("cpu")
    before, after = (read_weight(one, name.removesuffix(".weight"), cpu) for one in (source, candidate))
    return reader_state(before, after, ratio, SAME_FACTOR)


def _errors(
    layer: int | None,
    facts: Architecture,
    sizes: Sizes,
    source: Checkpoint,
    candidate: Checkpoint,
    quantized: Sequence[str],
    *,
    device: torch.device,
    ratios: Mapping[str, torch.Tensor],
    audit: LayerAudit,
) -> dict[str, float]:
    """The relative error of each of a layer's quantized matrices; adds those that are too far to the differences.

    Args:
        quantized: the modules.
        ratios: see `_ratios`.
    """
    on_device = {short: ratio.to(device) for short, ratio in ratios.items()}
    smooth = on_device.get(facts.norm.tensor)
    found: dict[str, float] = {}
    others = dict.fromkeys(quantized)
    for expert in range(0 if layer is None or layer in sizes.dense else sizes["experts"]):
        assert layer is not None
        modules = [facts.expert(layer, expert, matrix) for matrix in MATRICES]
        if not all(module in others for module in modules):
            continue
        for module in modules:
            del others[module]
        both = _both(modules, source, candidate, device, audit)
        if both is not None and smooth is not None:
            found |= dict(zip(modules, matrix_errors(*both, smooth).tolist(), strict=True))
    if layer is not None:
        audit.weight_error = max(found.values(), default=None)
    inside = "" if layer is None else facts.layer(layer, "")
    linears = facts.linears(layer in sizes.dense)
    for module in others:
        both = _both([module], source, candidate, device, audit)
        if both is None:
            continue
        (wanted,), (weight,) = both
        short = module.removeprefix(inside)
        before = facts.scaled_with(short) if short in linears else None
        if before in on_device:
            wanted = wanted * on_device[before]
        if short in facts.smoothing:  # from its rows a scale may have moved
            wanted = wanted * row_scale(weight, wanted).unsqueeze(1)
        if before in linears:
            wanted = wanted * row_scale(weight.T, wanted.T)
        found[module] = float((weight - wanted).norm() / wanted.norm().clamp(min=torch.finfo(torch.float32).tiny))
    audit.differences += [
        f"{module}.qweight: {error:.0%} away from the source's matrix; it is another one, or was scaled in a way that "
        "the norms do not show"
        for module, error in found.items()
        if not error < CLOSE_ENOUGH
    ]
    return found


def _both(
    modules: list[str], source: Checkpoint, candidate: Checkpoint, device: torch.device, audit: LayerAudit
) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """The source's matrices and the candidate's; None, and a difference, where the candidate's cannot be read."""
    try:
        new = [read_weight(candidate, module, device) for module in modules]
    except CheckpointError as failure:
        audit.differences.append(str(failure))
        return None
    old = [read_weight(source, module, device) for module in modules]
    wrong = next((module for module, a, b in zip(modules, old, new, strict=True) if a.shape != b.shape), None)
    if wrong is not None:
        audit.differences.append(f"{wrong}.qweight: has another shape than the source's matrix")
        return None
    return old, new
