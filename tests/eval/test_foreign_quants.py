"""`quantize eval` and `coverage` of AutoAWQ and GPTQ checkpoints: as whole models with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import awq_gptq
import families
import pytest
import torch
from awq_gptq import Kind
from commands import Command
from sets import rows_set
from whole_models import Run, compared, run_whole, source_weights

from quantizers.calibration.load_set import load_set
from quantizers.checkpoint.reader import open_folder
from quantizers.commands.evaluate import measure

CPU = torch.device("cpu")
WholeModel = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]
SENTENCES = ["def area(r):\n    return 3.14 * r * r\n", "The router sends each token to two experts. ", "42, 43, 44, "]


def a_set(folder: Path) -> Path:
    return rows_set(folder, [("spoken", sentence * 6) for sentence in SENTENCES], sequence_length=128)


def token_lists(data: Path, source: Path) -> list[torch.Tensor]:
    return [torch.from_numpy(sample.tokens).long() for sample in load_set(data, str(source)).samples]


def assert_equal(found: dict[str, Any], before: Run, after: Run, texts: list[torch.Tensor]) -> None:
    wanted = compared(before, after, texts)
    assert float(wanted.kl.mean()) > 1e-4  # the quantization shows
    assert found["kl"]["mean"] == pytest.approx(float(wanted.kl.mean()), abs=1e-6)
    assert found["perplexity"]["candidate"] == pytest.approx(float(wanted.nll[1].mean().exp()), rel=1e-6)
    assert found["router"]["agreement"] == pytest.approx(wanted.agreement, abs=1e-9)


def of_the_tiny_model(name: str) -> tuple[Kind, dict[str, Any]]:
    """A kind for all linear layers, and arguments of `awq_gptq.checkpoint`."""
    if name == "AWQ":
        return Kind("awq"), {}
    eight, plain = ".layers.1.", "layers.2.self_attn"

    def chosen(module: str) -> Kind | None:
        if not module.endswith(("_proj", ".w1", ".w2", ".w3", "lm_head")) or plain in module:
            return None
        return Kind("gptq", bits=8, group=-1, shuffled=False) if eight in module else Kind("gptq", shuffled=True)

    rules = {rf"+:.*{eight}": {"bits": 8, "group_size": -1}, rf"-:.*{plain}": {}}
    return Kind("gptq", shuffled=True), {"chosen": chosen, "section": {"dynamic": rules, "lm_head": True}}


@pytest.mark.parametrize(
    "name",
    [
        "AWQ",
        pytest.param("GPTQ in act-order, with exceptions and a quantized head", marks=pytest.mark.slow),
    ],
)
def test_the_tiny_model_measures_as_the_whole_model_does(
    name: str, tiny_model: Path, whole_model: WholeModel, tmp_path: Path
) -> None:
    kind, how = of_the_tiny_model(name)
    numbers = awq_gptq.checkpoint(tiny_model, tmp_path / "candidate", kind, **how)
    config, weights = source_weights(tiny_model)
    data = a_set(tmp_path)
    texts = token_lists(data, tiny_model)
    opened = [open_folder(tiny_model), open_folder(tmp_path / "candidate")]
    (found,) = measure(opened[0], opened[1:], data, CPU, tmp_path / "work")
    before, after = (run_whole(whole_model(config, tensors), texts) for tensors in (weights, numbers))
    assert_equal(found.as_dict(), before, after, texts)


OF_FAMILIES = {
    "mixtral": (Kind("gptq", bits=8, group=64, g_idx=False), {}),
    "qwen3_moe": (
        Kind("gptq"),
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int"},
    ),
}


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_other_families_measure_as_their_whole_models_do(family: str, tmp_path: Path) -> None:
    kind, section = OF_FAMILIES[family]
    source = families.write(tmp_path / "source", family, num_hidden_layers=2)

    def zero_biases(tensors: dict[str, torch.Tensor]) -> None:  # which AutoGPTQ writes
        for name in [name for name in tensors if name.endswith(".qweight")]:
            tensors[name.replace(".qweight", ".bias")] = torch.zeros(tensors[name].shape[1], dtype=torch.float16)

    numbers = awq_gptq.checkpoint(source, tmp_path / "candidate", kind, section=section, edit=zero_biases)
    data = a_set(tmp_path)
    texts = token_lists(data, source)
    (found,) = measure(open_folder(source), [open_folder(tmp_path / "candidate")], data, CPU, tmp_path / "work")
    config, weights = source_weights(source)
    before, after = (run_whole(families.whole_model(config, one), texts) for one in (weights, numbers))
    assert_equal(found.as_dict(), before, after, texts)


def test_a_bias_that_the_model_would_not_add_is_refused(tmp_path: Path, command: Command) -> None:
    source = families.write(tmp_path / "source", "mixtral", num_hidden_layers=2)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.block_sparse_moe.experts.2.w2.bias"] = torch.ones(256, dtype=torch.float16)

    awq_gptq.checkpoint(source, tmp_path / "awq", Kind("awq", group=64), edit=edit)
    assert command("eval", source, tmp_path / "awq", "--data", a_set(tmp_path), "--device", "cpu") == 2
    assert "experts.2.w2.bias is not zero, but this family's model adds no bias there" in command.err.splitlines()[-1]
