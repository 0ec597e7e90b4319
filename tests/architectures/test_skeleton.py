"""The whole model without weights, against transformers' with weights, for every mixture-of-experts type."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from safetensors import safe_open
from torch.utils._pytree import tree_flatten

from quantizers.architectures.skeleton import Skeleton

QUICK = ("gemma4 with vision", "glm_moe_dsa", "inkling", "mimo_v2_flash")
# Types that are built, but whose layers have no module of experts.
NO_EXPERTS = ("doge",)
NAMES = [name for name in zoo.TYPES if name not in NO_EXPERTS]
EVERY = [pytest.param(name, marks=() if name in QUICK else [pytest.mark.every]) for name in NAMES]

# Arguments that come of earlier layers, and such as layers fill while they run.
HANDED = {"zaya": "prev_router_hidden_states"} | dict.fromkeys(
    ("glm5_next", "glm_moe_dsa", "hy_v4", "hy_v4_vl", "mistral_large4"), "prev_topk_indices"
)
FILLED = dict.fromkeys(("gemma4", "gemma4 with vision", "mistral_large4"), "shared_kv_states")
# Of one stored tensor transformers makes several parameters; the first is its place, these are in the others' names.
SPLIT = {
    "ernie4_5_vl_moe": "vision_moe.", "inkling with vision": ".up_proj", "lara_mini": ".linear_attn.in_proj_",
    "nemo_speechlm": ".layers.0.self_attn.", "sarvam_moe": ".self_attn.",
    **dict.fromkeys(("kimi_k25", "unlimited_ocr"), "vision_tower."),
    **dict.fromkeys(("nemotron_h_omni", "step3p7", "step3p7 as published"), "vision_model."),
}  # fmt: skip
# Arguments made of weights outside the layers, or, where the type is refused for that, of other layers' states.
MADE = {"mistral_large4": "position_embeddings", "inkling2": "block_states", "inkling2_loop": "block_states"}


def skeleton_of(name: str) -> Skeleton:
    return Skeleton(zoo.whole_class(name), zoo.config_of(name))


@torch.no_grad()
def passed_to_layers(name: str, path: str, tokens: torch.Tensor) -> list[dict[str, Any]]:
    """The arguments by name that the whole model, with weights, calls each layer at this path with."""
    calls: list[dict[str, Any]] = []

    def keep(layer: torch.nn.Module, args: Any, kwargs: Any) -> None:
        signature = inspect.signature(layer.forward)
        given = dict(signature.bind(*args, **kwargs).arguments)
        rest = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
        calls.append(given | {key: value for one in rest for key, value in given.pop(one, {}).items()})

    model = zoo.build(name)
    for layer in model.get_submodule(path):
        layer.register_forward_pre_hook(keep, with_kwargs=True)
    with contextlib.suppress(StopIteration):  # transformers 5.24's Llama4 fails behind its layers
        layer.register_forward_hook(_stop)
        model(input_ids=tokens, use_cache=False)
    return calls


def _stop(*_: Any) -> None:
    raise StopIteration


def same(one: Any, other: Any) -> bool:
    """Whether both have one structure, and equal tensors and other values."""
    (leaves, structure), (others, their_structure) = tree_flatten(one), tree_flatten(other)
    return structure == their_structure and all(
        a.dtype == b.dtype and torch.equal(a, b) if torch.is_tensor(a) and torch.is_tensor(b) else a is b or a == b
        for a, b in zip(leaves, others, strict=True)
    )


@pytest.mark.parametrize("name", EVERY)
def test_layers_are_called_as_the_whole_model_calls_them(name: str) -> None:
    skeleton, tokens = skeleton_of(name), torch.randint(3, 300, (2, 96), generator=torch.Generator().manual_seed(0))
    calls, expected = skeleton.calls_with(tokens), passed_to_layers(name, skeleton.path, tokens)
    for number, (call, given) in enumerate(zip(calls, expected, strict=True)):
        assert call.states.shape == given.pop(call.name).shape
        assert call.arguments.keys() == given.keys()
        assert list(call.handed) == ([HANDED[name]] if name in HANDED and number else [])
        unknown = {*call.handed, FILLED.get(name), MADE.get(name)}
        assert [key for key in given if key not in unknown and not same(call.arguments[key], given[key])] == []


@pytest.mark.parametrize(("name", "experts"), [("olmoe", "grouped_mm"), ("step3p7", "eager")])
def test_an_accelerator_groups_the_experts_where_the_class_can(name: str, experts: str) -> None:
    skeleton = Skeleton(zoo.whole_class(name), zoo.config_of(name), torch.device("meta"))
    assert skeleton.model.config.get_text_config()._experts_implementation == experts


@pytest.mark.parametrize("name", EVERY)
def test_every_stored_tensor_has_a_place_and_every_parameter_a_tensor(name: str, tmp_path: Path) -> None:
    skeleton = skeleton_of(name)
    with safe_open(zoo.save(name, tmp_path) / "model.safetensors", "pt") as file:
        names = file.keys()
    stored = [one for one in names if not one.endswith("_scale_inv")]
    places = {one: skeleton.place(one) for one in stored if not one.startswith("mtp.")}
    layers = f"{skeleton.path}." + "{}.{}"
    filled = {p and (p.parameter if p.layer is None else layers.format(p.layer, p.parameter)) for p in places.values()}
    assert None not in filled
    assert filled <= skeleton.parameters.keys()
    left = skeleton.parameters.keys() - filled - set(skeleton.model.all_tied_weights_keys)
    assert [one for one in sorted(left) if name not in SPLIT or SPLIT[name] not in one] == []
