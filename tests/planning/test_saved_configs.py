"""config.json as transformers of today saves it: other names of keys, and more of them, mean the same sizes."""

from __future__ import annotations

from typing import Any

import families
import pytest
import transformers

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for
from quantizers.system.errors import ArchitectureError


def saved(facts: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    written: dict[str, Any] = getattr(transformers, facts.model_class).config_class(**config).to_dict()
    return written | {"model_type": config["model_type"]}  # of kimi_k2, which transformers calls deepseek_v3


@pytest.mark.parametrize("family", families.CONFIGS)
def test_what_transformers_saves_has_the_sizes_of_what_it_read(family: str) -> None:
    config = families.config(family)
    facts = architecture_for(config, "x")
    again = saved(facts, config)
    found = architecture_for(again, "x")
    values = [[one.sizes[name].value for name in facts.sizes] for one in (facts, found)]
    assert (values[1], found.dense, found.mtp_layers) == (values[0], facts.dense, facts.mtp_layers)
    assert facts.is_of(again)
    for name in ("experts", "chosen", "hidden", "width", "layers", "kv_heads"):
        assert config[facts.sizes[name].key] == facts.sizes[name].value
        assert not facts.is_of(config | {facts.sizes[name].key: 2 * facts.sizes[name].value})


def experts_of(config: dict[str, Any]) -> int:
    return architecture_for(config, "x").num_experts


def test_a_key_of_another_name_is_that_of_the_class_and_a_missing_one_its_default() -> None:
    config = families.config("qwen3_moe")
    assert "num_experts" not in saved(architecture_for(config, "x"), config)
    renamed = {key: value for key, value in config.items() if key != "num_experts"}
    assert experts_of(renamed | {"num_local_experts": 6}) == 6
    assert experts_of(renamed) == transformers.Qwen3MoeConfig().num_experts
    for key in ("num_experts", "num_local_experts"):
        for wrong in (-1, "many", 10_000):
            with pytest.raises(ArchitectureError, match=rf"^x: {key} is .*; a whole number from 1 to 4096 is needed$"):
                experts_of(renamed | {key: wrong})


def test_a_size_that_the_class_works_out_is_what_it_works_out() -> None:
    """GLM's class divides where config.json has no head_dim, and has no default of its own."""
    config = families.config("glm4_moe")
    del config["head_dim"]
    assert architecture_for(config, "x").every_linear()["self_attn.q_proj"] == (4 * 64, 256)


def test_kinds_of_layers_are_those_of_the_class() -> None:
    config = families.config("glm4_moe_lite")
    kinds = ["sparse", "dense", "sparse"]
    with pytest.raises(ArchitectureError, match=r"^x: first_k_dense_replace is 1, but mlp_layer_types has 1 dense"):
        architecture_for(config | {"mlp_layer_types": kinds}, "x")
    del config["first_k_dense_replace"]
    assert architecture_for(config | {"mlp_layer_types": kinds}, "x").dense == {1}
    with pytest.raises(ArchitectureError, match=r"^x: transformers.* cannot make Glm4MoeLiteForCausalLM of it \("):
        architecture_for(config | {"mlp_layer_types": 3}, "x")
