"""Facts derived from a model's class and files: against the data of seven families, and where they are refused.

The data are the oracle for roles; the files that transformers writes are the one for names, dtypes and shapes of what
comes from the class alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import transformers
import zoo
from commands import Command
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.derive import derived_architecture, skeleton_of
from quantizers.architectures.families import architecture_for
from quantizers.architectures.matrices import MATRICES
from quantizers.architectures.roles import EXACT, kinds_of_layers
from quantizers.architectures.stored_tensors import Header
from quantizers.checkpoint.reader import open_folder
from quantizers.planning.assign_actions import expected_tensors, folds
from quantizers.recipe.schema import Experts
from quantizers.system.errors import ArchitectureError, RecipeError

FOLDED = ("minimax_m2", "qwen3_moe", "mixtral")  # in the others a shared expert reads the norm too

Q = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Both:
    """A saved model, the facts derived from it by probes, and those of its family, from config.json alone."""

    model: str
    config: dict[str, Any]
    headers: dict[str, Header]
    derived: Architecture
    known: Architecture


@pytest.fixture(scope="module", params=families.MODELS | families.TIED)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("model") / "model"
    changes = (families.MODELS | families.TIED)[request.param]
    source = open_folder(families.write(folder, families.family_of(request.param), **changes))
    headers = {name: Header(info.dtype, tuple(info.shape)) for name, info in source.tensors.items()}
    derived = derived_architecture(source.config, headers)
    return Both(request.param, source.config, headers, derived, architecture_for(source.config, "x"))


def test_the_roles_are_those_in_the_data(both: Both) -> None:
    derived, known = both.derived, both.known
    assert (derived.model_class, derived.norm.tensor) == (known.model_class, known.norm.tensor)
    assert derived.norm.offset == known.norm.offset
    assert set(derived.norm.readers) == set(known.norm.readers)
    assert (derived.router.tensor, derived.router.scoring) == (known.router.tensor, known.router.scoring)
    for path in ("norm", "router", "experts"):
        assert getattr(derived.modules, path) == getattr(known.modules, path)


def test_what_the_class_alone_says_is_what_lies_in_the_files(both: Both) -> None:
    expected = expected_tensors(both.known, both.config, "x")
    assert {name: (spec.dtype, spec.shape) for name, spec in expected.items()} == both.headers


def test_what_the_class_alone_says_is_what_is_derived_from_the_files(both: Both) -> None:
    derived, known = both.derived, both.known
    assert derived.sizes == {name: known.sizes[name] for name in derived.sizes}
    assert (derived.dense, derived.positions) == (known.dense, known.positions)
    assert {name for name in both.headers if derived.is_unread(name)} == {
        name for name in both.headers if families.is_mtp(both.config, name)
    }
    for number in range(known.num_layers):
        assert derived.of_layer(number).linears == known.of_layer(number).linears
        assert derived.of_layer(number).tensors == known.of_layer(number).tensors
        assert derived.of_layer(number).halves == (number not in known.dense)
        assert not derived.of_layer(number).alone
        for name in [*known.of_layer(number).tensors, *known.of_layer(number).linears]:
            assert derived.in_transformers(name) == known.in_transformers(name)
    keys = {"outside", "embedding", "head", "layer_prefix", "expert_prefix", "expert_linears"}
    assert derived.model_dump(include=keys) == known.model_dump(include=keys)


def test_the_fold_is_exact_where_router_and_experts_alone_read_the_norm(both: Both) -> None:
    probes = both.derived.probes
    folds = families.family_of(both.model) in FOLDED
    assert (probes["fold"] < EXACT) == folds == (not both.derived.also_reads_the_norm)
    assert all(number < EXACT for name, number in probes.items() if name != "fold")
    assert folds or probes["fold"] > 0.05  # nowhere near the bound


# What config.json says of a model of a family -----------------------------------------------------------------------

VOCABULARY = [f"model.layers.3.{name}.weight" for name in ("embed_tokens", "shared_head.head")]


def test_a_tied_model_needs_no_head_and_has_one_that_is_stored() -> None:
    config = families.config("deepseek_v3", tie_word_embeddings=True)
    known = architecture_for(config, "x")
    assert (known.head, known.embedding, "lm_head.weight" in known.outside) == (EMBEDDING, EMBEDDING, False)
    expected = expected_tensors(known, config, "x")
    stored = architecture_for(config, "x", None, expected | {"lm_head.weight": expected[EMBEDDING]})
    assert (stored.head, stored.embedding) == ("lm_head.weight", EMBEDDING)
    optional = {name for name, tensor in known.of_layer(3).tensors.items() if tensor.optional}
    assert {known.layer(3, name) for name in optional} == set(VOCABULARY)
    assert not any(
        t.optional for t in architecture_for(families.config("deepseek_v3"), "x").of_layer(3).tensors.values()
    )


def test_the_number_of_dense_layers_is_read_where_the_class_has_a_list_of_them() -> None:
    """transformers' GLM-4.7-Flash does not read the key that its files have."""
    lists = {"mlp_layer_types": ["dense", "dense", "sparse"]}
    for changes in (
        {"first_k_dense_replace": 2},
        {"first_k_dense_replace": 2} | lists,
        {"first_k_dense_replace": None} | lists,
    ):
        assert architecture_for(families.config("glm4_moe_lite", **changes), "x").dense == {0, 1}
    assert architecture_for(families.config("glm4_moe_lite", first_k_dense_replace=0), "x").dense == set()
    for changes, expected in (
        (
            lists,
            "x: first_k_dense_replace is 1, but mlp_layer_types has 2 dense layers, or in other places; correct one",
        ),
        ({"first_k_dense_replace": 4}, "x: first_k_dense_replace is 4; a whole number from 0 to 3 is needed"),
        ({"first_k_dense_replace": 3}, "x: Glm4MoeLiteForCausalLM has no layers with a module called experts; give a"),
    ):
        with pytest.raises(ArchitectureError, match=expected):
            architecture_for(families.config("glm4_moe_lite", **changes), "x")


