"""Notices that a source and a candidate were given in the wrong order.

A quantized checkpoint says so: it has 4-bit weights (unsupported.py), or was made by a program whose name stands in
quant_method, or carries this program's report.json. If that is the source, and the candidate is none of it, then the
candidate is what the source was made from, and every figure would be the wrong way round.

Only this is refused. Two quantized checkpoints may be compared in either order, and so may two that are not: FP8 and
its BF16 copy, for example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantizers.checkpoint.reader import CONFIG, Checkpoint, read_json
from quantizers.system.errors import CheckpointError, InputError
from quantizers.system.output_files import REPORT

from .awq_gptq import METHODS
from .unsupported import four_bit_key


def refuse_swapped_arguments(source: Checkpoint, candidate: Checkpoint, remedy: str) -> None:
    """Refuse a source that was made from a model such as the candidate is.

    Args:
        remedy: what to give instead.

    Raises:
        CheckpointError: one line that says how either of them shows what it is.
    """
    sign = made(source)
    if sign is not None and made(candidate) is None:
        raise CheckpointError(
            f"{source.name}: is given as the source, but {sign}, and {candidate.name} shows no such sign; they are the "
            f"wrong way round: {remedy}"
        )


def made(checkpoint: Checkpoint) -> str | None:
    """How a checkpoint shows that it was quantized from another; None if it does not."""
    if "seal" in _report(checkpoint):
        return f"its {REPORT} says that this program made it"
    section = checkpoint.config.get("quantization_config")
    if isinstance(section, Mapping) and section.get("quant_method") in METHODS:
        return f"its {CONFIG} says quant_method: {section['quant_method']}"
    sign = four_bit_key(checkpoint.config)
    return None if sign is None else f"its {CONFIG} says {sign}"


def _report(checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        return read_json(checkpoint.folder / REPORT)
    except InputError:
        return {}  # there is none, or it is damaged
