"""A dense model as a mixture of experts, at the smallest size: no package is fetched here."""

from __future__ import annotations

from pathlib import Path

import pytest
import real_model
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralForCausalLM

from quantizers.formats.fp8 import dequantize_fp8

HIDDEN, NEURONS = 32, 96


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EXPERTS": 4, "TOP_K": 2, "WIDTH": 32, "SEQUENCE": 16, "BATCH": 2, "SAVE_EVERY": 3}.items():
        monkeypatch.setattr(real_model, name, value)


@pytest.fixture
def dense() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=NEURONS,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def parts_of(dense: LlamaForCausalLM, tokens: torch.Tensor) -> list[real_model.Parts]:
    layers = zip(dense.model.layers, real_model.inputs_of_mlps(dense, tokens), strict=True)
    return [
        real_model.first_guess(*(getattr(layer.mlp, f"{name}_proj").weight.data for name in ("gate", "up", "down")), x)
        for layer, x in layers
    ]


def test_all_experts_together_are_the_dense_layer(dense: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_model, "TOP_K", 4)
    tokens = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(1))
    x = real_model.inputs_of_mlps(dense, tokens)[0]
    gate_up, down, router = parts_of(dense, tokens)[0]
    output, _ = real_model.mixture(x, (gate_up, down, torch.zeros_like(router)))
    with torch.no_grad():
        torch.testing.assert_close(output, dense.model.layers[0].mlp(x), rtol=1e-4, atol=1e-5)


def test_our_mixture_is_transformers_one_and_the_files_hold_it(dense: LlamaForCausalLM, tmp_path: Path) -> None:
    tokens = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(1))
    model = real_model.untrained(dense)
    parts = parts_of(dense, tokens)
    real_model.fill(model, parts)
    x = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(real_model.mixture(x, parts[1])[0], model.model.layers[1].mlp(x[None])[0])
    model.config.save_pretrained(tmp_path)
    save_file(real_model.stored(model), tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = MixtralForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = model.state_dict()
    assert again.state_dict().keys() == kept.keys()
    assert all(torch.equal(tensor, kept[name].bfloat16()) for name, tensor in again.state_dict().items())


def test_training_goes_on_with_the_same_bits(dense: LlamaForCausalLM, tmp_path: Path) -> None:
    tokens = torch.randint(64, (16, 16), generator=torch.Generator().manual_seed(1))

    def trained(*steps: int) -> torch.Tensor:
        for last in steps:  # a process each
            model = real_model.untrained(dense)
            real_model.fill(model, parts_of(dense, tokens))
            real_model.distil(model, dense, tokens, steps=6, saved=tmp_path / f"{len(steps)}.pt", until=last)
        return model.model.layers[1].mlp.experts.down_proj.data

    assert torch.equal(trained(6), trained(3, 6))


def test_fp8_blocks_are_read_back_within_half_a_step() -> None:
    weight = torch.randn(130, 200, generator=torch.Generator().manual_seed(0))
    codes, scale = real_model.fp8_blocks(weight)
    assert scale.shape == (2, 2)
    error = (dequantize_fp8(codes, scale, (128, 128)) - weight).abs()
    smallest = scale.max() * 2.0**-9  # e4m3 below its normal numbers
    assert bool((error <= (weight.abs() / 16).clamp(min=float(smallest))).all())
