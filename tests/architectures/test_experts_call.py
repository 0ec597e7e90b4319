"""Experts that get one tensor, and experts whose matrices are held transposed or in turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.experts_call import (
    arguments_of,
    experts_per_token,
    of_chosen_rows,
    replaced_experts,
    weighs_inputs,
)
from quantizers.architectures.families import architecture_for
from quantizers.architectures.matrices import as_held, as_stacked, bias_of
from quantizers.checkpoint.loaded_tensors import bytes_needed, load_tensors
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.formats.tensor_names import split_fused_experts
from quantizers.serving.check import check


@pytest.fixture(scope="module")
def experts() -> Any:
    torch.manual_seed(3)
    module = Llama4TextExperts(zoo.config_of("llama4").get_text_config())
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return module.requires_grad_(False)


def test_one_tensor_of_blocks_is_a_call_with_states_experts_and_weights(experts: Any) -> None:
    """Llama 4's own forward on all rows against that on each expert's alone."""
    torch.manual_seed(4)
    chosen, states = torch.tensor([5, 0, 5, 7, 2, 5]), torch.randn(6, 128)
    blocks = torch.zeros(8, 6, 128)
    blocks[chosen, torch.arange(6)] = states
    assert weighs_inputs(experts)
    assert experts_per_token(blocks.flatten(0, 1), 8) == 1
    x, index, weight = arguments_of(experts, (blocks.flatten(0, 1),), {})
    assert torch.equal(x, states)
    assert torch.equal(index[:, 0], chosen)
    assert torch.equal(weight, torch.ones(6, 1))
    wanted = experts(blocks.flatten(0, 1))
    with replaced_experts(experts, of_chosen_rows(experts)):
        torch.testing.assert_close(experts(blocks.flatten(0, 1)), wanted, rtol=1e-5, atol=1e-6)
    blocks[1, 0] = 1.0
    assert experts_per_token(blocks.flatten(0, 1), 8) == 2


def test_what_replaces_a_forward_within_another_leaves_that_in_place(experts: Any) -> None:
    with replaced_experts(experts, lambda x, *_: 2 * x):
        with replaced_experts(experts, lambda x, *_: 3 * x):
            assert experts(torch.ones(8, 128))[0, 0] == 3
        assert experts(torch.ones(8, 128))[0, 0] == 2


def test_matrices_as_a_module_holds_them_and_back() -> None:
    generator = torch.Generator().manual_seed(5)
    gate_up, down = (torch.randn(shape, generator=generator) for shape in ((2, 6, 4), (2, 4, 3)))
    for layout in ({"transposed": t, "interleaved": i} for t in (False, True) for i in (False, True)):
        module = torch.nn.Module()
        held = as_held(gate_up, down, **layout)
        for name, tensor in zip(("gate_up_proj", "down_proj"), held, strict=True):
            module.register_parameter(name, torch.nn.Parameter(tensor))
        assert all(map(torch.equal, as_stacked(module, **layout), (gate_up, down)))
        bias = torch.arange(12.0).view(2, 6)
        module.gate_up_proj_bias = bias
        expected = torch.cat([bias[:, ::2], bias[:, 1::2]], 1) if layout["interleaved"] else bias
        assert torch.equal(bias_of(module, **layout), expected)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Architecture]:
    checkpoint = open_folder(zoo.save("gpt_oss", tmp_path_factory.mktemp("stored")))
    return checkpoint, architecture_for(checkpoint.config, "config.json", None, checkpoint.tensors)


def test_an_experts_matrix_is_some_columns_of_what_is_read_once(stored: tuple[Checkpoint, Architecture]) -> None:
    checkpoint, facts = stored
    apart = split_fused_experts(checkpoint, facts)
    whole = {name: checkpoint.tensor(name) for name in checkpoint.tensors if "layers.1.mlp.experts" in name}
    gate_up, down = (whole[f"model.layers.1.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
    names = [name for name in apart.tensors if ".layers.1.mlp.experts." in name]
    loaded = load_tensors(apart, names)
    assert bytes_needed(apart.tensors[name] for name in names) == sum(tensor.nbytes for tensor in whole.values())
    moved = loaded.to(torch.device("cpu"), prefetched=loaded.buffer.clone())
    for expert in range(8):
        wanted = {"gate": gate_up[expert, :, ::2], "up": gate_up[expert, :, 1::2], "down": down[expert]}
        for matrix, tensor in wanted.items():
            name = f"model.layers.1.mlp.experts.{expert}.{matrix}_proj.weight"
            for part in (apart, loaded, moved, loaded.only([name])):
                assert torch.equal(part.tensor(name), tensor.mT), name


def test_what_vllm_reads_no_matrices_of_is_told(stored: tuple[Checkpoint, Architecture], tmp_path: Path) -> None:
    checkpoint, facts = stored
    apart = split_fused_experts(checkpoint, facts)
    name = facts.expert(0, 0, "up")
    tensors = apart.tensors | {f"{name}.weight_packed": apart.tensors[f"{name}.weight"]}
    words = [
        finding
        for finding in map(str, check(checkpoint.config, tensors, facts).findings)
        if "in one tensor alone" in finding
    ]
    assert len(words) == 1
    assert "loads without an error and produces garbage" in words[0]
    assert not any("MXFP4" in str(finding) for finding in check(checkpoint.config, apart.tensors, facts).findings)
