"""Two statements of one fact that differ: each pair is refused by name, or settled by the files and told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantizers.architectures.families import architecture_for
from quantizers.checkpoint.reader import open_folder
from quantizers.stitch.write.config_files import remarks_on_config, untied_keys
from quantizers.system.errors import InputError

Change = Callable[[dict[str, Any]], object]
EMBEDDING, HEAD, LAYER = "model.embed_tokens.weight", "lm_head.weight", "model.layers.3."


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("olmoe", "mixtral", "ernie4_5_moe")
    return {name: zoo.save(name, tmp_path_factory.mktemp(name) / "model") for name in names}


def changed(folder: Path, to: Path, config: Change | None = None, tensors: Change | None = None) -> Path:
    """A copy of a model's folder with another config.json, or with other tensors."""
    shutil.copytree(folder, to)
    if config is not None:
        content = json.loads((folder / "config.json").read_text())
        config(content)
        (to / "config.json").write_text(json.dumps(content))
    if tensors is not None:
        loaded = load_file(folder / "model.safetensors")
        tensors(loaded)
        save_file(loaded, to / "model.safetensors", metadata={"format": "pt"})
    return to


def keys(**values: Any) -> Change:
    return lambda config: config.update(values)


def fewer_layers(config: dict[str, Any]) -> None:
    config["num_hidden_layers"] = 3
    config.pop("layer_types", None)


def second_embedding(tensors: dict[str, Tensor]) -> None:
    tensors[EMBEDDING.removeprefix("model.")] = tensors[EMBEDDING] + 1


