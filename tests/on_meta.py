"""The accelerator's branch without an accelerator: on torch's meta device, where tensors have shapes and no numbers.

What reaches the output is found by following every operation back from the results, through the memory that it read.
Looks at numbers are answered and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quantizers.device import prefetch
from quantizers.solve import rounding, routing_weights

META = torch.device("meta")
Operation = tuple[str, tuple[tuple[tuple[int, ...], str], ...]]


@dataclass
class Node:
    """An operation, and those whose results it read."""

    operation: Operation
    reads: set[int] = field(default_factory=set)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Trace(TorchDispatchMode):
    """Operations in their order, with their shapes and dtypes, and what each of them read."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.last: dict[int, int] = {}  # which operation wrote to a storage last
        self.kept: list[Any] = []  # so that no storage's address is used twice

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # With a dtype of its own, a product that is added to a sum has no shape function in torch.
        result = (
            kwargs["out"] if function._schema.name in ("aten::addmm", "aten::baddbmm") else function(*args, **kwargs)
        )
        given, made = tensors((args, kwargs)), tensors(result)
        shapes = tuple((tuple(t.shape), str(t.dtype)) for t in (*given, *made))
        read = {self.last[key] for t in given if (key := t.untyped_storage()._cdata) in self.last}
        if not function.is_view:
            node = len(self.nodes)
            self.nodes.append(Node((function._schema.name, shapes), read))
            for tensor in made:
                self.last[tensor.untyped_storage()._cdata] = node
            for argument, value in zip(function._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self.last[value.untyped_storage()._cdata] = node
        self.kept += [tensor.untyped_storage() for tensor in made]
        return result

    def behind(self, results: Iterable[torch.Tensor]) -> Counter[Operation]:
        """The operations that some tensors come from, as often as each was done."""
        waiting = [self.last[t.untyped_storage()._cdata] for t in results]
        found: set[int] = set()
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += self.nodes[node].reads
        return Counter(self.nodes[node].operation for node in found)


@contextmanager
def looks_answered(experts: int, chosen: int, rows: list[int]) -> Iterator[list[int]]:
    """Within the block, looks at numbers are answered, with routing that is even.

    Args:
        experts, chosen: E and K of the layer.
        rows: of each block.

    Yields:
        The number of elements of each look.
    """
    looks: list[int] = []

    def answer(tensor: torch.Tensor) -> torch.Tensor:
        looks.append(tensor.numel())
        if tensor.shape != (len(rows), 2 * experts + 1):
            return torch.zeros(tensor.shape, dtype=tensor.dtype)  # numbers for the report
        even = torch.tensor([[-(-count * chosen // experts)] * (2 * experts) + [count] for count in rows])
        return even.to(tensor.dtype)

    with pytest.MonkeyPatch.context() as patched:
        for module in (prefetch, rounding, routing_weights):
            patched.setattr(module, "tensor_to_host", answer)
        yield looks
