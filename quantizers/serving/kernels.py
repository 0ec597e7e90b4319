"""The kernels that servers choose for a module, on each kind of card, and the numbers that they multiply.

By bits, groups and names of packed integers; what is known of NVFP4 is NVFP4_KNOWN:

    vLLM           experts: Marlin and Triton take 4 bits and symmetric 8; Humming takes 2 to 8 in groups on NVIDIA GPUs
                   alone, since vLLM 0.29, but with zero points not all of 4 bits and none of 8
    SGLang         4 and 8 bits
    transformers   all; but compressed-tensors before 0.18 packs 3, 5, 6 and 7 bits otherwise than servers do
    KTransformers  its loader RAWINT4 takes symmetric 4 bits in groups of 32, under one family of names; it runs inside
                   SGLang, which has the other tensors. Larger groups give NaN on a CPU with AVX-512, not on others

By the card, how a matrix is stored, and whether it belongs to the routed experts, vLLM's kernel multiplies:

    scales       as stored; rounded to bfloat16 (Marlin); or raised to a power of two, in which case the FP8 codes are
                 rounded again (DeepGEMM, E8M0)
    weights      codes times scales as they are, if a kernel applies scales to the sums; or rounded to bfloat16
    activations  bfloat16, or rounded once more: to FP8 with a scale per token or per 128 channels (amax / 448), to
                 int8 with a scale per token (amax / 127), or to NVFP4 (E2M1, an E4M3 scale per 16 channels from their
                 amax, and the stored scale of the matrix)

From the sources of vLLM 0.26 to 0.33 (kernels/linear/__init__.py, each kernel's `is_supported` and `can_implement`,
`_supports_quant_scheme` and `_supports_current_device` in fused_moe/experts/, fused_moe/oracle/fp8.py and
int_wna16.py, compressed_tensors_moe_wna16.py, utils/deep_gemm.py and input_quant_fp8.py), humming-kernels 0.1.19
(schema/humming.py), SGLang 0.5.23 (compressed_tensors_wNa16.py), compressed-tensors 0.17 and 0.18
(pack_quantized/helpers.py) and kt-kernel 0.7.2 (CompressedSafeTensorLoader in utils/loader.py, NativeMoEWrapper in
utils/amx.py), whose AVX2 and AVX-512 kernels were run with groups of 32, 64 and 128. vLLM's kernels of the CPU were
run; those of GPUs were not. Those for NVFP4 were not read: their numbers are those of the format. Left out:
FlashInfer's kernel for fewer than 32 tokens on Hopper, the absorbed product of MLA when it decodes, expert
parallelism, and the sum of the widths of fused matrices, on which DeepGEMM decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeGuard

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import PROJECTIONS
from quantizers.formats.format import Format
from quantizers.formats.fp8 import BLOCKS, Fp8Blocks
from quantizers.planning.plan import Plan
from quantizers.recipe.cards import Card
from quantizers.system.errors import InputError

from . import engines
from .engines import EXPERTS, MTP_EXPERTS, REFUSED, SGLANG, TRANSFORMERS, VLLM, VLLM_BEFORE, Lookup, ServedScheme

MARLIN = "Marlin"
TRITON = "Triton"
HUMMING = "Humming"
MARLIN_GROUPS = (32, 64, 128)  # besides whole rows; vLLM's check_moe_marlin_supports_config
MARLIN_HIDDEN = 128  # the hidden size is a multiple of it, by the same function
HUMMING_SM = 75  # the least compute capability of an NVIDIA GPU
SGLANG_BITS = (4, 8)
SGLANG_TAKES = f"{' and '.join(map(str, SGLANG_BITS))} bits"
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
NONE_ON_CPU = "its CPU build has no kernel"
UNSCALED = "5.17 to 5.24 ignore the global scales of experts that they fuse, so that they load wrong numbers"
# Of experts in NVFP4, by engine.
NVFP4_KNOWN = {
    VLLM.name: "known of vLLM 0.33 on NVIDIA GPUs: FP4 products on SM100 and SM120, elsewhere weights alone (Marlin)",
    VLLM_BEFORE.name: "not known: such a version may refuse them",
    TRANSFORMERS: UNSCALED,
    SGLANG.name: "known of SGLang 0.5.23 on NVIDIA GPUs from SM80: FP4 products on SM100, elsewhere weights alone",
}
# Of modules in MXFP8, by engine; transformers reads them.
MXFP8_KNOWN = {
    VLLM.name: "by the sources of vLLM 0.32: on SM100 and SM120 activations are rounded to MXFP8 too, on other NVIDIA "
    f"GPUs from SM80 they are not (Marlin); {NONE_ON_CPU}",
    VLLM_BEFORE.name: "not known: such a version may refuse them",
    SGLANG.name: "not known: it may refuse them",
}
# Of modules in MXFP4; transformers reads them, too.
MXFP4_KNOWN = {
    VLLM.name: "by the sources of vLLM 0.32: on SM100 activations are rounded to MXFP4 too (CUTLASS), on other NVIDIA "
    f"GPUs they are not (Marlin); {NONE_ON_CPU}",
    VLLM_BEFORE.name: "not known: such a version may refuse them",
    SGLANG.name: "not known: it may refuse them",
}
# What is known of modules in other formats than integers and FP8, by the kind of the format and engine.
KNOWN: dict[str | None, dict[str, str]] = {"nvfp4": NVFP4_KNOWN, "nvfp4-a4": NVFP4_KNOWN}
KNOWN |= {"mxfp8": MXFP8_KNOWN, "mxfp4": MXFP4_KNOWN}
BLOCKS_FUSED = (
    "5.17 to 5.24 multiply experts that they fuse by the scales of blocks as if there were one for all, so that "
    "loading fails, unless each matrix is a single block"
)
# docs/how-to/serve-with-vllm.md has the table with file and line of all others.
NEGATIVE_SCALES = (
    "group scales may be negative; not verified for FlashInfer's TRT-LLM MXINT4 on SM100, for vLLM's Marlin with 8-bit "
    "activations and its kernels for RDNA3, XPU and zentorch, and for KTransformers on AMX: "
    "`experts.scales_sign: positive` makes an output without them"
)


# By bits, groups and names -----------------------------------------------------------------------------------------


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


def marlin_obstacles(scheme: ServedScheme, hidden: int) -> Iterator[str]:
    """Every reason why Marlin does not take experts with this group size and the model's hidden size."""
    if scheme.group_size not in MARLIN_GROUPS:
        yield f"Marlin supports groups of {', '.join(map(str, MARLIN_GROUPS))}, not {scheme.group_size}"
    if hidden % MARLIN_HIDDEN:
        yield f"hidden size {hidden} is not a multiple of {MARLIN_HIDDEN}, which Marlin needs"


