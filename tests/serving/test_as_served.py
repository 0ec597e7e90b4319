"""Figures as served: what each card's kernels multiply, against compressed-tensors and direct formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Command
from conftest import Finished
from runs import Small
from torch import Tensor
from whole_models import compared, finished_weights, run_whole, source_weights, stored

import quantizers
from quantizers.checkpoint.reader import open_folder
from quantizers.formats.fp8 import BLOCKS
from quantizers.planning.job import prepare
from quantizers.recipe.cards import CARDS
from quantizers.serving import as_served
from quantizers.serving.as_served import blocks_to_powers_of_two, multiplied_weight, rounded_activations
from quantizers.serving.kernels import CUTLASS_BLOCKS, DEEP_GEMM, EXPERT_KERNELS, LINEAR_KERNELS, Kernel, kernel
from quantizers.system.errors import CheckpointError

CPU = torch.device("cpu")
ATTENTION = "model.layers.1.self_attn"
EXPERT = "model.layers.1.block_sparse_moe.experts.3"


def activations() -> Tensor:
    """(40, 320): two groups of 128 and a half, of very different sizes, and a row of zeros."""
    x = torch.randn(40, 320, generator=torch.Generator().manual_seed(1))
    x[:, 128:256] *= 50
    x[7] = 0
    return x.to(torch.bfloat16).float()


def by_the_library(x: Tensor, **scheme: Any) -> Tensor:
    """Dynamic FP8 activations by compressed-tensors, in float32."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, dynamic=True, **scheme)
    batch = x[None]  # (1, T, C): in two dimensions it takes tokens for channels
    scale, zero = compute_dynamic_scales_and_zp(batch, args, torch.nn.Module())
    return fake_quantize(batch, scale, zero, args)[0]


def test_fp8_activations_are_those_of_compressed_tensors() -> None:
    x = activations()
    assert torch.allclose(rounded_activations(x, "FP8 per token"), by_the_library(x, strategy="token"), rtol=1e-6)
    padded = torch.nn.functional.pad(x, (0, 64))
    wanted = by_the_library(padded, strategy="group", group_size=128)[:, :320]
    assert torch.allclose(rounded_activations(x, "FP8 per 128"), wanted, rtol=1e-6)
    assert 0.01 < (wanted - x).norm() / x.norm() < 0.05


def test_other_activations_are_those_of_a_direct_formula() -> None:
    x = activations()
    for row, found in zip(x.numpy(), rounded_activations(x, "int8 per token").numpy(), strict=True):
        scale = np.abs(row).max() / np.float32(127)
        assert np.allclose(found, np.rint(row / scale) * scale if scale else row, rtol=1e-6)
    found = rounded_activations(x, "FP8 per 128, power of two")
    for row in range(len(x)):
        for first in range(0, 320, 128):
            group = x[row, first : first + 128]
            scale = 1.0
            while scale * 448 < group.abs().max():
                scale *= 2
            while scale / 2 * 448 >= group.abs().max() and scale > 1e-6:
                scale /= 2
            assert torch.equal(found[row, first : first + 128], (group / scale).to(torch.float8_e4m3fn).float() * scale)
    assert torch.equal(rounded_activations(x, "bfloat16"), x)


def test_blocks_whose_scales_become_powers_of_two() -> None:
    """Each block by itself; one that has such scales already stays as it is."""
    weight = torch.randn(200, 320, generator=torch.Generator().manual_seed(2)) * 0.3
    found = blocks_to_powers_of_two(weight)
    for i in range(0, 200, 128):
        for j in range(0, 320, 128):
            block = weight[i : i + 128, j : j + 128]
            scale = 2.0 ** np.ceil(np.log2(float(block.abs().max()) / 448))
            assert torch.equal(found[i : i + 128, j : j + 128], (block / scale).to(torch.float8_e4m3fn).float() * scale)
    assert 0.01 < (found - weight).norm() / weight.norm() < 0.04
    assert torch.equal(blocks_to_powers_of_two(found), found)


def test_weights_that_kernels_multiply(finished: Finished) -> None:
    """As stored, with scales in bfloat16, and rounded to bfloat16, from the parts in the files."""
    files, (_, tensors) = open_folder(finished.folder), stored(finished.folder)
    codes, scale = (tensors[f"{ATTENTION}.q_proj.{part}"].float() for part in ("weight", "weight_scale"))
    spread = scale.repeat_interleave(128, 0)[: len(codes)].repeat_interleave(128, 1)[:, : codes.shape[1]]
    bfloat16 = codes * spread.to(torch.bfloat16).float()
    assert not torch.equal(bfloat16, codes * spread)
    for rules, wanted in (
        (CUTLASS_BLOCKS, codes * spread),
        (LINEAR_KERNELS["ampere"]["rows"], bfloat16),
        (LINEAR_KERNELS["ampere"]["blocks"], bfloat16.to(torch.bfloat16).float()),
        (LINEAR_KERNELS["vllm-cpu"]["blocks"], (codes * spread).to(torch.bfloat16).float()),
        (DEEP_GEMM, blocks_to_powers_of_two(codes * spread)),
    ):
        assert torch.equal(multiplied_weight(files, f"{ATTENTION}.q_proj", rules, CPU), wanted), rules
    exact = finished_weights(finished.folder)[1][f"{EXPERT}.w2.weight"]
    assert torch.equal(multiplied_weight(files, f"{EXPERT}.w2", EXPERT_KERNELS["vllm-cpu"]["packed"], CPU), exact)
    found = multiplied_weight(files, f"{EXPERT}.w2", EXPERT_KERNELS["hopper"]["packed"], CPU)
    assert torch.equal(found, exact.to(torch.bfloat16).float())


