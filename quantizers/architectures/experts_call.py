"""The call of a layer's routed experts with states, indices and weights, which nearly all classes in transformers have.

Llama 4's experts get one tensor instead, E blocks of all tokens: in the block of the expert that the router chose for a
token its state times the router's score, in all others zeros. Here that is a call with this product, the expert, and a
weight of 1; so a token must go through one expert alone.

Legend: T tokens, H hidden size, E experts, K experts chosen per token.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .skeleton import replaced_forward

Routed = tuple[torch.Tensor, ...]  # states (T, H), indices (T, K) and weights (T, K)


def weighs_inputs(experts: Any) -> bool:
    """Whether a module of experts takes one tensor, their inputs times the router's scores."""
    return len(inspect.signature(type(experts).forward).parameters) == 2  # the module itself is one


def arguments_of(experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Routed:
    """The states, indices and weights with which a module of experts is called."""
    given = (*args, *kwargs.values())
    return _routed(given[0], len(experts.down_proj)) if weighs_inputs(experts) else given


def experts_per_token(states: torch.Tensor, experts: int) -> int:
    """The most experts whose blocks in one tensor (E · T, H) have numbers of the same token."""
    return int(_blocks(states, experts).ne(0).any(-1).sum(0).max())


@contextlib.contextmanager
def replaced_experts(experts: Any, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let a module of experts run this with states, indices and weights instead of its own forward."""
    if not weighs_inputs(experts):
        with replaced_forward(experts, forward):
            yield
        return
    count = len(experts.down_proj)

    def spread(states: torch.Tensor) -> torch.Tensor:
        x, chosen, weight = _routed(states, count)
        result = states.new_zeros(count, *x.shape)
        result[chosen[:, 0], torch.arange(len(x), device=x.device)] = forward(x, chosen, weight)
        return result.flatten(0, 1)

    with replaced_forward(experts, spread):
        yield


def of_chosen_rows(experts: Any) -> Callable[..., torch.Tensor]:
    """Its own forward of experts that get one tensor, without the rows of zeros: those of no expert's tokens.

    Blocks are as long as the most that an expert gets, not as all tokens.
    """
    count, own = len(experts.down_proj), experts.forward

    def forward(x: torch.Tensor, chosen: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        expert = chosen[:, 0]
        order = expert.argsort(stable=True)
        tokens = torch.bincount(expert, minlength=count)
        place = torch.arange(len(x), device=x.device) - (tokens.cumsum(0) - tokens)[expert[order]]
        blocks = x.new_zeros(count, int(tokens.max()), x.shape[-1])
        blocks[expert[order], place] = x[order]
        result = torch.empty_like(x)
        result[order] = own(blocks.flatten(0, 1)).view_as(blocks)[expert[order], place]
        return result

    return forward


def _blocks(states: torch.Tensor, experts: int) -> torch.Tensor:
    return states.view(experts, -1, states.shape[-1])


def _routed(states: torch.Tensor, experts: int) -> Routed:
    blocks = _blocks(states, experts)
    largest = torch.linalg.vector_norm(blocks, torch.inf, dim=-1)  # (E, T); a NaN counts as largest
    chosen = largest.argmax(0)
    x = blocks[chosen, torch.arange(len(chosen), device=states.device)]
    return x, chosen.unsqueeze(1), torch.ones(len(chosen), 1, device=states.device)