def only_humming_takes(scheme: ServedScheme) -> bool:
    """Whether routed experts with this scheme are in packed integers for which Humming is vLLM's only kernel."""
    return is_packed(scheme) and moe_kernels(scheme) == (HUMMING,)


def refusal(engine: engines.Engine, lookup: Lookup) -> str | None:
    """Reason why a server has no kernel for a module in packed integers; None if it has one, or for other formats."""
    scheme = lookup.scheme
    if not is_packed(scheme):
        return None
    if engine.is_sglang:
        return None if scheme.bits in SGLANG_BITS else f"it has kernels for {SGLANG_TAKES} only"
    no_kernel = lookup.kind in (EXPERTS, MTP_EXPERTS) and not moe_kernels(scheme)
    return "it has no kernel for this scheme" if no_kernel else None


def condition(engine: str, lookup: Lookup) -> str | None:
    """Further requirement of the engine named `engine` for a scheme that it supports; None if there is none."""
    scheme = lookup.scheme
    if scheme is not None and scheme.kind in KNOWN:
        return KNOWN[scheme.kind].get(engine)
    if engine == TRANSFORMERS and lookup.kind == EXPERTS and scheme is not None and scheme.block is not None:
        return BLOCKS_FUSED
    if not is_packed(scheme) or engine == SGLANG.name:
        return None
    if engine == TRANSFORMERS:
        return PACKED_DENSELY if 32 % scheme.bits else None
    return HUMMING_ALONE if lookup.kind in (EXPERTS, MTP_EXPERTS) and only_humming_takes(scheme) else None


