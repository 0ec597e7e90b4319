"""Whether vLLM can divide a checkpoint among a number of tensor-parallel ranks, from its sizes and schemes.

The rules that every output of this program meets or breaks are in `quantizers.plan.tensor_parallel`. Checkpoints that
others have made can break more of vLLM's own checks: the Marlin kernel for experts takes groups of 32, 64 and 128 and a
hidden size in multiples of 128 (check_moe_marlin_supports_config), and experts may be FP8 in blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.sizes import Sizes
from quantizers.plan.tensor_parallel import obstacles, unsaid

from .config_groups import ServedScheme
from .readings import Reading
from .rules import EXPERTS

MARLIN_GROUPS, MARLIN_HIDDEN = (32, 64, 128), 128


def tensor_parallel(ranks: int, facts: Architecture, sizes: Sizes, readings: Sequence[Reading]) -> str:
    """`ok`, or the first reason why it is not possible, or is not known.

    Args:
        readings: of every module that vLLM looks up.
    """
    if problem := unsaid(facts):
        return problem
    experts = {r.scheme for r in readings if r.kind == EXPERTS and r.scheme}
    groups = {scheme.group_size for scheme in experts if scheme.type == "int" and scheme.group_size}
    found = obstacles(ranks, facts, sizes, groups, _blocks(facts, sizes, readings))
    return next(chain(found, _of_experts(ranks, sizes, groups, experts)), "ok")


def _blocks(facts: Architecture, sizes: Sizes, readings: Iterable[Reading]) -> dict[str, tuple[int, int]]:
    """The FP8 blocks of the kept linear modules, by their names without the layer's prefix."""
    kept = facts.linears(dense=False) | (facts.linears(dense=True) if sizes.dense else {})
    blocks: dict[str, tuple[int, int]] = {}
    for reading in readings:
        if reading.layer is None or reading.scheme is None or not reading.scheme.block:
            continue
        names = (member.removeprefix(facts.layer(reading.layer, "")) for member in reading.members)
        blocks |= {name: reading.scheme.block for name in names if name in kept}
    return blocks


def _of_experts(ranks: int, sizes: Sizes, groups: Iterable[int], schemes: Iterable[ServedScheme]) -> Iterator[str]:
    hidden, share = sizes["hidden"], sizes["width"] // ranks
    if ranks > sizes["experts"]:
        yield f"there are only {sizes['experts']} experts"
    for group in groups:
        if hidden % group:
            yield f"hidden size {hidden} is not a multiple of the group, {group}"
        if group not in MARLIN_GROUPS:
            yield f"Marlin takes groups of {', '.join(map(str, MARLIN_GROUPS))}, not {group}"
        if hidden % MARLIN_HIDDEN:
            yield f"hidden size {hidden} is not a multiple of {MARLIN_HIDDEN}, which Marlin needs"
    for scheme in schemes:
        if scheme.type != "int" and scheme.block and share % scheme.block[0]:
            yield f"the experts' width per rank, {share}, is not a multiple of the FP8 block, {scheme.block[0]}"
