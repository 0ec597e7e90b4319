"""A source with all experts of a layer in two tensors, as transformers holds them, against the same saved apart."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from edited import edit
from hub_stand_in import HubStandIn, reached
from runs import cut_in_layer, hashes
from safetensors.torch import save
from source_forms import fused, write_plain
from whole_models import stored

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for
from quantizers.architectures.matrices import MATRICES
from quantizers.checkpoint.reader import Checkpoint, open_folder, torch_dtype
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.checkpoint.source_identity import source_digest
from quantizers.formats.tensor_names import published_names, split_fused, split_fused_experts
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.assign_actions import expected_tensors
from quantizers.planning.job import prepare
from quantizers.stitch.audit.checkpoint import verify
from quantizers.system.errors import CheckpointError, OutputError

CPU = torch.device("cpu")
GATE_UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"


@dataclass(frozen=True)
class Made:
    """The same model in two folders, each with its recipe, and the output of the fused one."""

    apart: Path
    fused: Path

    @property
    def output(self) -> Path:
        return self.fused / "output"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("fused")
    made = Made(folder / "apart", folder / "fused")
    write_plain(made.apart / "model", "mixtral")
    made.fused.mkdir()
    fused(made.apart / "model", made.fused / "model")
    recipe = tiny.write_recipe(made.fused, words=12, samples=2)
    run(prepare(str(recipe)), Options(made.output, CPU))
    return made


def opened(folder: Path) -> tuple[Checkpoint, Architecture]:
    checkpoint = open_folder(folder)
    facts = architecture_for(checkpoint.config, "config.json")
    return checkpoint, facts


def test_every_matrix_has_the_bytes_that_transformers_saves_apart(made: Made) -> None:
    checkpoint, facts = opened(made.fused / "model")
    assert GATE_UP in checkpoint.tensors
    _, apart = stored(made.apart / "model")
    for shown in (split_fused_experts(checkpoint, facts), published_names(checkpoint, facts)):
        assert shown.tensors.keys() == apart.keys()
        for name, tensor in apart.items():
            assert shown.tensors[name].name == name
            assert torch.equal(shown.tensor(name), tensor), name
    assert split_fused_experts(shown, facts) == shown


def test_it_runs_to_the_same_bytes_as_the_model_saved_apart(made: Made) -> None:
    recipe = tiny.write_recipe(made.apart, words=12, samples=2)
    run(prepare(str(recipe)), Options(made.apart / "output", CPU))
    assert hashes(made.output) == hashes(made.apart / "output")


def test_verify_reads_the_fused_source(made: Made) -> None:
    source = open_folder(made.fused / "model")
    audit = verify(made.output, source, CPU)
    assert audit.differences == []
    assert audit.tensors == len(open_folder(made.apart / "model").tensors)
    copy = shutil.copytree(made.fused / "model", made.fused / "other")
    edit(copy, GATE_UP, lambda t: t[GATE_UP].copy_(t[GATE_UP].flip(0)))
    assert any(
        ".experts.0.w1.weight_packed: " in line for line in verify(made.output, open_folder(copy), CPU).differences
    )


def test_a_changed_source_is_noticed(made: Made, tmp_path: Path) -> None:
    recipe = shutil.copytree(made.fused, tmp_path / "job", ignore=shutil.ignore_patterns("o*")) / "recipe.yaml"
    tiny.write_recipe(tmp_path / "job", words=12, samples=2)
    options = Options(tmp_path / "resumed", CPU)
    cut_in_layer(1, prepare(str(recipe)), options)
    info = open_folder(tmp_path / "job" / "model").tensors[DOWN]
    before = source_digest(prepare(str(recipe)).opened)
    with info.file.open("rb+") as stream:  # in the last of the pieces that the digest covers
        stream.seek(-3, os.SEEK_END)
        byte = stream.read(1)
        stream.seek(-3, os.SEEK_END)
        stream.write(bytes([byte[0] ^ 1]))
    assert source_digest(prepare(str(recipe)).opened) != before
    with pytest.raises(OutputError, match="source"):
        run(prepare(str(recipe)), options)


# What is refused, of files and of headers on the Hub ----------------------------------------------------------------

CONFIG = {"model_type": "mixtral"} | {
    "hidden_act": "silu", "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 3, "num_experts_per_tok": 2,
}  # fmt: skip
FACTS = architecture_for(CONFIG, "config.json")
APART = expected_tensors(FACTS, CONFIG, "config.json")


def headers(base: str = "mlp", **changes: Spec) -> dict[str, Spec]:
    """Of the model with fused experts; `changes` to those of layer 1."""
    tensors = {name: spec for name, spec in APART.items() if ".experts." not in name}
    for layer in range(2):
        specs = {"gate_up_proj": Spec("BF16", (3, 192, 128)), "down_proj": Spec("BF16", (3, 128, 96))}
        specs |= changes if layer == 1 else {}
        tensors |= {f"model.layers.{layer}.{base}.experts.{last}": spec for last, spec in specs.items()}
    return tensors


@pytest.mark.parametrize("base", ["mlp", "block_sparse_moe"])
def test_headers_alone_are_those_of_the_model_saved_apart(base: str) -> None:
    assert split_fused(headers(base), FACTS, "here") == APART


def test_tensors_under_names_that_the_facts_say_are_taken_apart_with_the_scales_of_fp8() -> None:
    """Gate, up and down apart, as Step-3.7 has them."""
    facts = FACTS.model_copy(update={"fused": {f"moe.{matrix}.weight": [matrix] for matrix in MATRICES}})
    rows = {"gate": 96, "up": 96, "down": 128}
    tensors = {name: spec for name, spec in APART.items() if ".experts." not in name}
    for layer, (matrix, count) in product(range(2), rows.items()):
        tensors[f"model.layers.{layer}.moe.{matrix}.weight"] = Spec("F8_E4M3", (3, count, 224 - count))
        tensors[f"model.layers.{layer}.moe.{matrix}.weight_scale_inv"] = Spec("F32", (3, 3, 4))
    wanted = {name: spec for name, spec in APART.items() if ".experts." not in name}
    for name, spec in APART.items():
        if ".experts." in name:
            wanted |= {name: Spec("F8_E4M3", spec.shape), f"{name}_scale_inv": Spec("F32", (3, 4))}
    assert split_fused(tensors, facts, "here") == wanted
    name = "model.layers.1.moe.up.weight"
    for changed in ({f"{name}_scale_inv": Spec("F32", (3, 3))}, {name: Spec("F8_E4M3", (3, 128, 96))}):
        with pytest.raises(CheckpointError, match=rf"^here: {next(iter(changed))} holds all experts in one tensor"):
            split_fused(tensors | changed, facts, "here")


def test_headers_from_the_hub_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny.write_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("model: model", "model: me/model"))
    zeros = {name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)) for name, spec in headers().items()}
    files = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": save(zeros)}
    with HubStandIn(repositories={"me/model": {"main": files}}) as hub:
        reached(hub, tmp_path / "home", monkeypatch)
        job = prepare(str(recipe), offline_facts=True)
    assert {action.source: action.spec for action in job.plan.actions} == APART


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "transposed": (
        {"gate_up_proj": Spec("BF16", (3, 128, 192))},
        rf"{GATE_UP} holds all experts in one tensor, BF16 \[3, 128, 192\]; only BF16 or F16 or F32 \[3, 192, 128\]",
    ),
    "down transposed": ({"down_proj": Spec("BF16", (3, 96, 128))}, rf"{DOWN} holds .* \[3, 96, 128\]"),
    "other number of experts": ({"down_proj": Spec("BF16", (4, 128, 96))}, rf"{DOWN} holds .* \[4, 128, 96\]"),
    "FP8": ({"down_proj": Spec("F8_E4M3", (3, 128, 96))}, rf"{DOWN} holds .* F8_E4M3 \[3, 128, 96\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_layout_is_refused_by_name_with_the_remedy(name: str) -> None:
    changes, said = REFUSED[name]
    with pytest.raises(CheckpointError, match=rf"^here: {said}.*; save the model with transformers' save_pretrained, "):
        split_fused(headers(**changes), FACTS, "here")


def test_fused_experts_in_an_unknown_place_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"^here: model.layers.2.mlp.experts.down_proj holds all experts"):
        split_fused(headers() | {"model.layers.2.mlp.experts.down_proj": Spec("BF16", (3, 128, 96))}, FACTS, "here")


@pytest.mark.parametrize("more", [APART, headers("block_sparse_moe")], ids=["apart", "fused under another name"])
def test_experts_that_are_there_twice_are_refused(more: dict[str, Spec]) -> None:
    with pytest.raises(
        CheckpointError, match=r"^here: model.layers.\d.block_sparse_moe.experts.\d.w\d.weight is also a"
    ):
        split_fused(headers() | more, FACTS, "here")