def for_ktransformers(facts: Architecture, schemes: Iterable[ServedScheme | None]) -> str:
    """Return TAKES_THEM if KTransformers accepts experts in RAM with each layer's scheme, else the reason."""
    names = {f"{prefix}layers.0.mlp.experts.0.{PROJECTIONS['gate']}" for prefix in KTRANSFORMERS_PREFIXES}
    if "gate" not in facts.expert_linears or facts.expert(0, 0, "gate") not in names:
        return "names do not fit"
    fits = (
        is_packed(scheme) and scheme.bits == 4 and scheme.symmetric and scheme.group_size == 32 for scheme in schemes
    )
    return TAKES_THEM if all(fits) else "only symmetric INT4 in groups of 32"


# By card -------------------------------------------------------------------------------------------------------------

Where = Literal["linear", "experts"]
# Tables of kernels are by the `kind` of the stored format.
Activations = Literal[
    "bfloat16", "FP8 per 128", "FP8 per 128, power of two", "FP8 per token", "int8 per token", "NVFP4"
]
WHERE: dict[Where, str] = {"linear": "linear layers", "experts": "experts"}
UNQUANTIZED = "unquantized"
NOT_KNOWN = "not known"
POWER = "power of two"
# In the environment: DeepGEMM takes scales as they are stored; CUTLASS does, in its place. On Blackwell DeepGEMM knows
# powers of two alone, and fails with the first of these (vLLM's pull request 37806).
NO_E8M0: Card = "hopper-no-e8m0"  # with the first of them; CUTLASS on Blackwell multiplies the same numbers
KEEPS_SCALES: dict[Card, str] = {"hopper": "VLLM_USE_DEEP_GEMM_E8M0=0", "blackwell": "VLLM_USE_DEEP_GEMM=0"}


@dataclass(frozen=True)
class Kernel:
    """One of vLLM's kernels, by the name in its documentation, and what it multiplies, see above.

    AMX stands for those of its CPU build that need a CPU with AMX.
    """

    name: str
    scales: Literal["as stored", "bfloat16", "power of two"] = "as stored"
    weights: Literal["as stored", "bfloat16"] = "as stored"
    activations: Activations = "bfloat16"

    def __str__(self) -> str:
        scales = "" if self.scales == "as stored" else f", weights' scales: {self.scales}"
        return f"{self.name}, activations: {self.activations}{scales}"


PLAIN = Kernel(UNQUANTIZED, weights="bfloat16")
MARLIN_ROUNDED = Kernel(MARLIN, "bfloat16", "bfloat16")
MARLIN_ROWS = Kernel(MARLIN, "bfloat16")  # a scale per row is applied to the sums
MARLIN_FP4 = Kernel(MARLIN)
MARLIN_MX = Kernel(MARLIN)  # powers of two, which round nothing
MX = ("mxfp8", "mxfp4")
DEEP_GEMM = Kernel("DeepGEMM", "power of two", activations="FP8 per 128, power of two")
DEEP_GEMM_STORED = Kernel("DeepGEMM", activations="FP8 per 128")  # without E8M0
CUTLASS_BLOCKS = Kernel("CUTLASS", activations="FP8 per 128")
CUTLASS_ROWS = Kernel("CUTLASS", activations="FP8 per token")
TRITON_BLOCKS = Kernel(TRITON, activations="FP8 per 128")
TRITON_ROWS = Kernel(TRITON, activations="FP8 per token")
TRT_LLM = Kernel("TRT-LLM", activations="FP8 per 128")
SCALED_MM = Kernel("torch._scaled_mm", activations="FP8 per token")
AMX = Kernel("AMX", weights="bfloat16")
AMX_INTEGERS = Kernel("AMX", activations="int8 per token")

