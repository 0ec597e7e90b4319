"""Runs that convert: the source's numbers by an independent reader, what does not fit, interruptions, and `verify`.

tests/low_bits.py reads the sources and MXFP4, compressed-tensors reads the other outputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import exact
import pytest
import torch
import yaml
from low_bits import numbers, rewrite_as, weights_of
from source_forms import write_plain
from torch import Tensor
from whole_models import finished_weights, source_weights, stored

import quantizers
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare

CPU = torch.device("cpu")


def converted(recipe: Path, output: str = "output") -> dict[str, Any]:
    return run(prepare(str(recipe)), Options(recipe.parent / output, CPU))


def written(folder: Path) -> dict[str, Tensor]:
    """Every parameter of an output as a number, by compressed-tensors; MXFP4 by tests/low_bits.py."""
    config, tensors = stored(folder)
    modules = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
    if config.get("quantization_config", {}).get("format") == "mxfp4-pack-quantized":
        scaled = {f"{module}.{last}" for module in modules for last in ("weight_packed", "weight_scale")}
        weights = {name: tensor for name, tensor in tensors.items() if name not in scaled}
        for module in modules:
            parts = {last: tensors[f"{module}.{last}"] for last in ("weight_packed", "weight_scale")}
            weights[f"{module}.weight"] = numbers(parts)
        return weights
    return finished_weights(folder)[1] if "quantization_config" in config else tensors


def assert_equal_numbers(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.float(), after[name].float()), name


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("plain") / "model", "minimax_m2", 2, intermediate_size=128)


@pytest.mark.parametrize(
    ("layout", "to", "attention"),
    [
        ("MXFP4 of compressed-tensors", "fp8-block", "bf16"),
        ("MXFP4 of DeepSeek", "nvfp4", "bf16"),
        ("MXFP4 of Quark", "bf16", "bf16"),
        ("MXFP8 of MiniMax", "bf16", "bf16"),
        ("E8M0 blocks", "fp8-block", "bf16"),
    ],
)
def test_published_forms_keep_their_numbers(plain: Path, tmp_path: Path, layout: str, to: str, attention: str) -> None:
    rewrite_as(plain, tmp_path / "model", layout)
    recipe = tmp_path / "recipe.yaml"
    body = {"source": {"model": "model"}, "experts": {"convert": to}, "attention": attention}
    recipe.write_text(yaml.safe_dump(body))
    report = converted(recipe)
    before, after = weights_of(tmp_path / "model")[1], written(tmp_path / "output")
    assert_equal_numbers(before, after)
    proof = report["conversion"]
    matrices = [t for name, t in before.items() if t.dim() == 2 and (".experts." in name or "_proj" in name)]
    assert (proof["to"], proof["equal"], proof["matrices"]) == (to, True, len(matrices))
    assert proof["values"] == report["audit"]["values"] == sum(map(torch.numel, matrices))
    assert all(gate["passed"] for gate in report["gates"])


@pytest.mark.parametrize(
    ("form", "to"), [("bf16", "fp8-block"), ("bf16", "mxfp4"), ("bf16", "nvfp4"), ("fp8", "bf16"), ("fp8", "nvfp4")]
)
def test_experts_beside_attention_in_fp8(tmp_path: Path, form: str, to: str) -> None:
    recipe = exact.write(tmp_path, form, hidden=256, convert=to)
    converted(recipe)
    source, after = source_weights(tmp_path / "model")[1], written_beside(tmp_path / "output")
    assert_equal_numbers({name: tensor for name, tensor in source.items() if ".experts." in name}, after)
    checked = quantizers.verify(tmp_path / "output", source=tmp_path / "model")
    assert checked.passed
    assert checked.audit.values == sum(tensor.numel() for tensor in after.values())


def written_beside(output: Path) -> dict[str, Tensor]:
    """The experts of an output whose attention stays FP8."""
    config, tensors = stored(output)
    experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    if "routed_experts" not in config["quantization_config"]["config_groups"]:
        return experts
    if any(name.endswith("weight_packed") and "global" not in str(experts) for name in experts):
        made = {}
        for module in dict.fromkeys(name.rpartition(".")[0] for name in experts):
            parts = {n.rpartition(".")[2]: t for n, t in experts.items() if n.startswith(f"{module}.")}
            made[f"{module}.weight"] = parts
        if all("weight_global_scale" not in parts for parts in made.values()):
            return {name: numbers(parts) for name, parts in made.items()}
    return {name: tensor for name, tensor in finished_weights(output)[1].items() if ".experts." in name}
