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
            if arguments.tool_call_parser:
                ToolParserManager.get_tool_parser(arguments.tool_call_parser)
            if arguments.reasoning_parser:
                ReasoningParserManager.get_reasoning_parser(arguments.reasoning_parser)
        except (Exception, SystemExit) as failure:  # whatever it raises, it would not serve
            problems.append(f"{command}: {type(failure).__name__}: {failure}")
    return problems


def furthest() -> dict[str, float]:
    """The largest differences of what is simulated here from vLLM's own functions, relative to the largest number."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    from eval.fidelity.as_served import blocks_to_powers_of_two, rounded_activations

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
