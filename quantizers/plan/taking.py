"""Takes tensors out of those that a plan has still to account for, and checks each one against what it must be."""

from __future__ import annotations

from collections.abc import Iterable

from quantizers.architectures.architecture import Architecture
from quantizers.checkpoint.fp8 import ROWS, SCALE_INV, Fp8, scale_of
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.checkpoint.tensor_bytes import DTYPES
from quantizers.system.errors import ArchitectureError, CheckpointError

Remaining = dict[str, Spec]


def take(remaining: Remaining, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], where: str) -> Spec:
    """Take a tensor out of `remaining`.

    Args:
        dtypes: those that it may have, in safetensors' spelling.
        where: the source's name, for messages.

    Raises:
        CheckpointError: it is missing, or has another shape or dtype.
    """
    spec = remaining.pop(name, None)
    if spec is None:
        raise CheckpointError(f"{where}: {name} is missing; the checkpoint is incomplete, download it again")
    if spec.shape != shape:
        raise CheckpointError(
            f"{where}: {name} has shape {list(spec.shape)}, config.json says {list(shape)}; they do not belong "
            "together, download both again"
        )
    if spec.dtype not in dtypes:
        raise CheckpointError(
            f"{where}: {name} is {spec.dtype}; {' or '.join(dtypes)} is needed; give the published checkpoint"
        )
    return spec


def take_scale(remaining: Remaining, module: str, shape: tuple[int, ...], form: Fp8, where: str) -> tuple[str, Spec]:
    """Take the scale of an FP8 weight.

    Args:
        shape: of the weight, (rows, columns).
        form: of all FP8 weights of the checkpoint.

    Returns:
        The scale's name and spec.

    Raises:
        CheckpointError: as `take`, or the weight has a scale per block in a checkpoint with scales per row.
    """
    suffix, needed = scale_of(form, shape)
    other = f"{module}.{SCALE_INV}"
    if form == ROWS and other in remaining:
        raise CheckpointError(
            f"{where}: {other} is a scale per block of FP8, but other tensors have a scale per row (weight_scale); one "
            "config group cannot say both; give the published checkpoint"
        )
    name = f"{module}.{suffix}"
    return name, take(remaining, name, needed, ("F32", "BF16"), where)


def take_unread(
    remaining: Remaining, named: Iterable[str], facts: Architecture, layers: int, where: str
) -> list[tuple[str, Spec, int | None]]:
    """Take the tensors that the facts call unread.

    Args:
        named: the names that are read or written otherwise.
        layers: how many decoder layers there are.

    Returns:
        The name, spec and decoder layer of each; None for one that lies in no layer.

    Raises:
        ArchitectureError: the facts call one of `named` unread.
        CheckpointError: a dtype cannot be read.
    """
    for name in named if facts.unread else ():
        if facts.is_unread(name):
            raise ArchitectureError(
                f"{where}: {name} is called unread by the facts of {facts.model_type}, which name it already; narrow "
                "the expression"
            )
    taken = []
    for name in [name for name in remaining if facts.is_unread(name)]:
        spec = take(remaining, name, remaining[name].shape, tuple(DTYPES), where)
        taken.append((name, spec, _layer_of(name, facts, layers)))
    return taken


def _layer_of(name: str, facts: Architecture, layers: int) -> int | None:
    start, _, _ = facts.layer_prefix.partition("{layer}")
    number = name.removeprefix(start).partition(".")[0] if name.startswith(start) else ""
    if not number.isdecimal() or int(number) >= layers:  # beyond the last one lie those that predict further tokens
        return None
    return int(number) if name.startswith(facts.layer(int(number), "")) else None
