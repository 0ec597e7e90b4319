"""Keys and values on their way into attention, through transformers' attention interface, which every model calls.

They arrive after rotation, and before those of a group of heads are repeated: as a server caches them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Gets the attention module, keys and values (B, heads, T, channels); returns the keys and values that attention reads.
Through = Callable[[torch.nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
NAME, EAGER = "through", "eager"
_current: ContextVar[tuple[Through, str]] = ContextVar("through")


def _attend(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
    through, implementation = _current.get()
    key, value = through(module, key, value)
    return _function(module, implementation)(module, query, key, value, *rest, **named)


def _function(module: torch.nn.Module, implementation: str) -> Callable[..., Any]:
    """The implementation of this name: eager attention is each model's own."""
    if implementation == EAGER:
        own: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
        return own
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    registered: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[implementation]
    return registered


@cache
def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)


@contextlib.contextmanager
def keys_and_values(layer: torch.nn.Module, through: Through) -> Iterator[None]:
    """Let the keys and values of a decoder layer, one of transformers' modules, go through a function in the block.

    The implementation is another only while the layer runs: by its name, masks are made before.
    """
    _register()
    configs: dict[int, Any] = {
        id(module.config): module.config for module in layer.modules() if hasattr(module, "config")
    }
    own: dict[int, str] = {number: config._attn_implementation for number, config in configs.items()}

    def begin(*_: Any) -> None:
        _current.set((through, next(iter(own.values()), EAGER)))
        for config in configs.values():
            config._attn_implementation = NAME

    def end(*_: Any) -> None:
        for number, config in configs.items():
            config._attn_implementation = own[number]

    hooks = layer.register_forward_pre_hook(begin), layer.register_forward_hook(end, always_call=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
