"""config.json as transformers of today saves it: other names of keys, and more of them, mean the same sizes."""

from __future__ import annotations

from typing import Any

import families
import pytest
import transformers

from quantizers.architectures import skeleton
from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for
from quantizers.architectures.rotary import transformers_config
from quantizers.architectures.sizes import sizes_of
from quantizers.architectures.skeleton import config_of
from quantizers.system.errors import ArchitectureError


def saved(facts: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    written: dict[str, Any] = getattr(transformers, facts.model_class).config_class(**config).to_dict()
    return written | {"model_type": config["model_type"]}  # of kimi_k2, which transformers calls deepseek_v3


@pytest.mark.parametrize("family", families.CONFIGS)
def test_what_transformers_saves_has_the_sizes_of_what_it_read(family: str) -> None:
    config = families.config(family)
    facts = architecture_for(config, "x")
    read, again = sizes_of(facts, config, "x"), saved(facts, config)
    found = sizes_of(facts, again, "x")
    assert (found, found.dense, found.mtp) == (read, read.dense, read.mtp)
    computed = config_of(getattr(transformers, facts.model_class), transformers_config(facts, again, found))
    for name in ("experts", "chosen", "hidden", "width", "layers"):
        assert getattr(computed, facts.sizes[name].key) == read[name]


def test_a_key_of_another_name_is_that_of_the_class_and_a_missing_one_its_default() -> None:
    config = families.config("qwen3_moe")
    facts = architecture_for(config, "x")
    assert "num_experts" not in saved(facts, config)
    renamed = {key: value for key, value in config.items() if key != "num_experts"}
    assert sizes_of(facts, renamed | {"num_local_experts": 6}, "x")["experts"] == 6
    assert sizes_of(facts, renamed, "x")["experts"] == transformers.Qwen3MoeConfig().num_experts
    for wrong in (-1, "many", 10_000):
        with pytest.raises(ArchitectureError, match=r"^x: num_experts is .*; a whole number from 1 to 4096 is needed$"):
            sizes_of(facts, renamed | {"num_local_experts": wrong}, "x")


def test_a_size_that_the_class_works_out_is_what_it_works_out() -> None:
    """GLM's class divides where config.json has no head_dim, and has no default of its own."""
    config = families.config("glm4_moe")
    del config["head_dim"]
    assert sizes_of(architecture_for(config, "x"), config, "x")["head_dim"] == 256 // 4


def test_transformers_is_not_asked_where_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import takes longer than a plan."""
    monkeypatch.setattr(skeleton, "model_class", None)
    for family in families.CONFIGS:
        config = families.config(family)
        sizes_of(architecture_for(config, "x"), config, "x")


@pytest.mark.parametrize("kinds", [["sparse", "dense", "sparse"], ["dense", "sparse"], 3])
def test_kinds_of_layers_that_contradict_the_dense_ones_are_refused(kinds: Any) -> None:
    config = families.config("glm4_moe_lite")
    facts = architecture_for(config, "x")
    assert sizes_of(facts, config | {"mlp_layer_types": ["dense", "sparse", "sparse"]}, "x").dense == {0}
    with pytest.raises(ArchitectureError, match=r"^x: mlp_layer_types is .* the layers \[0\] are dense "):
        sizes_of(facts, config | {"mlp_layer_types": kinds}, "x")
