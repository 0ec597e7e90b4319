"""What an installed vLLM says of experts in packed integers; run in its own environment.

CompressedTensorsWNA16MoEMethod is built with one kernel to choose from; it makes the key that kernels are asked for.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

LAYERS = "vllm.model_executor.layers"
METHOD = f"{LAYERS}.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16"
HUMMING = f"{LAYERS}.fused_moe.experts.fused_humming_moe"
Scheme = tuple[int, int | None, bool]  # bits, group size or None for whole rows, symmetric


def answers(schemes: list[Scheme], splits: list[tuple[int, int, int, int]], capabilities: list[int]) -> dict[str, Any]:
    """The names of the kernels that take each scheme; whether experts of (bits, group, hidden, width per rank) can be
    made; and the platforms and compute capabilities that Humming takes.
    """
    return {
        "kernels": [[name for name in ("MARLIN", "TRITON", "HUMMING") if _method(name, *one)] for one in schemes],
        "splits": [_can_be_made(*one) for one in splits],
        "devices": [
            [platform, capability]
            for platform in ("cuda", "rocm", "xpu", "cpu")
            for capability in capabilities
            if _runs_on(platform, capability)
        ],
    }


def _method(kernel: str, bits: int, group: int | None, symmetric: bool, hidden: int = 256, width: int = 256) -> Any:
    """The method with this kernel, None if the kernel or the method refuses the scheme."""
    from compressed_tensors.quantization import QuantizationArgs

    module, oracle = import_module(METHOD), import_module(f"{LAYERS}.fused_moe.oracle.int_wna16")
    backend = oracle.WNA16MoEBackend[kernel]
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=bits, symmetric=symmetric, **strategy)

    def select(config: Any, weight_key: Any, quant_config: Any, **asked: bool) -> Any:
        experts = oracle.backend_to_kernel_cls(backend)[0]
        problem = oracle._backend_incompatibility_reason(backend, config, quant_config, **asked)
        if problem or not experts._supports_quant_scheme(weight_key, None):
            raise NotImplementedError  # as vLLM's own selection, where no kernel is left
        return backend, experts

    config = SimpleNamespace(
        hidden_dim=hidden, intermediate_size_per_partition_unpadded=width, has_bias=False, is_act_and_mul=True
    )
    try:
        with patch.object(module, "select_wna16_moe_backend", select):
            return module.CompressedTensorsWNA16MoEMethod(weights, None, config)
    except (NotImplementedError, AssertionError):  # the kernel's answer, or the method's asserts on groups: refused
        return None


def _can_be_made(bits: int, group: int, hidden: int, width: int) -> bool:
    """Whether parameters can be made, and the rows of w2 fill their words."""
    torch = import_module("torch")
    layer, method = torch.nn.Module(), _method("HUMMING", bits, group, True, hidden, width)
    try:
        method.create_weights(layer, 1, hidden, width, torch.bfloat16)
    except ValueError:
        return False
    return bool(layer.w2_weight_packed.shape[-1] * 32 == width * bits)


def _runs_on(platform: str, capability: int) -> bool:
    module = import_module(HUMMING)
    stand_in = SimpleNamespace(
        is_cuda=lambda: platform == "cuda",
        has_device_capability=lambda asked: divmod(capability, 10) >= asked,
    )
    with patch.object(module, "current_platform", stand_in), patch.object(module, "has_humming", lambda: True):
        return bool(module.HummingIndexedExperts._supports_current_device())
