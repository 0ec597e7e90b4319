"""The proof of each layer: it passes what is computed rightly, and refuses, with its figure, what is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import families
import pytest
import tiny
import torch
import yaml
import zoo
from commands import Command
from torch import Tensor

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for
from quantizers.architectures.skeleton import Call, Skeleton
from quantizers.checkpoint.reader import open_folder
from quantizers.model.proof import BOUND, LENGTHS, Proof
from quantizers.model.streamed_model import StreamedModel
from quantizers.system.errors import ArchitectureError

CPU = torch.device("cpu")
WINDOWS = ["mixtral with windows", "qwen3_moe with a dense layer and windows"]
Change = Callable[[Architecture], Architecture]


def opened(folder: Path, change: Change = lambda facts: facts, dtype: torch.dtype = torch.float32) -> StreamedModel:
    checkpoint = open_folder(folder)
    facts = architecture_for(checkpoint.config, "config.json", None, checkpoint.tensors)
    return StreamedModel(checkpoint, change(facts), CPU, dtype)


def proven(model: StreamedModel) -> list[float]:
    """The proof's figures of all layers, each without the weights of its experts."""
    proof, found = Proof(model), []
    for number in range(model.facts.num_layers):
        with model.layer(number, experts=False) as layer:
            found.append(proof.of_layer(layer))
    return found


def refused(model: StreamedModel, layer: int, proof: Proof | None = None) -> float:
    """The figure with which the proof refuses this layer."""
    with model.layer(layer, experts=False) as one, pytest.raises(ArchitectureError) as caught:
        (proof or Proof(model)).of_layer(one)
    message = rf"model: layer {layer}: its output is not that of .* own call: (\S+) of its largest change .* refused"
    figure = re.search(message, str(caught.value))
    assert figure is not None, caught.value
    return float(figure[1])


class Altered(Skeleton):
    """A skeleton that says wrongly what a layer is called with."""

    passed: Mapping[str, Any] = MappingProxyType({})  # instead of the model's own arguments of these names

    def calls(self, length: int) -> list[Call]:
        return [replace(call, arguments=call.arguments | dict(self.passed)) for call in super().calls(length)]


class Marked(Skeleton):
    """One of a model that passes its tokens on to each layer."""

    def calls_with(self, tokens: Tensor) -> list[Call]:
        return [replace(call, arguments=call.arguments | {"marks": tokens}) for call in super().calls_with(tokens)]


def with_skeleton(kind: type[Skeleton], model: StreamedModel) -> Any:
    model.skeleton = kind(type(model.skeleton.model), model.skeleton.config, CPU, model.dtype)
    return model


@pytest.fixture(params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = getattr(torch, request.param)
    return chosen


def written(folder: Path, model: str) -> Path:
    return families.write(folder / model, families.family_of(model), **families.MODELS[model])


@pytest.mark.parametrize("model", ["minimax_m2", *(pytest.param(name, marks=pytest.mark.slow) for name in WINDOWS)])
def test_what_is_computed_rightly_passes_far_within_the_bound(model: str, tmp_path: Path) -> None:
    figures = proven(opened(written(tmp_path, model)))
    assert len(figures) == 3
    assert max(figures) < 0.05 * BOUND[torch.float32]


@pytest.mark.slow
def test_so_it_does_in_bfloat16(tmp_path: Path) -> None:
    """With torch's portable kernels: those for AVX512-BF16 round sums of bfloat16 three times as coarsely as AVX2's."""
    folders = [written(tmp_path, model) for model in ("minimax_m2", *WINDOWS)]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, __file__, *map(str, folders)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for figures in json.loads(done.stdout):
        assert len(figures) == 3
        assert max(figures) < 0.05 * BOUND[torch.bfloat16]


@pytest.mark.parametrize("model", WINDOWS)
def test_a_window_or_rotation_that_is_left_out_is_refused(model: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Measured: 0.5 and more, in either dtype."""
    changes = families.MODELS[model]
    assert changes["sliding_window"] < min(LENGTHS)
    folder = families.write(tmp_path / "model", families.family_of(model), **changes)
    streamed = with_skeleton(Altered, opened(folder, dtype=dtype))
    proof, calls = Proof(streamed), streamed.skeleton.calls(max(LENGTHS))
    assert calls[2].arguments["attention_mask"] is not None
    for layer in (1, 2):
        streamed.skeleton.passed = {"attention_mask": None}
        assert refused(streamed, layer, proof) > 0.3
    cos, sin = calls[0].arguments["position_embeddings"]
    streamed.skeleton.passed = {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}
    assert refused(streamed, 1, proof) > 0.3


def test_arguments_that_depend_on_the_tokens_are_refused_by_name(tmp_path: Path) -> None:
    model = with_skeleton(Marked, opened(tiny.make(tmp_path / "model")))
    with pytest.raises(ArchitectureError, match="layer 0: marks, as MiniMaxM2ForCausalLM passes it, depends on"):
        Proof(model)


@pytest.mark.slow
def test_other_token_ids_than_the_model_passes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened(zoo.save("qwen4_exp", tmp_path / "model"))
    assert max(proven(model)) < BOUND[torch.float32]
    monkeypatch.setattr(model, "tokens", lambda rows: torch.zeros(rows.shape[:-1], dtype=torch.int64))
    assert refused(model, 0) > 0.05


def other_norm(facts: Architecture) -> Architecture:
    return facts.model_copy(update={"modules": facts.modules.model_copy(update={"norm": "input_layernorm"})})


def in_halves(facts: Architecture) -> Architecture:
    return facts.model_copy(update={"kinds": [kind.model_copy(update={"halves": True}) for kind in facts.kinds]})


def test_another_norm_before_the_experts_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    model = opened(tiny.make(tmp_path / "model"), other_norm, dtype)
    assert min(refused(model, number) for number in (0, 1)) > 0.3


@pytest.mark.parametrize("model_type", ["cohere2_moe", "minimax"])
def test_a_layer_that_does_not_consist_of_two_halves_is_refused(model_type: str, tmp_path: Path) -> None:
    """Attention and experts beside each other; a residual that is the norm's output."""
    folder = zoo.save(model_type, tmp_path / "model")
    assert max(proven(opened(folder))) < BOUND[torch.float32]
    model = opened(folder, in_halves)
    assert min(refused(model, number) for number in model.facts.moe_layers) > 0.05


def test_a_run_of_a_model_that_is_not_proven_ends_with_its_figure_and_leaves_nothing_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny.write_job(tmp_path, layers=2)
    facts = architecture_for(tiny.config(), "x").as_yaml()
    right, wrong = (f"norm: {name}_layernorm\n" for name in ("post_attention", "input"))
    assert facts.count(right) == 1
    (tmp_path / "facts.yaml").write_text(facts.replace(right, wrong))
    body = yaml.safe_load(recipe.read_text())
    body["source"]["facts"] = "facts.yaml"
    recipe.write_text(yaml.safe_dump(body))
    command, output = Command(monkeypatch, capsys), tmp_path / "output"
    assert command("run", recipe, "--output", output) == 2
    assert re.search(r"model: layer 0: its output is not that of transformers' own call: 0\.\d+ of", command.err)
    assert not list(output.glob("*.safetensors")), list(output.iterdir())
    assert not (output / "config.json").exists()
    assert command("verify", output) != 0


if __name__ == "__main__":  # of models' folders, in a process with kernels of its own
    print(json.dumps([proven(opened(Path(folder), dtype=torch.bfloat16)) for folder in sys.argv[1:]]))
