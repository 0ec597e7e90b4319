"""Log-probabilities that a real vLLM computes from finished checkpoints; runs in an environment of its own.

    PYTHONPATH=.:tests VLLM_ENABLE_V1_MULTIPROCESSING=0 /path/to/that/python tests/vllm_forward.py REQUEST RESULT

REQUEST is a JSON file: a list of objects with `folder`, `texts` (lists of token ids) and `kernels` (whether vLLM's own
kernels compute, in bfloat16, or plain numbers, in float32). RESULT is a .npz file with log-probabilities (T - 1, V)
float32, by "number of the object/number of the text"; and `seconds`, and what went wrong, by the object's number.

Everything is vLLM's: config, choice of schemes, loading, model, attention and cache, router, experts, logits, in its
engine in this process. Without `kernels`, integers and FP8 become numbers once they are loaded, so that no kernel is
needed that a CPU may lack, and float32 shows what bfloat16 would hide.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel as BlockKernel
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel as RowKernel
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8, CPUExpertsInt4
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.fused_moe.router import cpu_router
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as integers,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kInt4Static, kInt4Static32
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models import registry

# What vLLM's CPU build gets wrong or refuses, whatever the numbers are ----------------------------------------------


def route(real: Any, self: Any, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """One group of all experts where its router has none: the same choice with the same weights.

    Without groups it asserts softmax (MiniMax-M2 has sigmoids) and drops the correction that chooses (ERNIE-4.5).
    """
    plain = self.scoring_func == "softmax" and self.e_score_correction_bias is None
    if self.use_grouped_topk or self.custom_routing_function is not None or plain:
        return real(self, *arguments, **named)
    with patch.multiple(self, use_grouped_topk=True, num_expert_group=1, topk_group=1):
        return real(self, *arguments, **named)


@contextlib.contextmanager
def mended() -> Iterator[None]:
    """The router; and the rotary kernel, which turns the wrong heads of a query of three dimensions (MLA as here)."""
    real = cpu_router.CPURouter._compute_routing
    routed = patch.object(cpu_router.CPURouter, "_compute_routing", lambda *a, **k: route(real, *a, **k))
    turned = patch.object(RotaryEmbedding, "forward_cpu", lambda self, *a, **k: self.forward_native(*a, **k))
    with routed, turned, patch.object(registry, "_run_in_subprocess", lambda call: call()):
        yield


# Plain numbers ------------------------------------------------------------------------------------------------------


def dequantized(packed: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Packed integers (E, R, W) and their scales (E, R, n) as float32 (E, R, C)."""
    experts, rows, _ = packed.shape
    columns = packed.shape[2] * 32 // bits
    codes = unpack_from_int32(packed.flatten(0, 1), bits, torch.Size((experts * rows, columns)))
    grouped = codes.view(experts, rows, scale.shape[-1], -1).float() * scale.float().unsqueeze(-1)
    return grouped.view(experts, rows, columns)


def plain_experts(self: Any, layer: Any) -> None:
    """In place of vLLM's conversion for a kernel: its own unquantized experts, of the numbers that were loaded."""
    for name in ("w13", "w2"):
        packed, scale = (getattr(layer, f"{name}_weight_{part}").data for part in ("packed", "scale"))
        weight = torch.nn.Parameter(dequantized(packed, scale, self.num_bits), requires_grad=False)
        layer.register_parameter(f"{name}_weight", weight)
    method = UnquantizedFusedMoEMethod(self.moe)
    layer._replace_quant_method(method)
    method.process_weights_after_loading(layer)


def plain_blocks(_: Any, layer: Any) -> None:
    rows, columns = layer.weight.shape
    spread = layer.weight_scale.data.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    layer.plain = layer.weight.data.float() * spread


def plain_rows(_: Any, layer: Any) -> None:
    layer.plain = layer.weight.data.t().float() * layer.weight_scale.data.float().view(-1, 1)


def product(_: Any, layer: Any, x: Tensor, bias: Tensor | None = None, **__: Any) -> Tensor:
    return torch.nn.functional.linear(x.float(), layer.plain, bias).to(x.dtype)


