"""Tensors that the facts call unread: carried along byte for byte, whatever they hold, and opened by nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tiny
import torch
from edited import edit
from safetensors.torch import load_file

from quantizers.architectures import families
from quantizers.architectures.architecture import Architecture
from quantizers.checkpoint.reader import open_folder
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.formats.fp8 import Fp8Blocks
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.assign_actions import expected_tensors, make_plan
from quantizers.planning.device_memory import device_memory
from quantizers.planning.job import prepare
from quantizers.planning.plan import Plan
from quantizers.recipe.schema import Experts
from quantizers.stitch.audit.checkpoint import verify
from quantizers.system.errors import ArchitectureError, CheckpointError

CPU = torch.device("cpu")
CONFIG = tiny.config()
FACTS = families.architecture_for(CONFIG, "config.json")
TENSORS = expected_tensors(FACTS, CONFIG, "config.json")
PATTERNS = [r".*rotary_emb\.inv_freq", r"vision_tower\..*", r"model\.layers\.2\..*", r".*\.mask"]
INV_FREQ = "model.layers.1.self_attn.rotary_emb.inv_freq"
MASK = "model.layers.0.self_attn.mask"
VISION = "vision_tower.blocks.0.weight_scale"  # named as an FP8 scale per row is
BEYOND = "model.layers.2.enorm.weight"  # this model has layers 0 and 1
ODD = "model.layers.007.rotary_emb.inv_freq"
EXTRA = {
    INV_FREQ: torch.arange(16.0),
    MASK: torch.full((4, 4), -torch.inf).triu(1),
    VISION: torch.full((3, 1), torch.nan, dtype=torch.bfloat16),
    BEYOND: torch.zeros(0, 5, dtype=torch.int64),
    ODD: torch.tensor(2, dtype=torch.uint8),
}
SPECS = {
    INV_FREQ: Spec("F32", (16,)), MASK: Spec("F32", (4, 4)), VISION: Spec("BF16", (3, 1)), BEYOND: Spec("I64", (0, 5)),
    ODD: Spec("U8", ()),
}  # fmt: skip
LAST = "model-00003-of-00003.safetensors"


def with_unread(*patterns: str) -> Architecture:
    return Architecture.model_validate(FACTS.model_dump() | {"unread": list(patterns)})


def planned(facts: Architecture, tensors: dict[str, Spec]) -> Plan:
    return make_plan(facts, tensors, Experts(), "here", (128, 128))


def test_they_lie_in_the_shard_of_their_layer_or_in_the_last() -> None:
    plan = planned(with_unread(*PATTERNS), TENSORS | SPECS)
    carried = {action.source: action for action in plan.actions if action.kind == "carry"}
    assert {name: action.layer for name, action in carried.items()} == {
        INV_FREQ: 1, MASK: 0, VISION: None, BEYOND: None, ODD: None
    }  # fmt: skip
    assert all(action.outputs == {name: SPECS[name]} for name, action in carried.items())
    assert plan.shards()[LAST].keys() >= {VISION, BEYOND, ODD}
    assert [action.layer for action in plan.actions] == sorted(
        (action.layer for action in plan.actions), key=lambda layer: 9 if layer is None else layer
    )


def test_they_change_nothing_else_in_the_plan() -> None:
    plain, plan = planned(FACTS, TENSORS), planned(with_unread(*PATTERNS), TENSORS | SPECS)
    assert tuple(action for action in plan.actions if action.kind != "carry") == plain.actions
    assert plan.kept_forms == [Fp8Blocks(128, 128)]
    assert device_memory(plan, FACTS, 64, False, None) == device_memory(plain, FACTS, 64, False, None)


def test_the_scale_of_an_fp8_weight_gets_the_name_that_servers_read() -> None:
    """Where both are unread: servers know one name of a scale per block, wherever it lies."""
    own = {f"vision_tower.{name}.weight": Spec(dtype, (4, 4)) for name, dtype in (("a", "F8_E4M3"), ("b", "BF16"))}
    own |= {f"{name}_scale_inv": Spec("F32", (1, 1)) for name in own}
    actions = {one.source: one for one in planned(with_unread(r"vision_tower\..*"), TENSORS | own).actions}
    kinds = [(actions[name].kind, *actions[name].outputs) for name in own]
    fp8, plain, renamed, other = own
    assert renamed == "vision_tower.a.weight_scale_inv"
    assert kinds == [("carry", fp8), ("carry", plain), ("rename", "vision_tower.a.weight_scale"), ("carry", other)]


def test_an_expression_covers_whole_names_only() -> None:
    with pytest.raises(CheckpointError, match=f"^here: {VISION} is not among the facts"):
        planned(with_unread("vision_tower", r"blocks\..*"), TENSORS | {VISION: SPECS[VISION]})


@pytest.mark.parametrize(
    "name", ["model.layers.1.input_layernorm.weight", "model.layers.1.self_attn.q_proj.weight_scale"]
)
def test_a_tensor_that_is_read_or_written_otherwise_is_refused(name: str) -> None:
    """Of a layer that the facts alone do not know; and the name that an FP8 scale gets in the output."""
    with pytest.raises(
        ArchitectureError,
        match=rf"^here: {name} matches both a known tensor and `unread` in the architecture spec of minimax_m2",
    ):
        planned(with_unread(name.replace(".", r"\.")), TENSORS)


def test_a_dtype_that_cannot_be_copied_is_refused_before_the_run() -> None:
    with pytest.raises(CheckpointError, match=f"^here: {INV_FREQ} is U64; .* is needed"):
        planned(with_unread(*PATTERNS), TENSORS | {INV_FREQ: Spec("U64", (16,))})


@pytest.mark.slow
def test_a_run_carries_them_along_and_verify_compares_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_family_architecture", lambda *_: with_unread(*PATTERNS))
    recipe = tiny.write_job(tmp_path, layers=2, words=12, samples=2)
    tensors = tiny.tensors(CONFIG)
    run(prepare(str(recipe)), Options(tmp_path / "plain", CPU))
    tiny.write(tmp_path / "model", CONFIG, tensors | EXTRA)
    report = run(prepare(str(recipe)), Options(tmp_path / "output", CPU))
    written: dict[str, torch.Tensor] = {}
    for number in (1, 2, 3):
        shard = f"model-0000{number}-of-00003.safetensors"
        found, plain = load_file(tmp_path / "output" / shard), load_file(tmp_path / "plain" / shard)
        assert found.keys() - plain.keys() == {1: {MASK}, 2: {INV_FREQ}, 3: {VISION, BEYOND, ODD}}[number]
        assert all(torch.equal(found[name].view(torch.uint8), plain[name].view(torch.uint8)) for name in plain)
        written |= found
    for name, tensor in EXTRA.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    assert report["audit"]["differences"] == []
    source = open_folder(tmp_path / "model")
    for name in (MASK, VISION):
        copy = shutil.copytree(tmp_path / "output", tmp_path / "copy")
        edit(copy, name, lambda t, name=name: t[name].view(-1)[1:2].fill_(3))
        assert f"{name}: bytes differ from the source's {name}" in verify(copy, source, CPU).differences
        shutil.rmtree(copy)
    assert verify(tmp_path / "output", source, CPU).differences == []
