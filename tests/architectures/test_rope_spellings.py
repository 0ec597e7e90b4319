"""Every spelling of the keys about rotary embeddings means what `rope_parameters` says in full."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
import transformers

from quantizers.architectures.derive import skeleton_of
from quantizers.architectures.roles import TOKENS
from quantizers.system.errors import ArchitectureError

THETA = {"rope_theta": 12345.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "rotary_dim", "partial_rotary_factor")
HALF = {"minimax_m2": 0.5, "glm4_moe": 0.5}  # of each head's channels are rotated
SPELLINGS: dict[
    str, tuple[str, dict[str, Any], list[str]]
] = {  # the type meant, the keys, and where the part may stand
    "rope_theta": ("default", THETA, [""]),
    "rope_scaling null": ("default", THETA | {"rope_scaling": None}, [""]),
    "rope_parameters": ("default", {"rope_parameters": {"rope_type": "default"} | THETA}, ["", "rope_parameters"]),
    "type": ("yarn", THETA | {"rope_scaling": {"type": "yarn"} | YARN}, ["", "rope_scaling"]),
    "rope_type": ("yarn", THETA | {"rope_scaling": {"rope_type": "yarn"} | YARN}, ["", "rope_scaling"]),
    "theta within": ("yarn", {"rope_scaling": {"rope_type": "yarn"} | YARN | THETA}, ["", "rope_scaling"]),
    "all within": ("yarn", {"rope_parameters": {"rope_type": "yarn"} | YARN | THETA}, ["", "rope_parameters"]),
    "theta beside": ("yarn", THETA | {"rope_parameters": {"type": "yarn"} | YARN}, ["", "rope_parameters"]),
    "both": (
        "yarn",
        {name: {"rope_type": "yarn"} | YARN | THETA for name in ("rope_parameters", "rope_scaling")},
        [""],
    ),
}


def without_rope(family: str) -> dict[str, Any]:
    config = {key: value for key, value in families.CONFIGS[family].items() if key not in KEYS}
    return config | ({"head_dim": 64} if family == "mixtral" else {})  # transformers' YaRN needs it said


def embeddings(family: str, **rope: Any) -> list[torch.Tensor]:
    """cos and sin of transformers' whole model of this `rope_parameters`, and the factor of its attention's scores."""
    config = without_rope(family)
    model_class = getattr(transformers, config["architectures"][0])
    del config["quantization_config" if "quantization_config" in config else "architectures"]
    with torch.device("meta"):
        model = model_class(model_class.config_class(**config, rope_parameters=rope))
    rotary = type(model.model.rotary_emb)(config=model.config)
    cos, sin = rotary(torch.zeros(1, TOKENS, 1), torch.arange(TOKENS).unsqueeze(0))
    return [cos, sin, torch.tensor(model.model.layers[0].self_attn.scaling)]


def parts(family: str, places: list[str]) -> list[dict[str, Any]]:
    """The ways to say which part of a head is rotated: changes of the keys, by the place that gets them."""
    if family not in HALF:
        return [{}]
    said = [{place: {"partial_rotary_factor": HALF[family]}} for place in places]
    return said + ([{"": {"rotary_dim": 64}}] if family == "minimax_m2" else [{}])  # GLM's class has it as its default


@pytest.mark.slow
@pytest.mark.parametrize("family", families.CONFIGS)
def test_all_spellings_rotate_as_transformers_does_with_all_said_in_rope_parameters(family: str) -> None:
    part = {"partial_rotary_factor": HALF[family]} if family in HALF else {}
    for name, (kind, keys, places) in SPELLINGS.items():
        expected = embeddings(family, rope_type=kind, **THETA, **part, **(YARN if kind == "yarn" else {}))
        for said in parts(family, places):
            config = without_rope(family) | keys | said.get("", {})
            config |= {place: config[place] | more for place, more in said.items() if place}
            skeleton = skeleton_of(config)
            found = [*skeleton.calls(TOKENS)[0].arguments["position_embeddings"]]
            found.append(torch.tensor(skeleton.layers[0].self_attn.scaling))
            assert all(map(torch.equal, found, expected)), (name, said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rope", "said"),
    [
        ("mixtral", {"head_dim": None, "partial_rotary_factor": 0.5}, "partial_rotary_factor means 32, but MixtralFor"),
        ("qwen3_moe", {"rope_parameters": THETA | {"rope_type": "default", "partial_rotary_factor": 0.5}}, "means 64"),
        ("mixtral", THETA | {"rope_parameters": {"rope_theta": 1}}, "rope_theta is 12345.0, but rope_parameters.rope"),
        (
            "deepseek_v3",
            {"rope_parameters": {"type": "yarn"} | YARN, "rope_scaling": {"rope_type": "yarn", "factor": 2}},
            "rope_parameters.factor is 4.0, but rope_scaling.factor is 2; correct one of the two",
        ),
        ("minimax_m2", THETA | {"rotary_dim": 64, "partial_rotary_factor": 0.25}, "but rotary_dim means 0.5"),
    ],
)  # fmt: skip
def test_what_is_said_twice_or_not_read_by_the_class_is_refused(family: str, rope: dict[str, Any], said: str) -> None:
    with pytest.raises(ArchitectureError, match=said.replace(".", r"\.")):
        skeleton_of(without_rope(family) | rope)
