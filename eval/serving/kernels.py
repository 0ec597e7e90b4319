"""Which engine has kernels for packed integers, by their bits, groups and names; and what is known of NVFP4.

    vLLM           experts: Marlin and Triton take 4 bits and symmetric 8; Humming takes 2 to 8 in groups on NVIDIA GPUs
                   alone, since vLLM 0.29, but with zero points not all of 4 bits and none of 8
    SGLang         4 and 8 bits
    transformers   all; but compressed-tensors before 0.18 packs 3, 5, 6 and 7 bits otherwise than servers do
    KTransformers  its loader RAWINT4 takes symmetric 4 bits in groups of 32, under one family of names; it runs inside
                   SGLang, which has the other tensors. Larger groups give NaN on a CPU with AVX-512, not on others

From the sources of vLLM 0.26 to 0.33 (`_supports_quant_scheme` and `_supports_current_device` of each kernel in
fused_moe/experts/, and compressed_tensors_moe_wna16.py), humming-kernels 0.1.19 (schema/humming.py), SGLang 0.5.23
(compressed_tensors_wNa16.py), compressed-tensors 0.17 and 0.18 (pack_quantized/helpers.py) and kt-kernel 0.7.2
(CompressedSafeTensorLoader in utils/loader.py, NativeMoEWrapper in utils/amx.py), whose AVX2 and AVX-512 kernels were
run with groups of 32, 64 and 128.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import MATRICES, PROJECTIONS

from .engines import EXPERTS, MTP_EXPERTS, SGLANG, TRANSFORMERS, VLLM, VLLM_BEFORE, Engine, Lookup, ServedScheme

MARLIN, TRITON, HUMMING = "Marlin", "Triton", "Humming"
MARLIN_GROUPS = (32, 64, 128)  # besides whole rows; vLLM's check_moe_marlin_supports_config
HUMMING_SM = 75  # the least compute capability of an NVIDIA GPU
SGLANG_BITS = (4, 8)
HUMMING_ALONE = (
    f"from 0.29 on {HUMMING} takes these bits, on an NVIDIA GPU from SM{HUMMING_SM}, in bfloat16 from SM80; older ones "
    "have no kernel for them, nor have ROCm, XPU and CPU"
)
PACKED_DENSELY = (
    "needs compressed-tensors 0.18 or newer (pip install -U compressed-tensors): 0.17, which vLLM 0.33 installs, "
    "reads matrices of other shapes without an error"
)
KTRANSFORMERS_PREFIXES = ("model.", "language_model.model.", "model.language_model.")
TAKES_THEM = "takes them"
UNSCALED = "5.17 ignores the global scales of experts that it fuses, so that it loads wrong numbers"
# Of experts in NVFP4, by engine.
NVFP4_KNOWN = {
    VLLM.name: "known of vLLM 0.33 on NVIDIA GPUs: FP4 products on SM100 and SM120, elsewhere weights alone (Marlin)",
    VLLM_BEFORE.name: "not known: such a version may refuse them",
    TRANSFORMERS: UNSCALED,
    SGLANG.name: "known of SGLang 0.5.23 on NVIDIA GPUs from SM80: FP4 products on SM100, elsewhere weights alone",
}
# docs/how-to/serve-with-vllm.md has the table with file and line of all others.
NEGATIVE_SCALES = (
    "group scales may be negative; not verified for FlashInfer's TRT-LLM MXINT4 on SM100, for vLLM's Marlin with 8-bit "
    "activations and its kernels for RDNA3, XPU and zentorch, and for KTransformers on AMX: "
    "`experts.scales_sign: positive` makes an output without them"
)


def is_packed(scheme: ServedScheme | None) -> TypeGuard[ServedScheme]:
    """Whether a scheme is of integers without quantized activations, which servers call WNA16; None is no scheme."""
    return scheme is not None and scheme.type == "int" and not scheme.activations


def moe_kernels(scheme: ServedScheme) -> tuple[str, ...]:
    """The kernels of vLLM that compute with routed experts in packed integers of 2 to 8 bits; none for some."""
    common = scheme.bits == 4 or (scheme.bits == 8 and scheme.symmetric)
    by_group = scheme.strategy == "group"  # CompressedTensorsWNA16MoEMethod asserts it for all but Marlin
    takes = {
        MARLIN: common and (not by_group or scheme.group_size in MARLIN_GROUPS),
        TRITON: common and by_group,
        HUMMING: by_group
        and (scheme.symmetric or scheme.bits not in (4, 8) or (scheme.bits, scheme.group_size) == (4, 32)),
    }
    return tuple(name for name, does in takes.items() if does)


def refusal(engine: Engine, lookup: Lookup) -> str | None:
    """Why a server has no kernel for the packed integers of a module; None if it has one, or they are none."""
    scheme = lookup.scheme
    if not is_packed(scheme):
        return None
    if engine.is_sglang:
        return None if scheme.bits in SGLANG_BITS else "it has kernels for 4 and 8 bits only"
    no_kernel = lookup.kind in (EXPERTS, MTP_EXPERTS) and not moe_kernels(scheme)
    return "it has no kernel for this scheme" if no_kernel else None


def condition(engine: str, lookup: Lookup) -> str | None:
    """What an engine called `engine` needs for a scheme besides being there; None if nothing."""
    scheme = lookup.scheme
    if scheme is not None and scheme.is_nvfp4:
        return NVFP4_KNOWN.get(engine)
    if not is_packed(scheme) or engine == SGLANG.name:
        return None
    if engine == TRANSFORMERS:
        return PACKED_DENSELY if 32 % scheme.bits else None
    return HUMMING_ALONE if lookup.kind in (EXPERTS, MTP_EXPERTS) and moe_kernels(scheme) == (HUMMING,) else None


def for_ktransformers(facts: Architecture, schemes: Iterable[ServedScheme | None]) -> str:
    """What KTransformers makes of the experts in RAM: TAKES_THEM, or the reason why it does not.

    Args:
        schemes: of each layer's experts.
    """
    names = {f"{prefix}layers.0.mlp.experts.0.{PROJECTIONS[MATRICES[0]]}" for prefix in KTRANSFORMERS_PREFIXES}
    if facts.expert(0, 0, MATRICES[0]) not in names:
        return "names do not fit"
    fits = (
        is_packed(scheme) and scheme.bits == 4 and scheme.symmetric and scheme.group_size == 32 for scheme in schemes
    )
    return TAKES_THEM if all(fits) else "only symmetric INT4 in groups of 32"