@contextlib.contextmanager
def plain_numbers() -> Iterator[None]:
    """Integers and FP8 become float32 after loading."""
    method, yes = integers.CompressedTensorsWNA16MoEMethod, lambda *_: (True, None)
    dtypes = [torch.float16, torch.bfloat16, torch.float32]
    with contextlib.ExitStack() as stack:
        for where, name, new in (
            (integers, "select_wna16_moe_backend", lambda **_: (WNA16MoEBackend.EMULATION, None)),
            (method, "process_weights_after_loading", plain_experts),
            (compressed_tensors.CompressedTensorsConfig, "get_supported_act_dtypes", lambda *_: dtypes),
            (BlockKernel, "is_supported", yes),
            (BlockKernel, "can_implement", yes),
            (BlockKernel, "process_weights_after_loading", plain_blocks),
            (BlockKernel, "apply_weights", product),
            (RowKernel, "process_weights_after_loading", plain_rows),
            (RowKernel, "apply_weights", product),
        ):
            stack.enter_context(patch.object(where, name, new))
        yield


FOR_GOOD = contextlib.ExitStack()


def serve_plain_numbers() -> None:
    """For a server, whose processes call it as an entry point of the group vllm.general_plugins."""
    FOR_GOOD.enter_context(mended())
    FOR_GOOD.enter_context(plain_numbers())


# The real kernels ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def real_kernels() -> Iterator[None]:
    """vLLM's kernels for FP8 blocks and INT4, also where their lists are shorter than what they compute.

    They ask for AMX, and compute without it where the CPU has AVX-512 with bfloat16. Those for experts get what a
    router chose, but list softmax routing alone; that for INT4 lists groups of 64 and 128, but not 32.
    """
    schemes = [(kInt4Static, None), (kInt4Static32, None)]
    with (
        patch.object(BlockKernel, "is_supported", lambda *_: (True, None)),
        patch.object(CPUExpertsInt4, "_supports_current_device", lambda: True),
        patch.object(CPUExpertsInt4, "_supports_routing_method", lambda *_: True),
        patch.object(CPUExpertsFp8, "_supports_current_device", lambda: True),
        patch.object(CPUExpertsFp8, "_supports_routing_method", lambda *_: True),
        patch.object(CPUExpertsInt4, "_supports_quant_scheme", lambda *both: both in schemes),
    ):
        yield


# Texts ---------------------------------------------------------------------------------------------------------------


def log_probabilities(folder: Path, texts: list[list[int]], kernels: bool) -> list[np.ndarray]:
    """Of each text (T - 1, V) float32, from the logits that vLLM's model computes for it as a prompt."""
    longest = max(map(len, texts)) + 8
    collected = patch.object(gc, "collect")  # which takes most of the time, and is called again and again
    with mended(), real_kernels() if kernels else plain_numbers(), collected:
        llm = LLM(
            model=str(folder),
            dtype="bfloat16" if kernels else "float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=longest,
            max_num_seqs=1,
            max_num_batched_tokens=longest,
            kv_cache_memory_bytes=2**27,
            limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
        )
        seen: list[Tensor] = []

        def record(model: Any) -> None:
            real = model.compute_logits

            def compute_logits(*arguments: Any, **named: Any) -> Any:
                logits = real(*arguments, **named)
                seen.append(logits.float().clone())
                return logits

            model.compute_logits = compute_logits

        llm.apply_model(record)
        vocabulary = llm.model_config.get_vocab_size()
        asked = SamplingParams(max_tokens=1, temperature=0, detokenize=False, prompt_logprobs=0)
        found = []
        for tokens in texts:
            seen.clear()
            llm.generate([{"prompt_token_ids": tokens}], asked, use_tqdm=False)
            (logits,) = (one for one in seen if len(one) == len(tokens) - 1)
            found.append(torch.log_softmax(logits[:, :vocabulary], -1).numpy())
        del llm
        cleanup_dist_env_and_memory()
    gc.collect()
    return found


def main() -> None:
    result: dict[str, Any] = {}
    for number, asked in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        began = time.monotonic()
        try:
            for text, logs in enumerate(log_probabilities(Path(asked["folder"]), asked["texts"], asked["kernels"])):
                result[f"{number}/{text}"] = logs
        except Exception as failure:  # what vLLM raises has no common base class
            traceback.print_exc()
            result[f"{number}/problem"] = " ".join(f"{type(failure).__name__}: {failure}".split())
        result[f"{number}/seconds"] = time.monotonic() - began
    np.savez(sys.argv[2], **result)


if __name__ == "__main__":
    main()