def test_a_key_that_the_class_does_not_read_is_refused_if_it_means_something_else() -> None:
    for value in ("sigmoid", None):
        architecture_for(families.config("deepseek_v3", scoring_func=value), "x")
    refused = (
        r'^x: scoring_func is \'softmax\', but DeepseekV3\w+ in transformers does not read it .* write "sigmoid" there$'
    )
    with pytest.raises(ArchitectureError, match=refused):
        architecture_for(families.config("deepseek_v3", scoring_func="softmax"), "x")


# What one model says ------------------------------------------------------------------------------------------------


def saved(folder: Path, model_type: str) -> tuple[dict[str, Any], dict[str, Header]]:
    """config.json and headers of a tiny model of a type without facts."""
    source = open_folder(zoo.save(model_type, folder))
    return source.config, {name: Header(info.dtype, tuple(info.shape)) for name, info in source.tensors.items()}


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Header]]:
    return saved(tmp_path_factory.mktemp("olmoe") / "model", "olmoe")


ATTENTION = [f"self_attn.{letter}_proj" for letter in "qkv"]
SHARED = [f"mlp.shared_expert{end}" for end in (".gate_proj", ".up_proj", "_gate")]


@pytest.mark.parametrize(
    ("model_type", "offset", "readers", "halves", "up"),
    [
        ("minimax", 0, ["residual"], False, "model.layers.2.block_sparse_moe.experts.5.w3"),
        ("qwen3_next", 1, SHARED, True, "model.layers.2.mlp.experts.5.up_proj"),
        ("cohere2_moe", 0, ATTENTION, False, "model.layers.2.mlp.experts.5.up_proj"),
    ],
)
def test_what_else_reads_the_norm_ends_the_fold_and_layers_of_another_form_run_whole(
    model_type: str, offset: int, readers: list[str], halves: bool, up: str, tmp_path: Path
) -> None:
    """A residual that is the norm's output; a norm that multiplies by 1 + w; attention beside the experts."""
    facts = derived_architecture(*saved(tmp_path / "model", model_type))
    assert facts.norm.offset == offset
    assert set(readers) <= set(facts.also_reads_the_norm)
    assert [facts.of_layer(number).halves for number in (1, 2, 3)] == [halves] * 3
    assert facts.expert(2, 5, "up") == up


