"""Every boolean and every optional key of a class's config, changed one at a time.

A model of it is computed as transformers' whole model, or refused by a line that names the key: where transformers'
class cannot be made of it, or not computed, which is asked of the class here.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers
import zoo
from by_layers import TOLERANCE, apart, of_the_whole, streamed

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for, family
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.formats.tensor_names import split_fused_experts
from quantizers.model.streamed_model import StreamedModel
from quantizers.planning.assign_actions import make_plan
from quantizers.recipe.schema import Experts
from quantizers.serving.check import OWN_HEAD, check
from quantizers.serving.findings import Finding
from quantizers.stitch.write.config_files import output_config
from quantizers.system.errors import ArchitectureError

TEXTS = torch.randint(2, 300, (2, 40), generator=torch.Generator().manual_seed(0))
SMALL = {"hidden_size": 128, "num_hidden_layers": 2}
# Keys of config.json that are no settings of the class.
BESIDES = ("architectures", "model_type", "quantization_config", "torch_dtype", "transformers_version", "dtype")


def changes(config: Any) -> Iterator[tuple[str, Any]]:
    """Each boolean key of a config's class with its other value, and each optional one with null."""
    hints, values = typing.get_type_hints(type(config), localns={"torch": torch}), config.to_dict()
    for field in dataclasses.fields(config):
        kinds, value = typing.get_args(hints[field.name]) or (hints[field.name],), values.get(field.name)
        if (
            field.name in BESIDES or field.name in config.sub_configs
        ):  # without a section, all of it has a large default
            continue
        if isinstance(value, bool) or bool in kinds:
            yield field.name, not value
        elif type(None) in kinds and value is not None:
            yield field.name, None


# transformers' rules for the vision tower's matrices rename the text model's `q_proj` on saving, which it then has.
SAVED_WRONGLY = {("kimi_k25", "q_lora_rank")}


@torch.no_grad()
def computed(model_class: Any, config: Mapping[str, Any], config_class: Any = None) -> Any:
    """transformers' whole model of a config.json, of random weights that bfloat16 holds; its config is of this class.

    None if the class cannot be made of it, or not computed.
    """
    own = {key: value for key, value in config.items() if key not in BESIDES}
    of_type = config_class or model_class.config_class
    own.pop("return_dict", None)  # it says in which form results are returned
    torch.manual_seed(0)
    for attention in zoo.ATTENTION:
        try:
            made = of_type(**of_type._decode_special_floats(own))
            made._attn_implementation = attention
            text = made.get_text_config()
            text.return_dict = True
            if getattr(text, "rotary_dim", None):  # which transformers 5.17 does not read
                text.rope_parameters["partial_rotary_factor"] = text.rotary_dim / text.head_dim
            model = zoo.randomized(model_class(made).eval().float())
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.copy_(tensor.bfloat16())
            model(TEXTS, use_cache=False)
        except Exception as failure:  # whatever transformers raises
            print(type(failure).__name__, failure)
            continue
        return model
    return None


def saved(model: Any, config: Mapping[str, Any], folder: Path) -> Checkpoint:
    """The model as transformers saves it, but with this config.json."""
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return open_folder(folder)


def facts_of(checkpoint: Checkpoint) -> Architecture:
    return architecture_for(checkpoint.config, "config.json", None, checkpoint.tensors)


def difference(model: Any, checkpoint: Checkpoint, facts: Architecture) -> float:
    """The largest one of states and logits, streamed and by transformers' whole model."""
    ours = StreamedModel(split_fused_experts(checkpoint, facts), facts, torch.device("cpu"), torch.float32)
    expected = of_the_whole(model, ours.skeleton.path, [TEXTS])
    return max(apart(*pair) for pair in zip(streamed(ours, [TEXTS]), expected, strict=True))


def misread(checkpoint: Checkpoint, facts: Architecture) -> list[Finding]:
    """What servers would read wrongly in the planned output."""
    plan = make_plan(facts, split_fused_experts(checkpoint, facts).tensors, Experts(group_size=32), "model", (128, 128))
    written = {name: spec for action in plan.actions for name, spec in action.outputs.items()}
    return check(output_config(checkpoint.config, facts, plan), written, facts).findings


def variants(name: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Each key with its other value, and the config.json with it, of the tiny model of a type."""
    made = zoo.config_of(name)
    plain = json.loads(made.to_json_string(use_diff=False)) | {"architectures": [zoo.whole_class(name).__name__]}
    text = made.get_text_config()
    for key, value in (("bos_token_id", 1), *changes(made)):
        yield key, value, plain | {key: value}
    for key, value in changes(text) if text is not made else ():
        yield key, value, plain | {"text_config": plain["text_config"] | {key: value}}


@pytest.mark.parametrize("model_type", families.CONFIGS)
def test_every_key_of_a_known_family_is_derived(model_type: str, tmp_path: Path) -> None:
    plain = {key: value for key, value in families.config(model_type).items() if key not in BESIDES} | SMALL
    model_class = getattr(transformers, families.CONFIGS[model_type]["architectures"][0])
    named = {"model_type": model_type, "architectures": [model_class.__name__]}
    for key, value in (("bos_token_id", 1), *changes(model_class.config_class(**plain))):
        config = plain | named | {key: value}
        model = computed(model_class, config)
        if model is None:
            with pytest.raises(ArchitectureError, match=rf"^config.json: {key} is null: .*; correct this file$"):
                architecture_for(config, "config.json")
            continue
        checkpoint = saved(model, config, tmp_path / key)
        facts = facts_of(checkpoint)
        assert difference(model, checkpoint, facts) < TOLERANCE, (key, value)
        found = misread(checkpoint, facts)
        assert [finding.consequence for finding in found] == [OWN_HEAD] * (key == "tie_word_embeddings"), (key, value)


@pytest.mark.parametrize("model_type", families.CONFIGS)
def test_data_about_a_family_say_nothing_of_keys_that_its_class_reads(model_type: str) -> None:
    read = {
        field.name for field in dataclasses.fields(getattr(transformers, family(model_type).model_class).config_class)
    }
    assert not read & family(model_type).asserts.keys()


def refusal(config: dict[str, Any], tensors: Mapping[str, Any]) -> str | None:
    """The line with which a model is refused."""
    try:
        architecture_for(config, "config.json", None, tensors)
    except ArchitectureError as failure:
        return str(failure)
    return None


@pytest.mark.every
@pytest.mark.parametrize("name", [name for name in zoo.TYPES if name not in zoo.REFUSED and "published" not in name])
def test_every_key_of_every_type_is_derived_or_refused_by_its_name(name: str, tmp_path: Path) -> None:
    for key, value, config in variants(name):
        if (name, key) in SAVED_WRONGLY:
            continue
        model = computed(zoo.whole_class(name), config, zoo.config_class(name))
        if model is None:
            assert len(str(refusal(config, {})).splitlines()) == 1, (key, value)
            continue
        checkpoint = saved(model, config, tmp_path / key)
        if refused := refusal(config, checkpoint.tensors):
            assert key in refused or "give a mixture-of-experts model" in refused, (key, value, refused)
        else:
            assert difference(model, checkpoint, facts_of(checkpoint)) < TOLERANCE, (key, value)
