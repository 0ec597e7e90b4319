"""Every mixture-of-experts type of transformers, streamed layer by layer, against transformers' whole model.

A type has the whole model's hidden states before every layer and its logits, two sequences at a time, or it is refused
with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor
from whole_models import source_weights

from quantizers.architectures.families import architecture_for
from quantizers.architectures.sizes import sizes_of
from quantizers.checkpoint.reader import open_folder
from quantizers.formats.tensor_names import split_fused_experts
from quantizers.model.proof import BOUND, Proof
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.system.errors import ArchitectureError

LENGTHS = (96, 57)
TOLERANCE = 1e-6  # of the largest value

# These together have every kind of layer: see the words beside each.
QUICK = {
    "afmoe": "norms behind attention and MoE block, so that layers run whole; sliding windows; a factor on embeddings",
    "cohere2_moe": "attention and MoE block beside each other; a logit scale",
    "deepseek_v32": "latent attention, an indexer, dense layers",
    "granitemoe_swa": "factors on embeddings and logits, sliding windows",
    "laguna": "layers with shapes of their own",
    "lfm2_moe": "convolutions",
    "mimo_v2_flash": "attention sinks; windows with other shapes",
    "minimax": "lightning attention; the norm's output as residual",
    "phimoe": "norms with a bias, a head with one",
    "qwen3_5_moe as published": "FP8, an expert's matrix a tensor; linear attention; vision; a layer beyond the last",
    "qwen3_5_moe with vision": "fused experts, a norm that multiplies by 1 + w, shared experts",
    "solar_open": "shared experts and a bias on the router",
}


def opened(folder: Path) -> StreamedModel:
    checkpoint = open_folder(folder)
    where = str(folder / "config.json")
    facts = architecture_for(checkpoint.config, where, None, checkpoint.tensors)
    sizes = sizes_of(facts)
    return StreamedModel(
        split_fused_experts(checkpoint, facts, sizes), facts, sizes, torch.device("cpu"), torch.float32
    )


def streamed(model: StreamedModel, texts: list[Tensor]) -> list[Tensor]:
    """For each pair of texts (2, T) the states (2, T, H) before each layer and the logits; each layer is proven."""
    proof, table, head = Proof(model), model.embedding(), model.head()
    states = [[torch.stack([model.begin(text, table) for text in pair])] for pair in texts]
    for number in range(model.sizes["layers"]):
        with model.layer(number) as layer:
            assert proof.of_layer(layer) <= BOUND[torch.float32]
            for passed in states:
                passed.append(through(model, layer, passed[-1]))
    return [
        one
        for *before, last in states
        for one in (*before, torch.stack([model.logits(model.final(text) @ head.mT) for text in last]))
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
        found.append(args[0] if args else kwargs["hidden_states"])

    for layer in whole.get_submodule(path):
        layer.register_forward_pre_hook(entered, with_kwargs=True)
    for pair in texts:
        found.append(whole(input_ids=pair, use_cache=False).logits)
    return found


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, as a part of the largest value of the second."""
    assert one.shape == other.shape
    return float((one - other).abs().max() / other.abs().max())


def differences(name: str, folder: Path) -> list[float]:
    """Those of the states before each layer, and of the logits, over all texts."""
    model = opened(zoo.save(name, folder))
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(2, model.sizes["vocabulary"], (2, length), generator=generator) for length in LENGTHS]
    whole = zoo.whole_model(name, *source_weights(folder))
    assert whole.config._attn_implementation == model.skeleton.config._attn_implementation
    expected = of_the_whole(whole, model.skeleton.path, texts)
    return [apart(*pair) for pair in zip(streamed(model, texts), expected, strict=True)]


def some(names: Iterable[str]) -> list[Any]:
    """All as parameters, slow but for those that have every kind of layer together."""
    return [pytest.param(name, marks=() if name in QUICK else [pytest.mark.slow]) for name in names]


def test_every_type_of_transformers_is_streamed_or_refused() -> None:
    known = {name.partition(" ")[0] for name in (*zoo.TYPES, *zoo.REFUSED)}
    assert set(zoo.found()) - known == set(), "new in transformers: add them to zoo.TYPES"


@pytest.mark.parametrize("name", some(name for name in zoo.TYPES if name not in zoo.REFUSED))
def test_the_streamed_model_is_transformers_whole_model(name: str, tmp_path: Path) -> None:
    assert max(differences(name, tmp_path)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.REFUSED)
def test_other_types_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    if name in zoo.TYPES:
        checkpoint = open_folder(zoo.save(name, tmp_path))
        config, tensors = checkpoint.config, checkpoint.tensors
    else:
        config, tensors = {"model_type": name, "architectures": [zoo.found()[name][-1]]}, {}
    with pytest.raises(ArchitectureError, match=re.escape(zoo.REFUSED[name])) as refused:
        architecture_for(config, "config.json", None, tensors)
    assert "\n" not in str(refused.value)
    assert any(word in str(refused.value) for word in ("such a model cannot", "give ", "correct this file"))