LINEAR_KERNELS: dict[Card, dict[str, Kernel]] = {
    "ampere": {"blocks": MARLIN_ROUNDED, "rows": MARLIN_ROWS, "packed": MARLIN_ROUNDED},
    "ada": {"blocks": MARLIN_ROUNDED, "rows": CUTLASS_ROWS, "packed": MARLIN_ROUNDED},
    "hopper": {"blocks": DEEP_GEMM, "rows": CUTLASS_ROWS, "packed": MARLIN_ROUNDED},
    NO_E8M0: {"blocks": DEEP_GEMM_STORED, "rows": CUTLASS_ROWS, "packed": MARLIN_ROUNDED},
    "blackwell": {"blocks": DEEP_GEMM, "rows": CUTLASS_ROWS, "packed": MARLIN_ROUNDED},
    "vllm-cpu": {"blocks": AMX, "rows": SCALED_MM, "packed": AMX},
}
EXPERT_KERNELS: dict[Card, dict[str, Kernel]] = {
    "ampere": {"blocks": MARLIN_ROUNDED, "rows": MARLIN_ROWS, "packed": MARLIN_ROUNDED},
    "ada": {"blocks": TRITON_BLOCKS, "rows": TRITON_ROWS, "packed": MARLIN_ROUNDED},
    "hopper": {"blocks": TRITON_BLOCKS, "rows": CUTLASS_ROWS, "packed": MARLIN_ROUNDED},
    "blackwell": {"blocks": TRT_LLM, "rows": CUTLASS_ROWS, "packed": MARLIN_ROUNDED},
    "vllm-cpu": {"blocks": AMX, "rows": AMX, "packed": AMX_INTEGERS},
}
for _card in ("ampere", "ada", "hopper", "blackwell"):
    EXPERT_KERNELS[_card] |= {"nvfp4": MARLIN_FP4, "nvfp4-a4": MARLIN_FP4}
# vLLM 0.32's _POSSIBLE_MXFP8_KERNELS and _POSSIBLE_MXFP4_KERNELS, fused_moe/oracle/mxfp8.py and mxfp4.py. What those of
# SM100 and SM120 round activations to was not read, and a CPU has none, as its build said when it was asked for one.
_before_blackwell: tuple[Card, ...] = ("ampere", "ada", "hopper")
for _card in _before_blackwell:
    LINEAR_KERNELS[_card] |= {"mxfp8": MARLIN_MX, "mxfp4": MARLIN_MX}
    EXPERT_KERNELS[_card] |= {"mxfp8": MARLIN_MX, "mxfp4": MARLIN_MX}
LINEAR_KERNELS[NO_E8M0] |= {"mxfp8": MARLIN_MX, "mxfp4": MARLIN_MX}
EXPERT_KERNELS[NO_E8M0] = EXPERT_KERNELS["hopper"]
EXPERT_KERNELS["blackwell"]["nvfp4-a4"] = Kernel("native FP4", activations="NVFP4")
# SGLang 0.5.23's for linear modules. Its experts in packed integers are Marlin's on all of them.
SGLANG_LINEARS: dict[Card, dict[str, str]] = {
    "ampere": {"blocks": f"{REFUSED}: 'Unsupported weight strategy=block'", "rows": "Marlin"},
    "ada": {"blocks": "Triton", "rows": "CUTLASS"},
    "hopper": {"blocks": "DeepGEMM", "rows": "CUTLASS"},
    "blackwell": {"blocks": "DeepGEMM", "rows": "CUTLASS"},
}


