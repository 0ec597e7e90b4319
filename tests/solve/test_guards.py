"""Experts that no sums can be had of: each is named in the report, and harms no other."""

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

from quantizers.checkpoint.reader import open_folder
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare
from quantizers.system.errors import QuantizeError

LAYERS, EXPERTS, FAULTY = 2, 8, 3
MOE = "model.layers.0.block_sparse_moe"
Tensors = dict[str, torch.Tensor]
Fault = Callable[[Tensors], object]


def scaled(factor: float, *matrices: str) -> Fault:
    """The faulty expert's matrices times a factor, by way of their FP8 scales."""

    def fault(tensors: Tensors) -> None:
        for matrix in matrices:
            tensors[f"{MOE}.experts.{FAULTY}.{matrix}.weight_scale_inv"] *= factor

    return fault


def never_routed(tensors: Tensors) -> None:
    tensors[f"{MOE}.e_score_correction_bias"][FAULTY] = -100


def infinite(tensors: Tensors) -> None:
    scaled(1e25, "w1", "w3")(tensors)


def zero_block(tensors: Tensors) -> None:
    tensors[f"{MOE}.experts.{FAULTY}.w1.weight_scale_inv"][0, 1] = 0


def infinite_but_never_routed(tensors: Tensors) -> None:
    infinite(tensors)
    never_routed(tensors)


def quantized(folder: Path, *faults: Fault, **experts: Any) -> tuple[dict[str, Any], Path]:
    """A run over a random model with the faults: its report and folder."""
    config = tiny.config(
        num_hidden_layers=LAYERS, num_local_experts=EXPERTS, hidden_size=256, intermediate_size=128, vocab_size=320
    )
    tensors = tiny.tensors(config)
    for fault in faults:
        fault(tensors)
    write_tokenizer(tiny.write(folder / "model", config, tensors))
    rows = [{"text": " ".join(f"text {i} word {j}" for j in range(30))} for i in range(4)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"dataset": "texts.jsonl", "columns": ["text"], "shape": "text", "samples": "all", "category": "any"}
    (folder / "set.yaml").write_text(
        yaml.safe_dump({"name": "guards", "sequence_length": 192, "seed": 1, "sources": [source]})
    )
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
# The fault, with whatever must hold in the run that it is compared with, and what is said of the expert.
FAULTS: dict[str, tuple[list[Fault], list[Fault], list[str]]] = {
    "too large": ([scaled(1e9, "w1", "w3")], [], ["rows not finite or too large, left out of the Hessian", NEAREST]),
    "infinite": ([infinite_but_never_routed], [never_routed], ["rows not finite or too large", NEAREST]),
    "all zero": ([scaled(0, "w1", "w2", "w3")], [], [NEAREST, "groups are all zero"]),
    "w2 zero": ([scaled(0, "w2")], [], ["down: 1024 of 1024 groups are all zero"]),
    "zero block": ([zero_block], [], ["gate: 512 of 1024 groups are all zero"]),
    "never routed": ([never_routed], [], ["0 routed tokens, so all tokens count alike for it"]),
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`compared(*faults, **experts)`: the output of a run that others are compared with, made once."""
    made: dict[Any, Path] = {}

    def output(*faults: Fault, **experts: Any) -> Path:
        key = (faults, tuple(experts.items()))
        if key not in made:
            made[key] = quantized(tmp_path_factory.mktemp("compared"), *faults, **experts)[1]
        return made[key]

    return output


@pytest.mark.parametrize("rounding", ["gptq", pytest.param("nearest", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [name if name in ("infinite", "w2 zero") else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
def test_a_faulty_expert_is_named_and_harms_no_other(
    name: str, rounding: str, tmp_path: Path, compared: Callable[..., Path]
) -> None:
    faults, others, said = FAULTS[name]
    # Tokens that a never-routed expert does not get go to others, whose routed sums change, and rightly so.
    experts = {"awq": False, "rounding": rounding, "routed_weight": 0.0 if name == "never routed" else 0.9}
    report, output = quantized(tmp_path / "faulty", *faults, **experts)
    whole = compared(*others, **experts)
    assert_finite(output)
    for expert in range(EXPERTS):
        same = expert_bytes(output, expert) == expert_bytes(whole, expert)
        assert same == (expert != FAULTY or name == "never routed"), expert
    if name == "never routed":
        report, output = quantized(tmp_path / "named", *faults, awq=False, rounding=rounding)
        assert_finite(output)
    lines = [line for line in report["layers"][0]["fallbacks"] if line.startswith(f"expert {FAULTY}: ")]
    if rounding == "nearest":
        said = [words for words in said if words != NEAREST]
    assert [words for words in said if not any(words in line for line in lines)] == [], lines


@pytest.mark.parametrize(
    "name", [name if name in ("infinite", "w2 zero") else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
def test_with_the_scale_search_the_output_is_finite_too(name: str, tmp_path: Path) -> None:
    report, output = quantized(tmp_path, *FAULTS[name][0])
    assert_finite(output)
    assert any(line.startswith(f"expert {FAULTY}: ") for line in report["layers"][0]["fallbacks"])
    if name != "infinite":  # the squares of such weights are infinite too, so that no closeness can be had of them
        assert all(gate["passed"] for gate in report["gates"])


def test_a_layer_whose_output_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="layer 0: its output is not finite") as stopped:
        quantized(tmp_path, infinite)
    assert stopped.value.exit_code == 1
    assert not (tmp_path / "output" / "config.json").exists()
