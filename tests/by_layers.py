"""What a model computes layer by layer here, and as transformers' whole model, its oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantizers.model.proof import BOUND, Proof
from quantizers.model.streamed_model import DecoderLayer, StreamedModel

TOLERANCE = 2e-6  # of the largest value; 9e-7 at most was seen, but CPUs add in other orders


def streamed(model: StreamedModel, texts: list[Tensor]) -> list[Tensor]:
    """For each pair of texts (2, T) the states (2, T, H) before each layer and the logits; each layer is proven."""
    proof, table, head = Proof(model), model.embedding(), model.head()
    states = [[torch.stack([model.begin(text, table) for text in pair])] for pair in texts]
    for number in range(model.facts.num_layers):
        with model.layer(number) as layer:
            assert proof.of_layer(layer) <= BOUND[model.dtype]
            for passed in states:
                passed.append(through(model, layer, passed[-1]))
                assert (passed[-1].dtype, passed[-1].shape[-1]) == (model.dtype, model.row_width)
    return [
        one
        for *before, last in states
        for one in (
            *(rows[..., : model.hidden] for rows in before),
            torch.stack([model.logits(model.final(text) @ head.mT) for text in last]),
        )
    ]


def through(model: StreamedModel, layer: DecoderLayer, states: Tensor) -> Tensor:
    """A layer's output for texts of one length (B, T, H), together where they can go through it so."""
    if layer.alone:
        return torch.stack([model.run(layer, text)[0] for text in states])
    entering = model.attend(layer, states)
    if layer.halves:
        return model.finish(layer, entering.flatten(0, 1))[0].view_as(states)
    return model.finish(layer, entering)[0]


@torch.no_grad()
def of_the_whole(whole: Any, path: str, texts: list[Tensor]) -> list[Tensor]:
    """The same of transformers' whole model, whose decoder layers are at this path."""
    found: list[Tensor] = []

    def entered(_: torch.nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        found.append((args[0] if args else kwargs["hidden_states"]).flatten(2))

    for layer in whole.get_submodule(path):
        layer.register_forward_pre_hook(entered, with_kwargs=True)
    for pair in texts:
        found.append(whole(input_ids=pair, use_cache=False).logits)
    return found


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, as a part of the largest value of the second."""
    assert one.shape == other.shape
    return float((one - other).abs().max() / other.abs().max())