def test_a_tensor_of_a_layer_that_the_class_has_no_place_for_is_carried_and_ends_the_fold(
    olmoe: tuple[dict[str, Any], dict[str, Header]],
) -> None:
    """A server may multiply what comes out of the norm by it."""
    config, headers = olmoe
    name = "model.layers.1.mlp.latent.weight"
    facts = [derived_architecture(config, headers | extra) for extra in ({}, {name: Header("BF16", (4, 128))})]
    assert [one.also_reads_the_norm for one in facts] == [[], ["mlp.latent.weight"]]
    assert [one.is_unread(name) for one in facts] == [False, True]
    assert not any(facts[1].is_unread(one) for one in headers)


def test_shapes_are_those_of_the_class_whatever_the_files_hold(
    olmoe: tuple[dict[str, Any], dict[str, Header]],
) -> None:
    config, headers = olmoe
    wrong = {
        "model.layers.1.self_attn.q_proj.weight": Header("BF16", (4, 4)),
        "model.norm.weight": Header("BF16", (4,)),
    }
    assert derived_architecture(config, headers | wrong) == derived_architecture(config, headers)


CONV = "model.layers.0.self_attn.k_conv1d.weight"


@pytest.mark.slow
def test_what_transformers_joins_is_listed_by_its_stored_names_and_shapes(tmp_path: Path) -> None:
    config, headers = saved(tmp_path / "model", "kimi_linear")
    facts = derived_architecture(config, headers)
    parts = {f"self_attn.{letter}_conv1d.weight" for letter in "qkv"}
    assert {name: set(names) for name, names in facts.modules.converted.items()} == {"self_attn.conv1d.weight": parts}
    assert facts.of_layer(0).tensors["self_attn.k_conv1d.weight"].shape == (64, 1, 4)
    del headers[CONV]
    with pytest.raises(ArchitectureError, match=r"^transformers cannot make the parameters of Kimi\w+ of .*q_conv1d"):
        derived_architecture(config, headers)


@pytest.mark.slow
def test_experts_that_no_text_goes_through_are_carried(tmp_path: Path) -> None:
    """ERNIE-4.5-VL's experts 8 to 15 of 16 see images; its router is stored transposed, and cannot be compensated."""
    config, headers = saved(tmp_path / "model", "ernie4_5_vl_moe")
    facts = derived_architecture(config, headers)
    matrices = {(e, m): f"{facts.expert(1, e, m)}.weight" for e in range(16) for m in MATRICES}
    assert [facts.is_unread(name) for (e, _), name in matrices.items()] == [e >= 8 for e, _ in matrices]
    assert set(matrices.values()) <= set(headers)
    assert len(facts.unread) == 3 + 2  # of three layers with experts, and of what sees images
    assert {"mlp.gate.weight", "mlp.experts.8.up_proj.weight"} <= set(facts.also_reads_the_norm)
    assert facts.modules.converted["mlp.vision_moe.gate.weight"] == ["mlp.gate.weight_1"]


# What is refused ----------------------------------------------------------------------------------------------------


def without(tensors: dict[str, Tensor]) -> None:
    del tensors[Q]


def cut(tensors: dict[str, Tensor]) -> None:
    tensors[Q] = tensors[Q][:4].clone()


def joined(tensors: dict[str, Tensor]) -> None:
    """The experts as no class of transformers saves them."""
    for name in [name for name in tensors if ".experts." in name]:
        tensor = tensors.pop(name)
        tensors[name.replace(".experts.", ".every.")] = tensor


