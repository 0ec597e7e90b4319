"""What one operation costs: the bytes that it moves and its arithmetic, from its arguments' shapes alone.

Bytes are those of an operation that reads every argument once and writes every result once. An argument that is the
same along a dimension (stride 0) is read once; of a gather only what is picked is read, once for each index.

Arithmetic is that of matrix products, as torch.utils.flop_counter counts it, and of factorizations. Whatever is done
to each number alone costs its bytes; only in float64, of which consumer cards have little, it is counted as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from .fused import own_cost
from .work import Arithmetic, Operation

# They make room, or another name for what is there.
FREE = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "alias"))
# Kernels of those that take more than one, as CUDA's eager operations do.
LAUNCHES = {"argsort": 4, "sort": 4, "topk": 3, "cumsum": 2, "nonzero": 4, "index": 2, "linalg_cholesky_ex": 2}
ONLY_WRITTEN = frozenset(("zero_", "fill_"))
PICKED = frozenset(("gather", "index", "index_select", "embedding"))
SCATTERED = frozenset(("scatter_", "scatter", "scatter_add_", "scatter_add"))
KINDS: dict[torch.dtype, Arithmetic] = {
    torch.bfloat16: "bfloat16", torch.float16: "bfloat16", torch.float32: "float32", torch.float64: "float64",
}  # fmt: skip
# Their sums would be added in the order in which a GPU's threads come; sums of whole numbers have no order.
UNORDERED = frozenset(
    (
        "scatter_add_", "scatter_add", "scatter_reduce", "scatter_reduce_", "index_add", "index_add_", "put_", "histc",
        "bincount", "index_put", "index_put_", "_index_put_impl_", "index_reduce", "index_reduce_", "cumsum",
        "cumsum_", "cumprod", "cumprod_", "segment_reduce",
    )
)  # fmt: skip


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested arguments or results: lists, tuples and mappings."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [tensor for branch in tree for tensor in tensors(branch)]


def size_of(tensor: torch.Tensor) -> int:
    """Bytes that reading all of it takes from memory."""
    distinct = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return distinct * tensor.element_size() if tensor.numel() else 0


def described(function: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Operation:
    """The cost of an operation of torch's that is neither a view nor in FREE.

    Args:
        function: an overload of torch.ops.aten, or of this program's own.
        result: what it gave for these arguments; tensors of any device, whose numbers are not looked at.
    """
    if own := own_cost(function, args, result):
        return own
    name = name_of(function)
    given, made = tensors((args, kwargs)), tensors(result)
    read, written = _moved(name, function, args, kwargs, given, made)
    flops, kind = _arithmetic(name, function, args, given, made)
    return Operation(name, LAUNCHES.get(name, 1), read, written, flops, kind)


@cache
def name_of(function: Any) -> str:
    """An operation's name without namespace and overload."""
    name: str = function._schema.name.rpartition("::")[2]
    return name


def changed(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, bool]]:
    """The arguments that an operation writes to, and whether that is all it does to them."""
    found = []
    for place, name, only in _written_to(function):
        value = args[place] if place is not None and place < len(args) else kwargs.get(name)
        if isinstance(value, torch.Tensor):
            found.append((value, only))
    return found


@cache
def _written_to(function: Any) -> list[tuple[int | None, str, bool]]:
    """Place, name and `out` of the arguments that an operation's schema says it writes to."""
    return [
        (None if argument.kwarg_only else place, argument.name, argument.is_out)
        for place, argument in enumerate(function._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def is_unordered(function: Any, args: Sequence[Any]) -> bool:
    """Whether its sum has no order on a GPU, and the order decides its bits."""
    name = name_of(function)
    if name not in UNORDERED or not any(tensor.is_floating_point() for tensor in tensors(args[:1])):
        return False
    return "index_put" not in name or (len(args) > 3 and bool(args[3]))  # which adds only if it is to accumulate


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool) -> Operation:
    """Attention in one kernel that keeps no matrix of all pairs of tokens, as every GPU has it.

    Args:
        query: (…, T, D).
        key: (…, S, D).
        value: (…, S, V).
        causal: half of the pairs are left out.
    """
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    flops = 2 * pairs * (query.shape[-1] + value.shape[-1]) // (2 if causal else 1)
    written = math.prod(query.shape[:-1]) * value.shape[-1] * query.element_size()
    read = sum(size_of(tensor) for tensor in (query, key, value))
    return Operation("scaled_dot_product_attention", 1, read, written, flops, KINDS[query.dtype])


def _moved(
    name: str,
    function: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    given: list[torch.Tensor],
    made: list[torch.Tensor],
) -> tuple[int, int]:
    targets = changed(function, args, kwargs)
    if name == "copy_":
        return size_of(given[1]) if len(given) > 1 else 0, size_of(given[0])
    if name in PICKED:
        picked = sum(size_of(tensor) for tensor in made)
        return picked + sum(size_of(tensor) for tensor in given[1:]), picked
    if name in SCATTERED:
        index = given[1]
        return sum(size_of(tensor) for tensor in given[1:]), index.numel() * given[0].element_size()
    if name.endswith("_like") or name.startswith("new_"):
        return 0, sum(size_of(tensor) for tensor in made)
    # What is given a second time, as the sum that a product is added to where it lies, is read as well.
    unread = sum(size_of(target) for target, only in targets if only or name in ONLY_WRITTEN)
    read = sum(size_of(tensor) for tensor in given) - unread
    return read, sum(size_of(tensor) for tensor in ([target for target, _ in targets] or made))


def _arithmetic(
    name: str, function: Any, args: Sequence[Any], given: list[torch.Tensor], made: list[torch.Tensor]
) -> tuple[int, Arithmetic]:
    kind = KINDS.get(given[0].dtype, "") if given else ""
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if packet in flop_registry:
        operands = [value for value in args if isinstance(value, torch.Tensor)]
        multiplied = KINDS.get(operands[-1].dtype, "")
        if multiplied == "float32" and torch.get_float32_matmul_precision() == "high":
            multiplied = "tf32"
        return int(flop_registry[packet](*operands, out_val=made[0])), multiplied
    if name == "_grouped_mm":  # (T, M) x (E, M, N): every row with the matrix of its group
        return 2 * args[0].numel() * args[1].shape[-1], kind
    if name == "linalg_cholesky_ex":
        return args[0].numel() * args[0].shape[-1] // 3, "factorization"
    if name == "linalg_solve_triangular":
        return args[1].numel() * args[0].shape[-1], "factorization"
    if any(tensor.dtype == torch.float64 for tensor in given):
        return 2 * sum(tensor.numel() for tensor in made), "float64"
    return 0, ""


def does_nothing(name: str, given: Sequence[torch.Tensor], result: Any) -> bool:
    """Whether torch leaves an operation out: on no element, or a copy onto itself, as at the end of `x[i] -= y`."""

    def place(tensor: torch.Tensor) -> Any:
        return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.stride(), tensor.dtype

    made = tensors(result)
    if made and not any(tensor.numel() for tensor in made):
        return True
    return name == "copy_" and bool(place(given[0]) == place(given[1]))
