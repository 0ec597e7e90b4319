"""Experts without a usable Hessian: each is named in the report, and harms no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from calibration_tokenizer import write_tokenizer
from sets import rows_set

from quantizers.checkpoint.reader import open_folder
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare
from quantizers.system.errors import QuantizeError

LAYERS, EXPERTS = 2, 8
MOE = "model.layers.0.block_sparse_moe"
Tensors = dict[str, torch.Tensor]
Fault = Callable[[Tensors], object]


def scaled(expert: int, factor: float, *matrices: str) -> Fault:
    """An expert's matrices times a factor, by way of their FP8 scales."""

    def fault(tensors: Tensors) -> None:
        for matrix in matrices:
            tensors[f"{MOE}.experts.{expert}.{matrix}.weight_scale_inv"] *= factor

    return fault


def zero_block(expert: int) -> Fault:
    return lambda tensors: tensors[f"{MOE}.experts.{expert}.w1.weight_scale_inv"][0, 1].zero_()


def never_routed(expert: int) -> Fault:
    return lambda tensors: tensors[f"{MOE}.e_score_correction_bias"][expert].fill_(-100)


def quantized(folder: Path, *faults: Fault, **experts: Any) -> tuple[dict[str, Any], Path]:
    """A run over a random model with the faults: its report and folder."""
    folder.mkdir(exist_ok=True)
    config = tiny.config(
        num_hidden_layers=LAYERS, num_local_experts=EXPERTS, hidden_size=256, intermediate_size=128, vocab_size=320
    )
    tensors = tiny.tensors(config)
    for fault in faults:
        fault(tensors)
    write_tokenizer(tiny.write(folder / "model", config, tensors))
    rows = [("any", " ".join(f"text {i} word {j}" for j in range(30))) for i in range(4)]
    rows_set(folder, rows, sequence_length=192)
    recipe = {"source": {"model": "model"}, "calibration": "set.yaml", "experts": experts}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run(prepare(str(folder / "recipe.yaml")), Options(folder / "output", torch.device("cpu")))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in report.json")

    report = json.loads((folder / "output" / "report.json").read_text(), parse_constant=refuse)
    return report, folder / "output"


def expert_bytes(output: Path, expert: int) -> dict[str, bytes]:
    checkpoint = open_folder(output)
    names = [name for name in checkpoint.tensors if name.startswith(f"{MOE}.experts.{expert}.")]
    assert len(names) == 9
    return {name: bytes(checkpoint.raw(name)) for name in names}


def assert_finite(output: Path) -> None:
    checkpoint = open_folder(output)
    for name in checkpoint.tensors:
        tensor = checkpoint.tensor(name)
        assert not tensor.is_floating_point() or bool(torch.isfinite(tensor.float()).all()), name


NEAREST = "rounded to nearest, because its Hessian is not usable"
ALL_ALIKE = "0 routed tokens, so all tokens count alike for it"
# For each faulty expert its fault, and the lines of the report.
FAULTS: dict[int, tuple[Fault, list[str]]] = {
    1: (scaled(1, 1e9, "w1", "w3"), ["rows not finite or too large, left out of the Hessian", NEAREST]),
    2: (scaled(2, 0, "w1", "w2", "w3"), [NEAREST, "groups are all zero"]),
    3: (scaled(3, 0, "w2"), ["down: 1024 of 1024 groups are all zero"]),
    4: (zero_block(4), ["gate: 512 of 1024 groups are all zero"]),
    5: (never_routed(5), [ALL_ALIKE]),
}
INFINITE = 6, scaled(6, 1e25, "w1", "w3")


def assert_named(report: dict[str, Any], expert: int, said: list[str]) -> None:
    lines = [line for line in report["layers"][0]["fallbacks"] if line.startswith(f"expert {expert}: ")]
    assert [words for words in said if not any(words in line for line in lines)] == [], lines


@pytest.mark.slow
def test_faulty_experts_are_named_and_harm_no_other(tmp_path: Path) -> None:
    """One that gives infinity is never routed, in the healthy model neither: else the layer's output is not finite."""
    number, infinite = INFINITE
    others = [never_routed(5), never_routed(number)]
    _, healthy = quantized(tmp_path / "healthy", *others, awq=False)
    faults = [fault for fault, _ in FAULTS.values()]
    report, output = quantized(tmp_path / "faulty", *faults, *others, infinite, awq=False)
    assert_finite(output)
    same = [expert for expert in range(EXPERTS) if expert_bytes(output, expert) == expert_bytes(healthy, expert)]
    assert same == [0, 5, 7]
    for expert, (_, said) in FAULTS.items():
        assert_named(report, expert, said)
    assert_named(report, number, ["rows not finite or too large", NEAREST, ALL_ALIKE])


def test_a_layer_whose_output_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="layer 0: its output is not finite") as stopped:
        quantized(tmp_path, INFINITE[1])
    assert stopped.value.exit_code == 1
    assert not (tmp_path / "output" / "config.json").exists()
