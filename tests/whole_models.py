"""Whole models in memory by transformers: the oracle for what is streamed layer by layer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def stored(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    return json.loads((folder / "config.json").read_text()), tensors


def fp8_by_the_library(weight: Tensor, scale: Tensor, block: list[int]) -> Tensor:
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

    if weight.dim() == 3:  # of all experts
        return torch.stack([fp8_by_the_library(*pair, block) for pair in zip(weight, scale, strict=True)])
    library = FP8BlockDequantizer(targets=["m"], weight_block_size=tuple(block), dtype=torch.float32)
    return library.process({"m.weight": weight, "m.weight_scale_inv": scale})["m.weight"]


def source_weights(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json, and every parameter as a number: FP8 in blocks by compressed-tensors' FP8BlockDequantizer."""
    config, tensors = stored(folder)
    weights = {}
    for name, tensor in tensors.items():
        scaled = name.removesuffix("_inv").removesuffix("_scale")
        if f"{name}_scale" in tensors:
            weights[name] = tensor.float() * tensors[f"{name}_scale"].float()
        elif tensor.dtype == torch.float8_e4m3fn:
            block = config["quantization_config"]["weight_block_size"]
            weights[name] = fp8_by_the_library(tensor, tensors[f"{name}_scale_inv"].float(), block)
        elif scaled == name or scaled not in tensors:
            weights[name] = tensor
    return config, weights


def nvfp4_by_the_library(parts: dict[str, Tensor], scheme: Any) -> Tensor:
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    rows, half = parts["weight_packed"].shape
    values = unpack_fp4_from_uint8(parts["weight_packed"], rows, 2 * half, torch.float32)
    scale, whole = parts["weight_scale"].float(), parts["weight_global_scale"]
    return dequantize(values, scale, args=scheme.weights, global_scale=whole, dtype=torch.float32)


def finished_weights(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same of a finished checkpoint, as its quantization_config tells compressed-tensors to read it.

    The library validates the section, finds each module's scheme, and decompresses with the compressor of
    the scheme's format. Scales are handed over as float32, for the library answers in their dtype.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_name

    config, tensors = stored(folder)
    if "quantization_config" not in config:
        return config, tensors
    section = QuantizationConfig.model_validate(config["quantization_config"])
    weights, used = {}, set()
    for module in sorted({name.rpartition(".")[0] for name in tensors if name.endswith(".weight_scale")}):
        assert not any(match_name(module, pattern) for pattern in section.ignore), module
        schemes = [s for s in section.config_groups.values() if any(match_name(module, t) for t in s.targets)]
        assert len(schemes) == 1, f"{module} has {len(schemes)} schemes"
        scheme = schemes[0]
        parts = {n.removeprefix(f"{module}."): t for n, t in tensors.items() if n.startswith(f"{module}.")}
        parts.pop("bias", None)  # which is plain
        used |= {f"{module}.{part}" for part in parts}
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        expected = {*compressor.compression_param_names(scheme)}  # which forget one scale where `dynamic` is "local"
        assert {*parts} - {"input_global_scale"} == expected, module
        if scheme.format == "nvfp4-pack-quantized":  # whose decompressor answers in bfloat16 alone
            weights[f"{module}.weight"] = nvfp4_by_the_library(parts, scheme)
            continue
        if scheme.format.startswith("mxfp"):  # the same
            from low_bits import numbers  # which imports this file

            weights[f"{module}.weight"] = exact = numbers(parts)
            assert torch.equal(exact.bfloat16(), compressor.decompress(dict(parts), scheme)["weight"].bfloat16()), (
                module
            )
            continue
        weight = compressor.decompress(parts | {"weight_scale": parts["weight_scale"].float()}, scheme)["weight"]
        assert weight.dtype == torch.float32
        if scheme.weights.strategy == "block":  # two ways of the library to the same numbers
            again = fp8_by_the_library(parts["weight"], parts["weight_scale"], scheme.weights.block_structure)
            assert torch.equal(weight, again), module
        weights[f"{module}.weight"] = weight
    used |= {name for name in tensors if name.endswith(("k_scale", "v_scale"))}  # of a cache
    plain = {name: tensor for name, tensor in tensors.items() if name not in used}
    for name, tensor in plain.items():  # numbers, and a model's own int64
        assert tensor.dtype == torch.int64 or (tensor.is_floating_point() and tensor.element_size() > 1), name
        assert not name.endswith("weight_shape"), name
    return config, weights | plain


@dataclass
class Run:
    """A whole model's answers: for each text its log-probabilities; by layer and text states, and choices where it has
    experts.
    """

    logs: list[Tensor] = field(default_factory=list)
    choices: list[list[list[set[int]]]] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)


@torch.no_grad()
def run_whole(model: Any, texts: list[Tensor]) -> Run:
    result = Run()
    for layer in model.model.layers:
        choices: list[list[set[int]]] = []
        states: list[Tensor] = []
        result.choices.append(choices)
        result.states.append(states)
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(
                lambda _module, _inputs, output, kept=choices: kept.append([set(row) for row in output[2].tolist()])
            )
        layer.register_forward_hook(lambda _module, _inputs, output, kept=states: kept.append(output[0].double()))
    for text in texts:
        result.logs.append(torch.log_softmax(model(text[None]).logits[0].double(), dim=-1))
    return result


@dataclass(frozen=True)
class Figures:
    """What two whole models differ by: at every scored position (N,), and layer by layer."""

    kl: Tensor
    reverse: Tensor
    nll: tuple[Tensor, ...]
    same_top1: Tensor
    position: Tensor
    agreement: list[float]
    hidden_error: list[float]


def compared(source: Run, candidate: Run, texts: list[Tensor], numbers: Sequence[int] | None = None) -> Figures:
    """Over the texts with these numbers, in float64 and by the definitions."""
    numbers = range(len(texts)) if numbers is None else numbers
    pairs = [(source.logs[i][:-1], candidate.logs[i][:-1], texts[i][1:, None]) for i in numbers]
    agreement = []
    for ours, theirs in zip(source.choices, candidate.choices, strict=True):
        rows = [(a, b) for i in numbers for a, b in zip(ours[i], theirs[i], strict=True)]
        agreement.append(sum(len(a & b) for a, b in rows) / sum(len(a) for a, _ in rows))
    states = ([torch.cat([rows[i] for i in numbers]) for rows in run.states] for run in (source, candidate))
    return Figures(
        torch.cat([(p.exp() * (p - q)).sum(-1) for p, q, _ in pairs]),
        torch.cat([(q.exp() * (q - p)).sum(-1) for p, q, _ in pairs]),
        tuple(torch.cat([-pair[side].gather(1, pair[2])[:, 0] for pair in pairs]) for side in (0, 1)),
        torch.cat([p.argmax(-1) == q.argmax(-1) for p, q, _ in pairs]),
        torch.cat([torch.arange(1, len(p) + 1) for p, _, _ in pairs]),
        agreement,
        [float((b - a).norm() / a.norm()) for a, b in zip(*states, strict=True)],
    )


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    """`from_pretrained`, and the rotary factor that transformers 5.17 does not take from `rotary_dim`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
    )
    return model.eval().requires_grad_(False), info
