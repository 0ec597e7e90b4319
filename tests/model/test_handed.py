"""What is kept beside states, handed on by layers or token ids: found, kept bit for bit, and there after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import zoo
from runs import hashes

from quantizers.architectures.architecture import HandedFacts
from quantizers.architectures.derive import derived_architecture
from quantizers.architectures.roles import find_handed
from quantizers.architectures.skeleton import Skeleton
from quantizers.checkpoint.reader import open_folder
from quantizers.pipeline import layer_entry
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare
from quantizers.system.errors import ArchitectureError, Interrupted

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("glm_moe_dsa", ("prev_topk_indices", 1, 8, "int32")),
        ("zaya", ("prev_router_hidden_states", 1, 32, "float")),
        ("glm4_moe", None),
    ],
)
def test_what_is_handed_on_is_found(name: str, found: tuple[Any, ...] | None) -> None:
    handed = find_handed(Skeleton(zoo.whole_class(name), zoo.config_of(name)))
    assert (handed and tuple(handed.model_dump().values())) == found


@pytest.mark.parametrize(
    ("name", "found"), [("qwen4_exp", ("ple_input_ids",)), ("deepseek_v4", ("input_ids",)), ("glm4_moe", ())]
)
def test_arguments_that_are_the_token_ids_are_found(name: str, found: tuple[str, ...]) -> None:
    skeleton, ids = Skeleton(zoo.whole_class(name), zoo.config_of(name)), torch.randint(300, (2, 8))
    for call in skeleton.calls(8):
        assert call.tokens == found
        assert all(call.of(call.states, None, ids)[argument] is ids for argument in found)


def test_arguments_made_of_the_token_ids_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, whole = open_folder(zoo.save("qwen4_exp", tmp_path)), zoo.whole_class("qwen4_exp")
    forward = whole.forward
    monkeypatch.setattr(whole, "forward", lambda self, input_ids, **rest: forward(self, input_ids + 1, **rest))
    with pytest.raises(ArchitectureError, match="layer 0: ple_input_ids depends on the tokens, not on their number"):
        derived_architecture(checkpoint.config | {"pad_token_id": 3}, checkpoint.tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_keeps_token_ids(tmp_path: Path, dtype: torch.dtype) -> None:
    model = zoo.opened(zoo.save("qwen4_exp", tmp_path), dtype)
    states, ids = torch.randn(2, 5, model.hidden).to(dtype), torch.randint(2**31 - 1, (2, 5))
    rows = model.row(states, None, ids)
    assert rows.numel() * dtype.itemsize == 10 * model.facts.row_bytes(dtype.itemsize)
    assert torch.equal(rows[..., : model.hidden], states)
    assert torch.equal(model.tokens(rows), ids)
    text = torch.randint(300, (9,))
    entering = model.begin(text, model.embedding())
    with model.layer(0) as layer:
        assert torch.equal(model.tokens(model.run(layer, entering)[0]), text)
    model.facts = model.facts.model_copy(update={"handed": HandedFacts(argument="a", entry=1, width=8, dtype="int64")})
    rows = model.row(states[:1], indices := torch.randint(2**20, (1, 5, 3)), ids[:1])
    assert torch.equal(model.handed(rows), indices)
    assert torch.equal(model.tokens(rows), ids[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_keeps_it_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    model = zoo.opened(zoo.save("glm_moe_dsa", tmp_path), dtype)
    states = torch.randn(1, 5, model.hidden).to(dtype)
    assert model.handed(model.row(states)) is None
    for width in (3, 8):
        indices = torch.randint(2**20, (1, 5, width), dtype=torch.int32)
        rows = model.row(states, indices)
        assert rows.shape[-1] == model.row_width
        assert rows.numel() * dtype.itemsize == 5 * model.facts.row_bytes(dtype.itemsize)
        assert torch.equal(rows[..., : model.hidden], states)
        found = model.handed(rows)
        assert found is not None
        assert found.dtype == indices.dtype
        assert torch.equal(found, indices)
    with pytest.raises(ArchitectureError, match="hands on 9 numbers for a token, more than the 8 that were found"):
        model.row(states, torch.zeros(1, 5, 9, dtype=torch.int32))
    numbers = torch.randn(1, 5, 8).to(dtype)
    model.facts = model.facts.model_copy(update={"handed": HandedFacts(argument="a", entry=1, width=8, dtype="float")})
    found = model.handed(model.row(states, numbers))
    assert found is not None
    assert torch.equal(found, numbers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm_moe_dsa", pytest.param("qwen4_exp", marks=pytest.mark.every)])
def test_a_run_that_was_stopped_has_it_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.save(name, tmp_path / "model")
    job, write_json = (
        prepare(str(tiny.write_recipe(tmp_path, samples=3, bits=4, group_size=32))),
        layer_entry.write_json,
    )
    run(job, Options(tmp_path / "whole", CPU))

    def stopped(path: Path, entry: Any) -> None:
        write_json(path, entry)
        if entry.get("layer") == 2:  # layer 3 gets what it handed on
            raise Interrupted("", "stopped", "", 15)

    monkeypatch.setattr(layer_entry, "write_json", stopped)
    with pytest.raises(Interrupted):
        run(job, Options(tmp_path / "stopped", CPU, states="files"))
    monkeypatch.undo()
    run(job, Options(tmp_path / "stopped", CPU, states="files"))
    assert hashes(tmp_path / "stopped") == hashes(tmp_path / "whole")
