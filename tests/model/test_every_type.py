"""Every mixture-of-experts class of the installed transformers, tiny: the model without weights, and the streamed one.

The oracle is transformers' own whole model, loaded from the files with `from_pretrained`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from safetensors import safe_open
from torch import Tensor
from torch.utils._pytree import tree_flatten

from quantizers.architectures.families import architecture_for
from quantizers.architectures.sizes import sizes_of
from quantizers.architectures.skeleton import Skeleton
from quantizers.checkpoint.reader import open_folder
from quantizers.formats.tensor_names import split_fused_experts
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.system.errors import ArchitectureError

LENGTHS = (96, 41)
TOLERANCE = 1e-6  # of the largest value

# These hold every kind of layer; the others run with the slow tests.
QUICK = (
    "DeepseekV32ForCausalLM",  # latent attention, an indexer, a dense layer
    "Gemma4ForConditionalGeneration",  # a norm of the experts' own, layers with other heads, a scaled embedding
    "GlmMoeDsaForCausalLM",  # layers that hand on what they chose
    "GptOssForCausalLM",  # sinks, biases, a clamped product
    "GraniteMoeHybridForCausalLM",  # Mamba-2
    "JambaForCausalLM",  # Mamba, without rotary embeddings
    "Lfm2MoeForCausalLM",  # convolutions
    "Llama4ForConditionalGeneration",  # chunks, layers without positions, experts that are called otherwise
    "MiMoV2FlashForCausalLM",  # shapes by kind of layer
    "MiniMaxForCausalLM",  # lightning attention, the residual from behind the norm
    "Qwen3_5MoeForConditionalGeneration",  # linear attention, a vision tower
    "Qwen4ExpForCausalLM",  # four residual streams
)
NAMES = [name for name in zoo.classes() if name not in zoo.NOT_BUILT]
EVERY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES]

# Classes whose forward the skeleton cannot follow yet, and why.
NOT_FOLLOWED = (
    "Glm5NextForConditionalGeneration",  # layers hand on which tokens they chose
    "GlmMoeDsaForCausalLM",
    "HYV4ForCausalLM",
    "InklingForCausalLM",  # a norm between embedding and layers
    "InklingForConditionalGeneration",
    "ZayaForCausalLM",  # scales there, and layers hand on states of their routers
)
# Arguments that layers fill while they run, by class.
FILLED = {"Gemma4ForCausalLM": "shared_kv_states", "Gemma4ForConditionalGeneration": "shared_kv_states"}
# One stored tensor makes several parameters, of which `place` gives the first, by what the others' names contain.
SPLIT = {
    "Ernie4_5_VLMoeForConditionalGeneration": ("vision_moe.",),
    "InklingForConditionalGeneration": ("mlp.up_proj.", "shared_experts.up_proj"),
    "Step3p7ForConditionalGeneration": ("vision_model.",),
}
PRODUCT, LAYOUT = "compute another product than act", "holds the experts in a layout of its own"
HELD, MAKES = "its experts (hold|are not)", "makes .* and other tensors"
# Why no architecture is derived, by class. All others are streamed.
REFUSED = {
    **dict.fromkeys(NOT_FOLLOWED, "hand on more than hidden states"),
    **dict.fromkeys(("AriaForConditionalGeneration", "AriaTextForCausalLM", "GptOssForCausalLM"), HELD),
    **dict.fromkeys(("JetMoeForCausalLM", "Llama4ForCausalLM", "Llama4ForConditionalGeneration"), HELD),
    **dict.fromkeys(("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), "0 parameters .* the router's alone"),
    **dict.fromkeys(("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteMoeHybridForCausalLM"), LAYOUT),
    **dict.fromkeys(("Qwen3VLMoeForConditionalGeneration", "Step3p7ForConditionalGeneration"), LAYOUT),
    **dict.fromkeys(("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForCausalLM"), PRODUCT),
    **dict.fromkeys(("KimiLinearForCausalLM", "Ernie4_5_VLMoeForConditionalGeneration"), MAKES),
    **dict.fromkeys(("AXK2ForCausalLM", "FlexOlmoForCausalLM"), "not the output of a norm"),
    **dict.fromkeys(("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"), "not the output of a norm"),
    "DeepseekV4ForCausalLM": "chosen by a stored table",
    "LongcatFlashForCausalLM": HELD,
    "NemotronHForCausalLM": HELD,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: zoo.save(name, tmp_path_factory.mktemp("zoo") / name))


@cache
def whole_model(name: str, folder: Path) -> Any:
    """transformers' whole model in float32, every one of its weights from the files."""
    model, info = zoo.classes()[name].from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval().requires_grad_(False)


def tokens_of(length: int) -> Tensor:
    """Two sequences (2, T)."""
    return torch.randint(3, 300, (2, length), generator=torch.Generator().manual_seed(length))


def passed_to_layers(model: Any, path: str, tokens: Tensor) -> tuple[list[dict[str, Any]], Tensor]:
    """The arguments of each layer's call by the whole model, by name, and the logits."""
    calls: list[dict[str, Any]] = []

    def keep(layer: torch.nn.Module, args: Any, kwargs: Any) -> None:
        signature = inspect.signature(layer.forward)
        rest = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
        given = dict(signature.bind(*args, **kwargs).arguments)
        calls.append(given | {key: value for name in rest for key, value in given.pop(name, {}).items()})

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in model.get_submodule(path)]
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return calls, logits


