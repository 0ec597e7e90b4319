"""`quantize stitch`: a mixed checkpoint from experts that others quantized, and the router that they forgot."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tiny
import torch
from commands import Command
from conftest import Finished
from foreign import INT4, bf16_copy, experts_only, oneshots
from huggingface_hub import ModelCard

from quantizers.calibration.load_set import load_set
from quantizers.checkpoint.reader import open_folder
from quantizers.commands.evaluate import measure
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare
from quantizers.repair.stitch import stitch_experts
from quantizers.stitch.audit.checkpoint import verify
from quantizers.system.errors import CheckpointError
from quantizers.system.files import file_sha256 as sha256

SHARD = "model-00001-of-00005.safetensors"
CPU = torch.device("cpu")
ROUTER = "model.layers.{}.block_sparse_moe.gate.weight"


@pytest.fixture(scope="module")
def copy(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bf16_copy(tiny_model, tmp_path_factory.mktemp("copy") / "bf16")


@pytest.mark.slow
def test_the_forgotten_router_is_named_and_repaired(
    finished: Finished, copy: Path, tmp_path: Path, command: Command
) -> None:
    """The repaired checkpoint is the finished output, tensor for tensor and byte for byte."""
    experts = experts_only(finished.folder, copy, tmp_path / "experts")
    words = ("stitch", "--source", finished.source, "--experts", experts)
    assert command(*words, "--output", tmp_path / "bare") == 3
    out = command.out
    assert "norms smoothed in 4 of 4 layers; confirmed on their experts" in out
    assert "router not compensated in 4 layers of the experts' checkpoint (0, 1, 2, 3)" in out
    assert "write the compensated router with --repair-router" in out
    assert command(*words, "--output", tmp_path / "fixed", "--repair-router") == 0
    assert "0 differences" in command.out
    made, wanted = open_folder(tmp_path / "fixed"), open_folder(finished.folder)
    assert made.config == wanted.config
    assert made.tensors.keys() == wanted.tensors.keys()
    assert [name for name in wanted.tensors if made.raw(name) != wanted.raw(name)] == []
    bare = open_folder(tmp_path / "bare")
    assert [name for name in bare.tensors if bare.raw(name) != made.raw(name)] == [ROUTER.format(n) for n in range(4)]
    assert command(*words, "--output", tmp_path / "fixed", "--repair-router") == 0
    assert "finished before; nothing was touched" in command.out
    assert command(*words, "--output", tmp_path / "fixed") == 2


def test_what_nobody_knows_of_a_stitched_checkpoint_is_said(
    finished: Finished, copy: Path, tmp_path: Path, command: Command
) -> None:
    """Its report has the gates and the record of a run's, its card what the experts' maker wrote, and no more."""
    experts = experts_only(finished.folder, copy, tmp_path / "experts")
    front = ["base_model: /home/somebody/m2", "datasets: [owner/chats, ../private]", "license: mit"]
    (experts / "README.md").write_text("\n".join(["---", *front, "---", "# Somebody's experts"]))
    (experts / "recipe.yaml").write_text(
        "default_stage:\n  default_modifiers:\n    AWQModifier:\n"
        "      offload_device: !!python/object/apply:torch.device [cpu]\n    QuantizationModifier: {n: 1}\n"
    )
    output = tmp_path / "fixed"
    words = ("stitch", "--source", finished.source, "--experts", experts, "--output", output, "--repair-router")
    assert command(*words) == 0
    assert f"\nnext: quantize eval {os.path.relpath(finished.source)} {output}" in command.out

    report = json.loads((output / "report.json").read_text())
    assert [(gate["name"], gate["passed"]) for gate in report["gates"]] == [("audit", True), ("consumers", True)]
    assert report["experts"]["modifiers"] == ["AWQModifier", "QuantizationModifier"]
    assert report["experts"]["card"] == {"datasets": ["owner/chats"], "license": ["mit"]}
    assert not {"calibration", "coverage", "kl"} & report.keys()
    card = (output / "README.md").read_text()
    assert "## What is not known" in card
    assert "datasets on its card: owner/chats" in card
    assert "were not measured" in card
    assert "saw every token" not in card
    assert f"| `{SHARD}` | `{sha256(output / SHARD)}` |" in card
    assert "somebody" not in card + (output / "report.html").read_text() + json.dumps(report)
    data = ModelCard(card).data.to_dict()
    assert data["tags"] == ["compressed-tensors", "awq", "fp8", "int4", "w4a16", "moe", "vllm"]
    assert not {"datasets", "language", "license", "base_model"} & data.keys()

    assert command("verify", output, "--source", finished.source) == 0
    (output / "report.html").write_text("another page")
    assert command("verify", output, "--source", finished.source) == 3


def test_verify_names_the_router_of_any_published_checkpoint(finished: Finished, copy: Path, tmp_path: Path) -> None:
    """Of a mixed one, and of an experts-only one with bfloat16 routers and other names; first of all differences."""
    for compensated in (False, True):
        experts = experts_only(finished.folder, copy, tmp_path / str(compensated), compensated=compensated)
        found = verify(experts, open_folder(finished.source), CPU).differences
        named = [line for line in found if "not compensated" in line]
        assert len(named) == (0 if compensated else 4)
        assert found[: len(named)] == named


def test_norms_and_experts_that_do_not_belong_together(finished: Finished, copy: Path, tmp_path: Path) -> None:
    experts = experts_only(finished.folder, copy, tmp_path / "experts", folded=False)
    with pytest.raises(CheckpointError, match=r"layer 0: its experts are .*% away from the source's times the ratio"):
        stitch_experts(finished.source, experts, tmp_path / "output", device="cpu")
    assert not (tmp_path / "output").exists()


def test_experts_that_are_not_packed(finished: Finished, copy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="its experts must be packed integers"):
        stitch_experts(finished.source, copy, tmp_path / "output", device="cpu")


def test_experts_that_were_not_smoothed(tmp_path: Path) -> None:
    """No norm was divided: nothing to repair, and every norm and router keeps its bytes."""
    recipe = tiny.write_job(tmp_path, layers=1, awq=False)
    run(prepare(str(recipe)), Options(tmp_path / "made", CPU))
    model, source = tmp_path / "model", open_folder(tmp_path / "model")
    experts = experts_only(tmp_path / "made", bf16_copy(model, tmp_path / "copy"), tmp_path / "experts", folded=False)
    report = stitch_experts(model, experts, tmp_path / "output", device="cpu").report
    assert report["notes"] == ["no norm was smoothed: the source's routers fit"]
    assert report["audit"]["differences"] == []
    output = open_folder(tmp_path / "output")
    for name in (ROUTER.format(0), "model.layers.0.post_attention_layernorm.weight"):
        assert output.raw(name) == source.raw(name)
        assert output.tensors[name].dtype == source.tensors[name].dtype


@pytest.mark.every
def test_the_repair_wins_the_divergence_back(finished: Finished, copy: Path, tmp_path: Path) -> None:
    """Experts by the library's own oneshot, whose AWQ has no router in its mapping."""
    data = load_set(finished.calibration, str(finished.source))
    sequences = [sample.tokens.tolist() for sample in data.samples][:8]
    source = open_folder(finished.source)
    job = {"weights": INT4, "experts_only": True, "awq": True, "sequences": sequences}
    (experts,) = oneshots(copy, {tmp_path / "awq": job})
    made = []
    for repair in (False, True):
        folder = tmp_path / str(repair)
        report = stitch_experts(finished.source, experts, folder, device="cpu", repair_router=repair).report
        assert [layer["router"] for layer in report["layers"]] == ["not compensated"] * 4
        assert len(report["audit"]["differences"]) == (0 if repair else 4)
        made.append(open_folder(folder))
    left_out, repaired = measure(source, made, finished.held_out, CPU, tmp_path / "work")
    print(f"KL {left_out.kl.mean:.4f} with the router left out, {repaired.kl.mean:.4f} repaired")
    assert repaired.kl.mean <= left_out.kl.mean / 4