def test_deep_gemm_takes_no_odd_widths() -> None:
    assert kernel("hopper", "linear", BLOCKS, (192, 256)) is DEEP_GEMM
    assert kernel("hopper", "linear", BLOCKS, (160, 256)) is CUTLASS_BLOCKS
    without = kernel("hopper-no-e8m0", "linear", BLOCKS, (192, 256))
    assert replace(without, name=CUTLASS_BLOCKS.name) == CUTLASS_BLOCKS
    assert kernel("hopper-no-e8m0", "linear", BLOCKS, (160, 256)) is CUTLASS_BLOCKS
    assert kernel("hopper", "linear", BLOCKS, (192, 320)) is CUTLASS_BLOCKS


def served_whole(model: Any, attention: Kernel, experts: Kernel, texts: list[Tensor]) -> Any:
    """transformers' whole model, whose layers multiply other numbers: an oracle in float32, token by token."""

    def rounded(module: torch.nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
        return (rounded_activations(arguments[0], attention.activations),)

    def routed(module: Any) -> Callable[..., Tensor]:
        def forward(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            output = torch.zeros_like(x)
            entering = rounded_activations(x, experts.activations)
            for token, (numbers, shares) in enumerate(zip(chosen.tolist(), weights, strict=True)):
                for expert, share in zip(numbers, shares, strict=True):
                    gate, up = (module.gate_up_proj[expert] @ entering[token]).chunk(2)
                    h = rounded_activations(torch.nn.functional.silu(gate) * up, experts.activations)
                    output[token] += share * (module.down_proj[expert] @ h)
            return output

        return forward

    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            linear = getattr(layer.self_attn, name)
            if attention.scales == "power of two":
                linear.weight.copy_(blocks_to_powers_of_two(linear.weight))
            linear.register_forward_pre_hook(rounded)
        layer.mlp.experts.forward = routed(layer.mlp.experts)
    return run_whole(model, texts)


@torch.no_grad()
@pytest.mark.slow
def test_figures_are_those_of_whole_models_with_the_same_kernels(
    finished: Finished, whole_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, so that only the simulated kernels differ: source, output, and both against the source as stored."""
    from quantizers.calibration.load_set import load_set

    monkeypatch.setattr(as_served, "DTYPE", torch.float32)
    data = load_set(finished.held_out, str(finished.source))
    texts = [torch.from_numpy(sample.tokens).long() for sample in data.samples]
    (found,) = quantizers.evaluate(finished.source, finished.folder, finished.held_out, as_served=["hopper"]).candidates
    figures = found.figures["as_served"]["hopper"]
    stored_source = run_whole(whole_model(*source_weights(finished.source)), texts)
    rules = EXPERT_KERNELS["hopper"]
    source = served_whole(whole_model(*source_weights(finished.source)), DEEP_GEMM, rules["blocks"], texts)
    output = served_whole(whole_model(*finished_weights(finished.folder)), DEEP_GEMM, rules["packed"], texts)
    for name, pair in (
        ("served", (source, output)), ("card_alone", (stored_source, source)), ("from_stored", (stored_source, output))
    ):  # fmt: skip
        wanted = compared(*pair, texts)
        # A sum's last bit takes an activation over the edge between two codes, and then perhaps a token to an expert.
        assert figures[name]["kl"]["mean"] == pytest.approx(float(wanted.kl.mean()), rel=0.05), name
        assert figures[name]["kl"]["median"] == pytest.approx(float(wanted.kl.median()), rel=0.05), name
        assert figures[name]["tokens"] == len(wanted.kl)
    assert figures["card_alone"]["kl"]["mean"] > found.kl


@pytest.mark.slow
def test_a_run_and_an_evaluation_give_the_same(small: Small, command: Command, tmp_path: Path) -> None:
    """The run has its layers in memory, the evaluation reads its files; and what is not known is refused."""
    words = ("eval", small.model, small.whole, "--data", small.folder / "held-out.yaml", "--no-picture", "--as-served")
    assert command(*words, "hopper", "--json") == 0
    found = json.loads(command.out)["candidates"][0]
    assert found["as_served"] == small.report["as_served"]
    assert found["as_served"]["hopper"]["kernels"] == {
        "linear layers in FP8 in blocks": str(DEEP_GEMM),
        "experts in packed integers": str(EXPERT_KERNELS["hopper"]["packed"]),
    }
    assert command(*words, "hopper", "--json") == 0
    assert command(*words, "volta") == 2
    assert command.err == f"quantize: --as-served volta: no such card is known here; give one of {', '.join(CARDS)}\n"


def test_other_blocks_are_refused(small: Small) -> None:
    job = prepare(str(small.recipe))
    quantization = job.opened.config["quantization_config"] | {"weight_block_size": [128, 64]}
    source = replace(job.opened, config=job.opened.config | {"quantization_config": quantization})
    with pytest.raises(CheckpointError, match=r"config.json: FP8 in blocks of 128 x 64, and only those of 128 x 128"):
        as_served.ServedModel(source, job.facts, CPU, "hopper")