def assert_same(found: Any, expected: Any, about: str) -> None:
    """Both have one structure, and equal tensors and other values."""
    (leaves, structure), (others, other) = tree_flatten(found), tree_flatten(expected)
    assert structure == other, about
    for one, two in zip(leaves, others, strict=True):
        if torch.is_tensor(one) and torch.is_tensor(two):
            assert one.dtype == two.dtype, about
            assert torch.equal(one, two), about
        else:
            assert one is two or one == two, about


def test_every_class_is_built_or_listed_with_its_reason() -> None:
    assert len(NAMES) >= 60
    assert set(zoo.NOT_BUILT) <= set(zoo.classes())  # no other one has a reason not to be built
    assert {*QUICK, *NOT_FOLLOWED, *FILLED, *SPLIT, *REFUSED} <= set(NAMES)
    for name in NAMES:
        zoo.config(name)


@torch.no_grad()
@pytest.mark.parametrize("name", EVERY)
def test_a_skeleton_calls_layers_as_the_whole_model_does(name: str) -> None:
    """Without weights it passes each layer the same arguments, but for hidden states."""
    skeleton, tokens = Skeleton(zoo.classes()[name], zoo.config(name)), tokens_of(LENGTHS[0])
    if name in NOT_FOLLOWED:
        with pytest.raises(ArchitectureError, match="cannot be computed layer by layer here"):
            skeleton.calls_with(tokens)
        return
    expected, _ = passed_to_layers(zoo.build(name), skeleton.path, tokens)
    calls = skeleton.calls_with(tokens)
    for number, (call, given) in enumerate(zip(calls, expected, strict=True)):
        assert call.states.shape == given.pop(call.name).shape
        assert call.arguments.keys() == given.keys()
        for key in given.keys() - {FILLED.get(name)}:
            assert_same(call.arguments[key], given[key], f"layer {number}: {key}")


@pytest.mark.parametrize("name", EVERY)
def test_every_stored_tensor_has_its_place(name: str, saved: Callable[[str], Path]) -> None:
    """All saved tensors go to parameters of the model, and every parameter gets one."""
    skeleton = Skeleton(zoo.classes()[name], zoo.config(name))
    with safe_open(saved(name) / "model.safetensors", "pt") as file:
        places = {stored: skeleton.place(stored) for stored in file.keys()}  # noqa: SIM118 - no mapping
    assert [stored for stored, place in places.items() if place is None] == []
    filled = {
        place.parameter if place.layer is None else f"{skeleton.path}.{place.layer}.{place.parameter}"
        for place in places.values()
        if place is not None
    }
    assert filled <= set(skeleton.parameters)
    missing = set(skeleton.parameters) - filled - set(skeleton.model.all_tied_weights_keys)
    assert [one for one in sorted(missing) if not any(part in one for part in SPLIT.get(name, ()))] == []


def streamed(folder: Path) -> StreamedModel:
    checkpoint = open_folder(folder)
    facts = architecture_for(checkpoint.config, str(folder), tensors=checkpoint.tensors)
    sizes = sizes_of(facts, checkpoint.config, str(folder))
    return StreamedModel(
        split_fused_experts(checkpoint, facts, sizes), facts, sizes, torch.device("cpu"), torch.float32
    )


def through(model: StreamedModel, layer: DecoderLayer, states: Tensor) -> Tensor:
    """A layer's output for sequences of one length (B, T, H), together where it can take them so."""
    if layer.alone:
        return torch.stack([model.run(layer, one)[0] for one in states])
    entering = model.attend(layer, states)
    if layer.halves:
        return model.finish(layer, entering.flatten(0, 1))[0].view_as(states)
    return model.finish(layer, entering)[0]


def assert_close(found: Tensor, expected: Tensor, about: str) -> None:
    assert float((found - expected).abs().max()) <= TOLERANCE * float(expected.abs().max()), about


@torch.no_grad()
@pytest.mark.parametrize("name", EVERY)
def test_the_streamed_model_is_the_whole_one_or_refused_by_name(name: str, saved: Callable[[str], Path]) -> None:
    """The states before each layer and the logits, for two sequences at a time of each length."""
    folder = saved(name)
    if name in REFUSED:
        with pytest.raises(ArchitectureError, match=REFUSED[name]):
            streamed(folder)
        return
    model, whole = streamed(folder), whole_model(name, folder)
    for length in LENGTHS:
        tokens = tokens_of(length)
        expected, logits = passed_to_layers(whole, model.skeleton.path, tokens)
        states = torch.stack([model.begin(row, model.embedding()) for row in tokens])
        for number, given in enumerate(expected):
            assert_close(states, given[model.skeleton.calls(length)[number].name], f"before layer {number}")
            with model.layer(number) as layer:
                states = through(model, layer, states)
        products = [model.final(row) @ model.head().T for row in states]
        assert_close(torch.stack([model.logits(one) for one in products]), logits, "logits")