REFUSED: dict[str, tuple[str, Change | None, Change | None, str]] = {
    "two names of the experts' number": (
        "mixtral", keys(num_experts=16), None, "num_local_experts is 8, but num_experts is 16; correct one of the two"
    ),
    "two names of the experts per token": (
        "ernie4_5_moe", keys(num_experts_per_tok=3), None, "moe_k is 2, but num_experts_per_tok is 3; correct one"
    ),
    "a class of another type": (
        "olmoe", keys(architectures=["MixtralForCausalLM"]), None,
        "model_type is 'olmoe', but architectures names MixtralForCausalLM, which is of 'mixtral'; correct one of the "
    ),
    "a class of another type than that of the data": (
        "mixtral", keys(architectures=["OlmoeForCausalLM"]), None, "model_type is 'mixtral', but architectures names O"
    ),
    "fewer layers than the files": (
        "olmoe", fewer_layers, None,
        "num_hidden_layers means 3 layers, but the files hold layer 3 (model.layers.3), complete as the others; correct"
    ),
    "two tensors for one parameter": (
        "olmoe", None, second_embedding,
        "the files hold embed_tokens.weight and model.embed_tokens.weight, which transformers loads as one parameter"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_two_statements_that_differ_are_refused_by_name(case: str, saved: dict[str, Path], tmp_path: Path) -> None:
    name, config, tensors, message = REFUSED[case]
    opened = open_folder(changed(saved[name], tmp_path / "model", config, tensors))
    with pytest.raises(InputError) as refused:
        architecture_for(opened.config, "config.json", None, opened.tensors)
    assert str(refused.value).startswith(f"config.json: {message}")


def test_a_key_that_is_given_twice_is_refused_where_the_values_differ(saved: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(saved["olmoe"], tmp_path / "model")
    text = (folder / "config.json").read_text()
    twice = '"num_experts_per_tok": 2,'
    assert twice in text
    (folder / "config.json").write_text(text.replace(twice, f"{twice} {twice}"))
    open_folder(folder)
    (folder / "config.json").write_text(text.replace(twice, f"{twice} {twice.replace('2', '1')}"))
    with pytest.raises(InputError, match=r"config\.json: num_experts_per_tok is given twice, with different values; k"):
        open_folder(folder)


def test_the_same_said_twice_is_no_contradiction(saved: dict[str, Path], tmp_path: Path) -> None:
    same = keys(num_experts=8, dtype="bfloat16", torch_dtype="bfloat16")
    opened = open_folder(changed(saved["mixtral"], tmp_path / "model", same))
    assert architecture_for(opened.config, "x", None, opened.tensors).num_experts == 8


def further_layer(tensors: dict[str, Tensor]) -> None:
    """As a layer for the prediction of further tokens is stored: a decoder layer's tensors, and some of its own."""
    layer = {name.replace(LAYER, "model.layers.4."): tensor for name, tensor in tensors.items() if LAYER in name}
    tensors.update({name: tensor.clone() for name, tensor in layer.items()})
    tensors["model.layers.4.eh_proj.weight"] = torch.zeros(128, 256)


def test_a_further_layer_with_tensors_of_its_own_passes_through(saved: dict[str, Path], tmp_path: Path) -> None:
    opened = open_folder(changed(saved["olmoe"], tmp_path / "model", tensors=further_layer))
    facts = architecture_for(opened.config, "x", None, opened.tensors)
    assert all(facts.is_unread(name) for name in opened.tensors if name.startswith("model.layers.4."))


@pytest.mark.parametrize(
    ("tied", "expected"), [(True, {"tie_word_embeddings": False}), (False, {}), (None, {})], ids=str
)
def test_a_stored_head_is_the_head_and_an_output_says_so(
    tied: bool | None, expected: dict[str, bool], saved: dict[str, Path], tmp_path: Path
) -> None:
    """As transformers and vLLM load it; OLMoE's class has False where the key is missing."""

    def tie(config: dict[str, Any]) -> None:
        config.pop("tie_word_embeddings", None)
        config.update({} if tied is None else {"tie_word_embeddings": tied})

    opened = open_folder(changed(saved["olmoe"], tmp_path / "model", tie))
    facts = architecture_for(opened.config, "x", None, opened.tensors)
    assert (facts.head, untied_keys(opened.config, facts)) == (HEAD, expected)
    told = remarks_on_config(opened, facts)
    assert len(told) == len(expected)
    assert all("says or means tie_word_embeddings: true, but the files hold lm_head.weight: " in line for line in told)


def test_embeddings_that_are_the_head_stay_tied(saved: dict[str, Path], tmp_path: Path) -> None:
    tied = keys(tie_word_embeddings=True)
    opened = open_folder(changed(saved["olmoe"], tmp_path / "model", tied, lambda stored: stored.pop(HEAD)))
    facts = architecture_for(opened.config, "x", None, opened.tensors)
    assert (facts.head, untied_keys(opened.config, facts), remarks_on_config(opened, facts)) == (EMBEDDING, {}, [])


def test_two_names_of_the_dtype_that_differ_are_told(saved: dict[str, Path], tmp_path: Path) -> None:
    """As AutoAWQ leaves them."""
    opened = open_folder(changed(saved["olmoe"], tmp_path / "model", keys(dtype="bfloat16", torch_dtype="float16")))
    (told,) = remarks_on_config(opened, architecture_for(opened.config, "x", None, opened.tensors))
    assert told.startswith("config.json says dtype: bfloat16 and torch_dtype: float16: transformers 5 reads the first")


def test_a_section_about_fp8_that_no_tensor_is_in_is_told(saved: dict[str, Path], tmp_path: Path) -> None:
    section = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    opened = open_folder(changed(saved["olmoe"], tmp_path / "model", keys(quantization_config=section)))
    told = remarks_on_config(opened, architecture_for(opened.config, "x", None, opened.tensors))
    assert [line.partition(":")[0] for line in told] == ["config.json's quantization_config says fp8, but no tensor is"]


@pytest.mark.parametrize(("stated", "lines"), [("float16", 1), ("bfloat16", 0), ("float32", 0)])
def test_a_dtype_of_another_range_than_the_files_have_is_told(
    stated: str, lines: int, saved: dict[str, Path], tmp_path: Path
) -> None:
    opened = open_folder(changed(saved["olmoe"], tmp_path / "model", keys(dtype=stated)))
    told = remarks_on_config(opened, architecture_for(opened.config, "x", None, opened.tensors))
    assert len(told) == lines
    assert all(f"says dtype: {stated}, but {EMBEDDING} is stored in bfloat16: servers" in line for line in told)
