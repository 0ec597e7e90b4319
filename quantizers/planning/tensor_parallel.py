"""How vLLM divides a model among tensor-parallel GPUs, and what keeps it from doing so.

    heads       a GPU has whole ones; those of keys and values are repeated where there are more GPUs
    experts     no group of a scale may cross GPUs (CompressedTensorsWNA16MoEMethod)
    FP8 blocks  cross neither GPUs nor the modules that are merged into one (validate_fp8_block_shape). Of merged
                modules that a GPU has in full, the last one may end within a block. FP8 with a scale per row has no
                such rule

The architecture spec says in `tensor_parallel` which linear modules are divided; every GPU has all of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.fused import FUSED
from quantizers.architectures.sizes import Sizes

MARLIN_TILE = 64  # of an expert's width on a GPU; up to vLLM 0.32 it had to be whole, later ones fill it up with zeros
Blocks = Mapping[str, tuple[int, int]]  # rows and columns of an FP8 block, by module, without the layer's prefix


def unsaid(facts: Architecture) -> str | None:
    """Why nothing can be said about GPUs: the facts do not say how servers divide such a model. None if they do."""
    lacking = [key for key in ("kv_cache", "tensor_parallel") if getattr(facts, key) is None]
    if not lacking:
        return None
    return (
        f"the facts of {facts.model_type} have no {' and no '.join(lacking)}, so what a GPU would hold is not known; "
        "add them as in quantizers/architectures/minimax_m2.yaml"
    )


def cache_cards(ranks: int, facts: Architecture, sizes: Sizes) -> int:
    """The number of GPUs among which a token's keys and values are divided: 1 if every GPU has all of them."""
    assert facts.kv_cache is not None
    return min(ranks, sizes.value(facts.kv_cache.split_by)) if facts.kv_cache.split_by else 1


def module_cards(module: str, ranks: int, facts: Architecture, sizes: Sizes) -> int:
    """The number of GPUs among which an unquantized linear module is divided: 1 if each has all of it.

    Args:
        module: its name without the layer's prefix.
    """
    assert facts.kv_cache is not None
    parts = _parts(facts).get(module)
    if parts is None:
        return 1
    return cache_cards(ranks, facts, sizes) if parts == facts.kv_cache.split_by else ranks


def obstacles(ranks: int, facts: Architecture, sizes: Sizes, groups: Iterable[int], blocks: Blocks) -> Iterator[str]:
    """Every reason why a model cannot be divided among `ranks` GPUs.

    Args:
        facts: with `kv_cache` and `tensor_parallel`, see `unsaid`.
        groups: group sizes of the experts' integers.
        blocks: of the kept linear modules that are FP8 with a scale per block.
    """
    assert facts.kv_cache is not None
    heads, width, split = sizes["heads"], sizes["width"], facts.kv_cache.split_by
    if heads % ranks:
        yield f"{heads} attention heads are not a multiple of {ranks}"
    if split and sizes.value(split) % ranks and ranks % sizes.value(split):
        yield f"{sizes.value(split)} key-value heads and {ranks} GPUs are no multiples of each other"
    if width % ranks:
        yield f"the experts' width {width} is not a multiple of {ranks}"
    for group in sorted(groups, reverse=True):
        if width // ranks % group:
            yield (
                f"the experts' width per rank, {width // ranks}, is not a multiple of the group, {group}: groups would "
                "cross ranks"
            )
    shapes = facts.linears(dense=False) | (facts.linears(dense=True) if sizes.dense else {})
    for module, parts in _parts(facts).items():
        if module in shapes and parts not in ("heads", split) and sizes.value(parts) % ranks:
            yield f"{module} has {sizes.value(parts)} parts, which are not a multiple of {ranks}"
    for module, block in blocks.items():
        yield from _within_blocks(module, sizes.shape(shapes[module]), block, ranks, facts, sizes)


def _within_blocks(
    module: str, shape: tuple[int, ...], block: tuple[int, int], ranks: int, facts: Architecture, sizes: Sizes
) -> Iterator[str]:
    assert facts.tensor_parallel is not None
    if ranks > 1 and module in _parts(facts):
        edge = 0 if module in facts.tensor_parallel.rows else 1
        share = shape[edge] // module_cards(module, ranks, facts, sizes)
        if share % block[edge]:
            side = ("rows", "columns")[edge]
            yield f"{module}'s {side} per rank, {share}, are not a multiple of the FP8 block, {block[edge]}"
    elif shape[0] % block[0] and _is_followed(module, facts):
        yield f"{module}'s rows, {shape[0]}, are merged with others and not a multiple of the FP8 block, {block[0]}"


def _is_followed(module: str, facts: Architecture) -> bool:
    """Whether vLLM makes one module of this one and others, of which it is not the last."""
    last = module.rpartition(".")[2]
    merged = FUSED | (facts.servers["vllm"].fused if "vllm" in facts.servers else {})
    return any(last in parts[:-1] for parts in merged.values())


def _parts(facts: Architecture) -> dict[str, str]:
    """Into how many parts each module can be divided that is, as an expression in sizes."""
    assert facts.tensor_parallel is not None
    return facts.tensor_parallel.rows | facts.tensor_parallel.columns