def kernel(card: Card, where: Where, form: Format, shape: tuple[int, ...]) -> Kernel:
    """The kernel for a matrix (R, C) in this format; an InputError if nothing is known of it."""
    chosen = _kernel(card, where, form.kind, shape)
    if chosen is None:
        raise InputError(
            f"as served on {card}", f"{form.description} is not known for {WHERE[where]}", "leave this card out"
        )
    return chosen


def unknown_kernel(plan: Plan, card: Card) -> str | None:
    """The first format of source or output, in the decoder layers, of which no kernel is known; None if all are."""
    for action in plan.actions:
        if action.stored is None or action.layer is None or action.layer >= plan.layers:
            continue
        where: Where = "linear" if action.expert is None else "experts"
        for form in filter(None, (action.stored.form, action.written)):
            other_blocks = isinstance(form, Fp8Blocks) and form.edges != BLOCKS.edges
            if other_blocks or _kernel(card, where, form.kind, action.shape) is None:
                return f"{form} is not known for {WHERE[where]}"
    return None


def _kernel(card: Card, where: Where, kind: str, shape: tuple[int, ...]) -> Kernel | None:
    """The kernel for a matrix (R, C) of this kind of format; None if nothing is known of it."""
    if kind == "plain":
        return PLAIN
    listed = (LINEAR_KERNELS if where == "linear" else EXPERT_KERNELS)[card].get(kind)
    if listed is None:
        return None
    # vLLM's should_use_deepgemm_for_fp8_linear
    return CUTLASS_BLOCKS if listed.name == DEEP_GEMM.name and (shape[0] % 64 or shape[1] % 128) else listed


def on_card(engine: engines.Engine, card: Card, lookup: Lookup, facts: Architecture) -> str:
    """The kernel that a server chooses on a card for a module of an output, or why it refuses the module."""
    scheme, routed = lookup.scheme, lookup.kind in (EXPERTS, MTP_EXPERTS)
    if problem := refusal(engine, lookup) or lookup.refused:
        return f"{REFUSED}: {problem}"
    if scheme is None:
        return UNQUANTIZED
    where: Where = "experts" if routed else "linear"

    def named(kind: str) -> str:
        chosen = _kernel(card, where, kind, lookup.members[0].shape)
        return chosen.name if chosen else NOT_KNOWN

    if scheme.kind in MX and card == "vllm-cpu" and not engine.is_sglang:
        return f"{REFUSED}: {NONE_ON_CPU}"
    if scheme.kind in (*KNOWN, *MX):
        return NOT_KNOWN if engine.is_sglang and scheme.kind in MX else named(str(scheme.kind))
    if not is_packed(scheme):
        kind = "blocks" if scheme.strategy == "block" else "rows"
        if engine.is_sglang:
            return "Triton" if routed else SGLANG_LINEARS[card][kind]
        if routed and card == "vllm-cpu" and kind == "rows":
            return f"{REFUSED}: no kernel for experts in FP8 rows"
        return named(kind)
    if engine.is_sglang:
        return MARLIN
    if not routed:
        return named("packed")
    if card == "vllm-cpu":  # CPUExpertsInt4
        if scheme.bits != 4 or not scheme.symmetric or scheme.group_size == 32:
            return f"{REFUSED}: its kernel takes symmetric INT4 in groups of 64 or 128"
        return f"{REFUSED}: its kernel takes softmax routing" if facts.router.scoring == "sigmoid" else "AMX"
    kernels = moe_kernels(scheme)
    if card == "blackwell" and (scheme.bits, scheme.group_size, scheme.symmetric) == (4, 32, True):
        return "TRT-LLM or Marlin"  # the former on SM100 alone, and not for every routing
    return named("packed") if kernels[0] == MARLIN else kernels[0]
