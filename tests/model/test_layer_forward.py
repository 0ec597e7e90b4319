"""Both halves over the rows of many sequences, against the layer run whole, one sequence at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make

from quantizers.architectures.families import architecture_for
from quantizers.checkpoint.reader import open_folder
from quantizers.model.activation_store import ActivationStore
from quantizers.model.layer_forward import attend, finish, observe, padded, unpadded
from quantizers.model.moe_inputs import moe_input_store
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.system.errors import QuantizeError

LENGTHS = [5, 1, 12, 7, 3, 4, 2, 2, 2]
SINGLE_PROCESS = 4  # the first go through attention alone, then two together with padding, and three that are as long
CHUNK = 8  # rows: every block but the first holds parts of two sequences or more


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> StreamedModel:
    checkpoint = open_folder(make(tmp_path_factory.mktemp("halves") / "model", seed=3))
    facts = architecture_for(checkpoint.config, "config.json")
    return StreamedModel(checkpoint, facts, torch.device("cpu"), torch.float32)


@pytest.fixture
def layer(model: StreamedModel) -> Iterator[DecoderLayer]:
    with model.layer(0) as module:
        yield module


def rows(width: int, dtype: torch.dtype, path: Path | None = None) -> ActivationStore:
    return ActivationStore(path, LENGTHS, width, dtype, chunk=CHUNK)


def filled(model: StreamedModel, path: Path | None = None) -> ActivationStore:
    states = rows(model.facts.hidden_size, model.dtype, path)
    states.flat.copy_(torch.randn(states.flat.shape, generator=torch.Generator().manual_seed(1)))
    return states


@torch.no_grad()
@pytest.mark.parametrize("in_a_file", [False, True])
def test_blocks_of_rows_give_what_each_sequence_gives_alone(
    in_a_file: bool, model: StreamedModel, layer: DecoderLayer, tmp_path: Path
) -> None:
    states = filled(model, tmp_path / "states.bin" if in_a_file else None)
    wanted = [layer.module(**model.inputs(layer, sequence.unsqueeze(0)))[0] for sequence in states]
    experts: list[torch.Tensor] = []
    hook = layer.module.mlp.experts.register_forward_pre_hook(lambda _, args: experts.append(args[1]))
    for sequence in states:
        layer.module(**model.inputs(layer, sequence.unsqueeze(0)))
    hook.remove()
    after, chosen = filled(model), rows(model.facts.top_k, torch.int32)
    attend(model, layer, states, after)
    assert len(after.chunks()) == 5
    assert [len(batch) for batch in after.batches] == [1, 1, 1, 1, 2, 3]
    finish(model, layer, after, "here", chosen=chosen)
    for i, (expected, choices) in enumerate(zip(wanted, experts, strict=True)):
        closeness = 1e-5 if i < SINGLE_PROCESS else 1e-4  # attention of a batch has other roundings
        assert torch.allclose(after[i], expected, rtol=closeness, atol=closeness)
        assert torch.equal(chosen[i].long().sort(-1).values, choices.sort(-1).values)


@torch.no_grad()
def test_observing_leaves_the_residual_and_what_the_experts_are_given(
    model: StreamedModel, layer: DecoderLayer
) -> None:
    states = filled(model)
    residual = [model.attend(layer, sequence) for sequence in states]
    recorded = moe_input_store(lambda _, width, dtype: rows(width, dtype), model.facts, model.dtype)
    observe(model, layer, states, recorded)
    for i, expected in enumerate(residual):
        if i < SINGLE_PROCESS:
            assert torch.equal(states[i], expected)
        assert torch.allclose(states[i], expected, atol=1e-5)
        seen = model.route(layer, expected)
        assert torch.allclose(recorded.x[i], seen.x, atol=1e-6 if i < SINGLE_PROCESS else 1e-5)
        assert torch.equal(recorded.chosen[i].long(), seen.chosen)
        assert torch.allclose(recorded.weight[i], seen.weight, atol=1e-6)


@torch.no_grad()
def test_an_output_that_is_not_finite_is_named(model: StreamedModel, layer: DecoderLayer) -> None:
    states = filled(model)
    states[2][3, 0] = torch.nan
    with pytest.raises(QuantizeError, match="layer 7: its output is not finite"):
        finish(model, layer, states, "layer 7")


def test_rows_of_nothing_are_rows(tmp_path: Path) -> None:
    """A set without texts has files without bytes, which cannot be mapped."""
    empty = ActivationStore(tmp_path / "states.bin", [], 4, torch.float32)
    assert (len(empty), empty.chunks()) == (0, [])
    empty.flush()
    empty.remove()


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_padding_comes_last_and_goes_again(lengths: list[int]) -> None:
    rows = torch.arange(1.0, 3 * sum(lengths) + 1).view(-1, 3)
    batch = padded(rows, lengths)
    assert batch.shape == (len(lengths), max(lengths), 3)
    for sequence, length in zip(batch, lengths, strict=True):
        assert bool((sequence[:length] > 0).all())
        assert not sequence[length:].any()
    assert torch.equal(unpadded(batch, lengths), rows)
    assert (batch.data_ptr() == rows.data_ptr()) == (len(set(lengths)) == 1)
