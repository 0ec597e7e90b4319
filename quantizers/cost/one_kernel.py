"""Attention, counted as the one kernel that a GPU has for it."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .counting import Counting
from .operations import attention


class OneKernel(TorchFunctionMode):
    """Within it attention is one kernel, as on a GPU; the meta device has a matrix for all pairs of tokens."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self._counting = counting

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.nn.functional.scaled_dot_product_attention or not args[0].is_meta:
            return function(*args, **(kwargs or {}))
        query, key, value = args[:3]
        self._counting.kernel(args, attention(query, key, value, causal=bool((kwargs or {}).get("is_causal"))))
        return query.new_empty(*query.shape[:-1], value.shape[-1])
