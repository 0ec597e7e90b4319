"""Experts in host memory: the ways to serve an output whose experts do not fit on the GPUs, by arithmetic.

From the sources of SGLang 0.5.23 (paged experts: store.py, method.py), vLLM 0.33 (offloader/uva.py; `--cpu-offload-gb`
counts GiB on each GPU, base.py) and KTransformers 0.7.2, whose CPU options have no defaults; none was tried here:

    SGLang, paged experts   all experts in pinned host memory, however many of them are on the GPU too; one GPU
    vLLM, UVA offloading    of each GPU's experts a part in pinned host memory, read through PCIe where it lies
    KTransformers           all experts in host memory, where the CPU computes them, and some on the GPU too
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from quantizers.planning.gpus import GIB, Gpus

from .kernels import SGLANG_BITS, SGLANG_TAKES
from .memory import EXPERTS, FLASHINFER, FP8_CACHE_SM, Fit, Model, needs_flashinfer

SYSTEM = 6 * 10**9  # bytes of host memory for everything else
GB = 10**9


@dataclass(frozen=True)
class HostWay:
    """A way to serve an output with experts in host memory."""

    name: str
    ram: int  # bytes of host memory that it needs for experts
    on_gpu: float  # the share of the experts that lies on the GPUs
    problem: str  # why it is not possible here; empty if it is
    needs: str  # which GPUs it needs, where it is not known whether these are such
    command: str  # what to type, with OUT for the output's folder and CORES for the CPU's; empty with a problem


def host_ways(
    model: Model, gpus: Gpus, fit: Fit, ram: int, ktransformers: str | None, options: Mapping[str, str] | None = None
) -> list[HostWay]:
    """The three ways on some GPUs, at the context and with the KV cache of the estimate `fit`; none where that fits.

    Args:
        ram: bytes of host memory that the machine has.
        ktransformers: why KTransformers does not take the experts; None if it does.
        options: of `vllm` and `sglang`, what the model's family wants besides, such as parsers.
    """
    if fit.fits:
        return []
    experts = sum(layer.get(EXPERTS, 0) for layer in model.layers)
    per_gpu = experts / fit.tensor_parallel / fit.pipeline_parallel
    # What the fullest GPU has left for experts, and how many of each layer that is.
    free = max(0, fit.left + math.ceil(per_gpu))
    resident = min(model.facts.num_experts, int(free / per_gpu * model.facts.num_experts))
    least = model.facts.top_k

    def way(name: str, needed: int, on_gpu: float, problem: str, command: str, needs: str = "") -> HostWay:
        if not problem and needed + SYSTEM > ram:
            problem = f"needs {math.ceil((needed + SYSTEM) / GB)} GB, {SYSTEM // GB} of it for the rest"
        return HostWay(name, needed, on_gpu, problem, *(("", "") if problem else (needs, command)))

    before_ada = gpus.sm is not None and gpus.sm < FP8_CACHE_SM
    blocks = "SGLang refuses FP8 in blocks before Ada: attention: bf16" if model.blocks and before_ada else ""
    from_ada = "from Ada on" if model.blocks and gpus.sm is None else ""
    one_gpu = "" if gpus.count == 1 else "it takes one GPU"
    few_bits = "" if model.bits <= set(SGLANG_BITS) else f"it takes {SGLANG_TAKES}"
    no_room = "" if resident >= least else f"no room on the GPU for {least} experts"
    parallel = "".join(
        f" --{name}-parallel-size {count}"
        for name, count in (("tensor", fit.tensor_parallel), ("pipeline", fit.pipeline_parallel))
        if count > 1
    )
    fp8 = fit.kv == "fp8"
    wanted = {name: f" {option}" for name, option in (options or {}).items() if option}
    cache = " --kv-cache-dtype fp8_e4m3" if fp8 else ""
    sglang = f"python -m sglang.launch_server --model-path OUT{parallel}{wanted.get('sglang', '')}{cache}"
    tokens = f"--context-length {fit.context}"
    attention = f" {FLASHINFER}" if needs_flashinfer(gpus, fit.kv) else ""
    cache = f" --kv-cache-dtype fp8{attention}" if fp8 else ""
    vllm = (
        f"vllm serve OUT{parallel}{wanted.get('vllm', '')}{cache} --max-model-len {fit.context} "
        f"--gpu-memory-utilization {fit.utilisation}"
    )
    offloaded = math.ceil((per_gpu - free) / GIB)
    share = resident / model.facts.num_experts
    no_others = "" if fit.left + per_gpu > 0 else "what must be on the GPU does not fit"
    return [
        way(
            "SGLang, paged experts", experts, share, one_gpu or few_bits or blocks or no_room,
            f"{sglang} --enable-paged-experts --paged-experts-num-resident {resident} {tokens}", from_ada,
        ),
        way(
            "vLLM, UVA offloading", offloaded * GIB * gpus.count, max(0, 1 - offloaded * GIB / per_gpu), no_others,
            f"{vllm} --offload-backend uva --cpu-offload-gb {offloaded} --cpu-offload-params experts",
        ),
        way(
            "KTransformers", experts, share, ktransformers or blocks or no_others,
            f"{sglang} --kt-weight-path OUT --kt-method RAWINT4 --kt-cpuinfer CORES --kt-threadpool-count 1 "
            f"--kt-num-gpu-experts {resident} {tokens}", from_ada,
        ),
    ]  # fmt: skip
