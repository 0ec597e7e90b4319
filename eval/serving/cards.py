"""The kernels that vLLM chooses on each kind of card, and the numbers that they multiply.

A matrix is stored in FP8 blocks, in FP8 rows, packed integers, NVFP4 or plain numbers. By that, by the card, and by
whether the matrix belongs to the routed experts, vLLM chooses a kernel, and the kernel decides what is multiplied:

    scales       as stored; rounded to bfloat16 (Marlin); or raised to a power of two, in which case the FP8 codes are
                 rounded again (DeepGEMM, E8M0)
    weights      codes times scales as they are, if a kernel applies scales to the sums; or rounded to bfloat16
    activations  bfloat16, or rounded once more: to FP8 with a scale per token or per 128 channels (amax / 448), to
                 int8 with a scale per token (amax / 127), or to NVFP4 (E2M1, an E4M3 scale per 16 channels from their
                 amax, and the stored scale of the matrix)

From the sources of vLLM 0.32 and 0.33: the lists of kernels in kernels/linear/__init__.py, each kernel's `is_supported`
and `can_implement`, fused_moe/oracle/fp8.py and int_wna16.py, utils/deep_gemm.py and input_quant_fp8.py. The kernels of
the CPU were run; those of GPUs were not. Those for NVFP4 were not read: their numbers are those of the format. Left
out: FlashInfer's kernel for fewer than 32 tokens on Hopper, the absorbed product of MLA when it decodes, expert
parallelism, and the sum of the widths of fused matrices, on which DeepGEMM decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from quantizers.architectures.architecture import Architecture
from quantizers.recipe.schema import Card
from quantizers.system.errors import InputError

from .engines import EXPERTS, MTP_EXPERTS, REFUSED, Engine, Lookup, ServedScheme
from .kernels import MARLIN, is_packed, moe_kernels, refusal

Where = Literal["linear", "experts"]
Kind = Literal["blocks", "rows", "packed", "nvfp4", "nvfp4-a4", "plain"]
Activations = Literal[
    "bfloat16", "FP8 per 128", "FP8 per 128, power of two", "FP8 per token", "int8 per token", "NVFP4"
]
KINDS: dict[Kind, str] = {
    "blocks": "FP8 in blocks", "rows": "FP8 per row", "packed": "packed integers", "plain": "BF16",
    "nvfp4": "NVFP4 W4A16", "nvfp4-a4": "NVFP4 W4A4",
}  # fmt: skip
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
    """One of vLLM's kernels.

    Attributes:
        name: as vLLM's documentation calls it; AMX stands for those of its CPU build that need a CPU with AMX.
        file: the source file, below vllm/model_executor.
        scales, weights, activations: what it multiplies, see above.
    """

    name: str
    file: str
    scales: Literal["as stored", "bfloat16", "power of two"] = "as stored"
    weights: Literal["as stored", "bfloat16"] = "as stored"
    activations: Activations = "bfloat16"

    def __str__(self) -> str:
        scales = "" if self.scales == "as stored" else f", weights' scales: {self.scales}"
        return f"{self.name}, activations: {self.activations}{scales}"


LINEAR, MOE = "kernels/linear/scaled_mm", "layers/fused_moe/experts"
PLAIN = Kernel(UNQUANTIZED, "layers/linear.py", weights="bfloat16")
MARLIN_BLOCKS = Kernel("Marlin", f"{LINEAR}/marlin.py", "bfloat16", "bfloat16")
MARLIN_ROWS = replace(MARLIN_BLOCKS, weights="as stored")  # a scale per row is applied to the sums
MARLIN_INTEGERS = Kernel("Marlin", "kernels/linear/mixed_precision/marlin.py", "bfloat16", "bfloat16")
DEEP_GEMM = Kernel("DeepGEMM", f"{LINEAR}/deep_gemm.py", "power of two", activations="FP8 per 128, power of two")
DEEP_GEMM_STORED = Kernel("DeepGEMM", f"{LINEAR}/deep_gemm.py", activations="FP8 per 128")  # without E8M0
CUTLASS_BLOCKS = Kernel("CUTLASS", f"{LINEAR}/cutlass.py", activations="FP8 per 128")
CUTLASS_ROWS = Kernel("CUTLASS", f"{LINEAR}/cutlass.py", activations="FP8 per token")
MARLIN_EXPERTS = Kernel("Marlin", f"{MOE}/marlin_moe.py", "bfloat16", "bfloat16")
TRITON_EXPERTS = Kernel("Triton", f"{MOE}/triton_moe.py", activations="FP8 per 128")
PLAIN_EXPERTS = Kernel(UNQUANTIZED, "layers/fused_moe/oracle/unquantized.py", weights="bfloat16")
CUTLASS_EXPERTS = Kernel("CUTLASS", f"{MOE}/triton_cutlass_moe.py", activations="FP8 per token")

LINEAR_KERNELS: dict[Card, dict[Kind, Kernel]] = {
    "ampere": {"blocks": MARLIN_BLOCKS, "rows": MARLIN_ROWS, "packed": MARLIN_INTEGERS},
    "ada": {"blocks": MARLIN_BLOCKS, "rows": CUTLASS_ROWS, "packed": MARLIN_INTEGERS},
    "hopper": {"blocks": DEEP_GEMM, "rows": CUTLASS_ROWS, "packed": MARLIN_INTEGERS},
    NO_E8M0: {"blocks": DEEP_GEMM_STORED, "rows": CUTLASS_ROWS, "packed": MARLIN_INTEGERS},
    "blackwell": {"blocks": DEEP_GEMM, "rows": CUTLASS_ROWS, "packed": MARLIN_INTEGERS},
    "vllm-cpu": {
        "blocks": Kernel("AMX", f"{LINEAR}/cpu.py", weights="bfloat16"),
        "rows": Kernel("torch._scaled_mm", f"{LINEAR}/pytorch.py", activations="FP8 per token"),
        "packed": Kernel("AMX", "kernels/linear/mixed_precision/cpu.py", weights="bfloat16"),
    },
}
EXPERT_KERNELS: dict[Card, dict[Kind, Kernel]] = {
    "ampere": {
        "blocks": MARLIN_EXPERTS,
        "rows": replace(MARLIN_EXPERTS, weights="as stored"),
        "packed": MARLIN_EXPERTS,
    },
    "ada": {
        "blocks": TRITON_EXPERTS,
        "rows": replace(TRITON_EXPERTS, activations="FP8 per token"),
        "packed": MARLIN_EXPERTS,
    },
    "hopper": {"blocks": TRITON_EXPERTS, "rows": CUTLASS_EXPERTS, "packed": MARLIN_EXPERTS},
    "blackwell": {
        "blocks": Kernel("TRT-LLM", f"{MOE}/trtllm_fp8_moe.py", activations="FP8 per 128"),
        "rows": CUTLASS_EXPERTS,
        "packed": MARLIN_EXPERTS,
    },
    "vllm-cpu": {
        "blocks": Kernel("AMX", f"{MOE}/cpu_moe.py", weights="bfloat16"),
        "rows": Kernel("AMX", f"{MOE}/cpu_moe.py", weights="bfloat16"),
        "packed": Kernel("AMX", f"{MOE}/cpu_moe.py", activations="int8 per token"),
    },
}
MARLIN_FP4 = Kernel("Marlin", f"{MOE}/marlin_moe.py")
for _card in ("ampere", "ada", "hopper", "blackwell"):
    EXPERT_KERNELS[_card] |= {"nvfp4": MARLIN_FP4, "nvfp4-a4": MARLIN_FP4}
EXPERT_KERNELS[NO_E8M0] = EXPERT_KERNELS["hopper"]
EXPERT_KERNELS["blackwell"]["nvfp4-a4"] = Kernel("native FP4", f"{MOE}", activations="NVFP4")
# SGLang 0.5.23's for linear modules. Its experts in packed integers are Marlin's on all of them.
SGLANG_LINEARS: dict[Card, dict[Kind, str]] = {
    "ampere": {"blocks": f"{REFUSED}: 'Unsupported weight strategy=block'", "rows": "Marlin"},
    "ada": {"blocks": "Triton", "rows": "CUTLASS"},
    "hopper": {"blocks": "DeepGEMM", "rows": "CUTLASS"},
    "blackwell": {"blocks": "DeepGEMM", "rows": "CUTLASS"},
}


def kernel(card: Card, where: Where, kind: Kind, shape: tuple[int, ...]) -> Kernel:
    """The kernel for a matrix (R, C) that is stored so."""
    if kind == "plain":
        return PLAIN if where == "linear" else PLAIN_EXPERTS
    found = (LINEAR_KERNELS if where == "linear" else EXPERT_KERNELS)[card].get(kind)
    if found is None:
        raise InputError(f"as served on {card}: {KINDS[kind]} is not known for {WHERE[where]}; leave this card out")
    # vLLM's should_use_deepgemm_for_fp8_linear
    return CUTLASS_BLOCKS if found.name == DEEP_GEMM.name and (shape[0] % 64 or shape[1] % 128) else found


def on_card(engine: Engine, card: Card, lookup: Lookup, facts: Architecture) -> str:
    """The kernel that a server chooses on a card for a module of an output, or why it refuses the module."""
    scheme, routed = lookup.scheme, lookup.kind in (EXPERTS, MTP_EXPERTS)
    if problem := refusal(engine, lookup) or lookup.refused:
        return f"{REFUSED}: {problem}"
    if scheme is not None and scheme.is_nvfp4:
        if not routed or card == "vllm-cpu":
            return NOT_KNOWN
        return EXPERT_KERNELS[card]["nvfp4-a4" if scheme.activations else "nvfp4"].name
    if engine.is_sglang:
        return _by_sglang(card, scheme, routed)
    where: Where = "experts" if routed else "linear"
    shape = lookup.members[0].shape
    if scheme is None:
        return kernel(card, where, "plain", shape).name
    if not is_packed(scheme):
        kind: Kind = "blocks" if scheme.strategy == "block" else "rows"
        if routed and card == "vllm-cpu" and kind == "rows":
            return f"{REFUSED}: no kernel for experts in FP8 rows"
        return kernel(card, where, kind, shape).name
    if not routed:
        return kernel(card, where, "packed", shape).name
    if card == "vllm-cpu":
        return _on_cpu(scheme, facts)
    kernels = moe_kernels(scheme)
    if card == "blackwell" and (scheme.bits, scheme.group_size, scheme.symmetric) == (4, 32, True):
        return "TRT-LLM or Marlin"  # the former on SM100 alone, and not for every routing
    return kernel(card, where, "packed", shape).name if kernels[0] == MARLIN else kernels[0]


def _by_sglang(card: Card, scheme: ServedScheme | None, routed: bool) -> str:
    if scheme is None:
        return UNQUANTIZED
    if is_packed(scheme):
        return MARLIN
    return "Triton" if routed else SGLANG_LINEARS[card]["blocks" if scheme.strategy == "block" else "rows"]


def _on_cpu(scheme: ServedScheme, facts: Architecture) -> str:
    """Whether CPUExpertsInt4 takes experts in packed integers, and their routing."""
    if scheme.bits != 4 or not scheme.symmetric or scheme.group_size == 32:
        return f"{REFUSED}: its kernel takes symmetric INT4 in groups of 64 or 128"
    if facts.router.scoring == "sigmoid":
        return f"{REFUSED}: its kernel takes softmax routing"
    return "AMX"
