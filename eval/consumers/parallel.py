"""Whether vLLM can divide a model among a number of tensor-parallel ranks, from its sizes and schemes.

The rules are vLLM's own checks: groups must not cross ranks (CompressedTensorsWNA16MoEMethod); the Marlin
kernel for experts takes groups of 32, 64 and 128 and a hidden size in multiples of 128
(check_moe_marlin_supports_config); and FP8 blocks must cross neither the parts of a fused layer nor ranks
(validate_fp8_block_shape). With fewer key and value heads than ranks, vLLM repeats the heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quantizers.architectures.sizes import Sizes

from .config_groups import ServedScheme

MARLIN_GROUPS, MARLIN_HIDDEN = (32, 64, 128), 128


def tensor_parallel(
    ranks: int, sizes: Sizes, attention: Iterable[ServedScheme | None], experts: Iterable[ServedScheme | None]
) -> str:
    """`ok`, or the first reason why it is not possible.

    Args:
        attention, experts: the schemes of all layers' fused q, k, v and of their experts.
    """
    return next(_obstacles(ranks, sizes, set(attention), set(experts)), "ok")


def _obstacles(
    ranks: int, sizes: Sizes, attention: set[ServedScheme | None], experts: set[ServedScheme | None]
) -> Iterator[str]:
    heads, kv_heads, width = sizes["heads"], sizes["kv_heads"], sizes["width"]
    if heads % ranks:
        yield f"{heads} heads do not divide"
    if kv_heads % ranks and ranks % kv_heads:
        yield f"{kv_heads} key and value heads do not divide"
    if width % ranks:
        yield f"the experts' width {width} does not divide"
    if ranks > sizes["experts"]:
        yield f"there are only {sizes['experts']} experts"
    share = width // ranks
    for scheme in filter(None, experts):
        if scheme.type == "int" and scheme.group_size:
            yield from _groups(sizes["hidden"], share, scheme.group_size)
        elif scheme.block and share % scheme.block[0]:
            yield f"the experts' width per rank, {share}, is not a multiple of the FP8 block, {scheme.block[0]}"
    for scheme in filter(None, attention):
        if scheme.block:
            yield from _blocks(sizes["head_dim"], heads // ranks, max(1, kv_heads // ranks), scheme.block)


def _groups(hidden: int, share: int, group: int) -> Iterator[str]:
    if hidden % group:
        yield f"hidden size {hidden} is not a multiple of the group, {group}"
    if share % group:
        yield f"the experts' width per rank, {share}, is not a multiple of the group, {group}: groups would cross ranks"
    if group not in MARLIN_GROUPS:
        yield f"Marlin takes groups of {', '.join(map(str, MARLIN_GROUPS))}, not {group}"
    if hidden % MARLIN_HIDDEN:
        yield f"hidden size {hidden} is not a multiple of {MARLIN_HIDDEN}, which Marlin needs"


def _blocks(head: int, heads: int, kv_heads: int, block: tuple[int, int]) -> Iterator[str]:
    for name, size, edge in (
        ("q", heads * head, block[0]),
        ("k and v", kv_heads * head, block[0]),
        ("o's input", heads * head, block[1]),
    ):
        if size % edge:
            yield f"{name} per rank, {size}, is not a multiple of the FP8 block, {edge}"