REFUSED: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], object] | None, str]] = {
    "a tensor is missing": (
        {}, without, f"config.json: OlmoeForCausalLM computes with {Q}, but no tensor in the files is that; the files"
    ),
    "a tensor has another shape": ({}, cut, f"{Q} has shape [4, 128], config.json says [128, 128]"),
    "experts under other names": (
        {}, joined, "config.json: OlmoeForCausalLM computes with model.layers.0.mlp.experts.gate_up_proj (and 7 more)"
    ),
    "no class": ({"architectures": None}, None, "config.json: architectures does not name the model's class; give a"),
    "an unknown class": (
        {"architectures": ["NewestForCausalLM"]}, None, "config.json: architectures: transformers VERSION has no Newest"
    ),
    "a class without a head": (
        {"architectures": ["OlmoeModel"]}, None, "config.json: architectures: OlmoeModel has no head that predicts tok"
    ),
    "a class without experts": (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, None,
        "config.json: LlamaForCausalLM has no layers with a module "
    ),
    "rotated channels that the class ignores": (
        {"rotary_dim": 16}, None, "config.json: rotary_dim is 16, but OlmoeForCausalLM of transformers VERSION rotates"
    ),
    "a wrong value": (
        {"hidden_size": "128"}, None, "config.json: transformers VERSION cannot make OlmoeForCausalLM of it (Strict"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_derived_is_said_in_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, change, expected = REFUSED[case]
    folder = zoo.save("olmoe", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()  # what saving has printed
    command = Command(monkeypatch, capsys)
    assert command("plan", tiny.write_recipe(tmp_path)) == 2
    assert expected.replace("VERSION", transformers.__version__) in command.err, command.err
    assert len(command.err.strip().splitlines()) == 1


GATE_UP, DOWN = (f"block_sparse_moe.{side}put_linear.weight" for side in ("in", "out"))


def test_tensors_of_all_experts_may_have_names_of_their_own_but_not_another_layout(tmp_path: Path) -> None:
    """GraniteMoe's have."""
    config, headers = saved(tmp_path / "model", "granitemoe")
    facts = derived_architecture(config, headers)
    assert facts.fused == {GATE_UP: ["gate", "up"], DOWN: ["down"]}
    assert facts.expert(1, 3, "up") == "model.layers.1.block_sparse_moe.experts.3.up_proj"
    transposed = {f"model.layers.0.{GATE_UP}": Header("BF16", (8, 128, 192))}
    with pytest.raises(ArchitectureError, match=rf"^model.layers.0.{GATE_UP} holds the experts in a layout of its"):
        derived_architecture(config, headers | transposed)


def test_layers_of_one_structure_may_have_other_gates(tmp_path: Path) -> None:
    """Step-3.7 clamps in some layers, each at a limit of its own; it stores gate and up apart."""
    facts = derived_architecture(*saved(tmp_path / "model", "step3p7"))
    assert [facts.of_layer(number).own_gate for number in range(4)] == [False, False, True, True]
    assert facts.fused == {f"moe.{matrix}_proj.weight": [matrix] for matrix in MATRICES}
    assert "the experts of layers 2–3 have a gate of their own, so no scale lies between w3 and w2" in facts.origin()
    assert [kind["own_gate"] for kind in facts.found()["kinds"]] == [False, False, True]
    with pytest.raises(RecipeError, match=r"^x: experts.engine: llm-compressor does not know the gate .*; take gram$"):
        folds(facts, Experts(group_size=32, engine="llmcompressor"), "x")


# Kinds of layers -----------------------------------------------------------------------------------------------------


def test_layers_that_differ_in_any_setting_are_of_different_kinds() -> None:
    """In any number, word or list of a module of one layer, or in a list of the config with an entry for each."""
    skeleton = skeleton_of(zoo.config_of("hunyuan_v1_moe").to_dict() | {"architectures": ["HunYuanMoEV1ForCausalLM"]})
    assert kinds_of_layers(skeleton) == [[0, 1, 2, 3]]
    others: dict[type, Any] = {bool: None, int: 77, float: 0.77, str: "other", type(None): 77, list: [77], tuple: (77,)}
    changed = set()
    for path, module in skeleton.layers[2].named_modules():
        for name, value in list(vars(module).items()):
            if type(value) in others and name != "layer_idx":
                changed.add(f"{path}.{name}")
                vars(module)[name] = others[type(value)]
                assert kinds_of_layers(skeleton) == [[0, 1, 3], [2]], (path, name)
                vars(module)[name] = value
    assert {"mlp.gate.top_k", "input_layernorm.variance_epsilon", "self_attn.scaling"} <= changed, changed
    skeleton.config.something = [1, 1, 2, 1]
    assert kinds_of_layers(skeleton) == [[0, 1, 3], [2]]


def test_another_number_of_experts_per_token_in_each_layer_is_refused_by_the_plan(tmp_path: Path) -> None:
    config, headers = saved(tmp_path / "model", "hunyuan_v1_moe")
    assert derived_architecture(config | {"moe_topk": [2, 2, 2, 2]}, headers).top_k == 2
    with pytest.raises(ArchitectureError, match="experts per token is 2 in layer 0, and 1 in layer 1; such a model"):
        derived_architecture(config | {"moe_topk": [2, 1, 2, 1]}, headers)
