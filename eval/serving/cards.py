"""The kernels that vLLM chooses on each kind of card, and the numbers that they multiply.

A matrix is stored in FP8 blocks, in FP8 rows, packed integers or plain numbers. By that, by the card, and by whether
the matrix belongs to the routed experts, vLLM chooses a kernel, and the kernel decides what is multiplied:

    scales       as stored; rounded to bfloat16 (Marlin); or raised to a power of two, in which case the FP8 codes are
                 rounded again (DeepGEMM, E8M0)
    weights      codes times scales as they are, if a kernel applies scales to the sums; or rounded to bfloat16
    activations  bfloat16, or rounded once more: to FP8 with a scale per token or per 128 channels (amax / 448), or to
                 int8 with a scale per token (amax / 127)

From the sources of vLLM 0.32 and 0.33: the lists of kernels in kernels/linear/__init__.py, each kernel's `is_supported`
and `can_implement`, fused_moe/oracle/fp8.py and int_wna16.py, utils/deep_gemm.py and input_quant_fp8.py. The kernels of
the CPU were run; those of GPUs were not. Left out: FlashInfer's kernel for fewer than 32 tokens on Hopper, the absorbed
product of MLA when it decodes, expert parallelism, and the sum of the widths of fused matrices, on which DeepGEMM
decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from quantizers.recipe.schema import Card

Where = Literal["linear", "experts"]
Kind = Literal["blocks", "rows", "packed", "plain"]
Activations = Literal["bfloat16", "FP8 per 128", "FP8 per 128, power of two", "FP8 per token", "int8 per token"]
KINDS: dict[Kind, str] = {
    "blocks": "FP8 in blocks", "rows": "FP8 per row", "packed": "packed integers", "plain": "BF16",
}  # fmt: skip
WHERE: dict[Where, str] = {"linear": "linear layers", "experts": "experts"}
POWER = "power of two"
E8M0 = "VLLM_USE_DEEP_GEMM_E8M0=0"  # with this in the environment, DeepGEMM takes scales as they are stored


@dataclass(frozen=True)
class Kernel:
    """One of vLLM's kernels.

    Attributes:
        name: its class or backend in vLLM's source.
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
PLAIN = Kernel("unquantized", "layers/linear.py", weights="bfloat16")
MARLIN_BLOCKS = Kernel("MarlinFP8ScaledMMLinearKernel", f"{LINEAR}/marlin.py", "bfloat16", "bfloat16")
MARLIN_ROWS = replace(MARLIN_BLOCKS, weights="as stored")  # a scale per row is applied to the sums
MARLIN_INTEGERS = Kernel("MarlinLinearKernel", "kernels/linear/mixed_precision/marlin.py", "bfloat16", "bfloat16")
DEEP_GEMM = Kernel(
    "DeepGemmFp8BlockScaledMMKernel", f"{LINEAR}/deep_gemm.py", "power of two", activations="FP8 per 128, power of two"
)
CUTLASS_BLOCKS = Kernel("CutlassFp8BlockScaledMMKernel", f"{LINEAR}/cutlass.py", activations="FP8 per 128")
CUTLASS_ROWS = Kernel("CutlassFP8ScaledMMLinearKernel", f"{LINEAR}/cutlass.py", activations="FP8 per token")
MARLIN_EXPERTS = Kernel("MarlinExperts", f"{MOE}/marlin_moe.py", "bfloat16", "bfloat16")
TRITON_EXPERTS = Kernel("TritonExperts", f"{MOE}/triton_moe.py", activations="FP8 per 128")
PLAIN_EXPERTS = Kernel("unquantized experts", "layers/fused_moe/oracle/unquantized.py", weights="bfloat16")
CUTLASS_EXPERTS = Kernel("TritonOrCutlassExperts", f"{MOE}/triton_cutlass_moe.py", activations="FP8 per token")

LINEARS: dict[Card, dict[Kind, Kernel]] = {
    "ampere": {"blocks": MARLIN_BLOCKS, "rows": MARLIN_ROWS, "packed": MARLIN_INTEGERS},
    "ada": {"blocks": MARLIN_BLOCKS, "rows": CUTLASS_ROWS, "packed": MARLIN_INTEGERS},
    "hopper": {"blocks": DEEP_GEMM, "rows": CUTLASS_ROWS, "packed": MARLIN_INTEGERS},
    "blackwell": {"blocks": DEEP_GEMM, "rows": CUTLASS_ROWS, "packed": MARLIN_INTEGERS},
    "vllm-cpu": {
        "blocks": Kernel("CPUFp8BlockScaledMMKernel", f"{LINEAR}/cpu.py", weights="bfloat16"),
        "rows": Kernel("ChannelWiseTorchFP8ScaledMMLinearKernel", f"{LINEAR}/pytorch.py", activations="FP8 per token"),
        "packed": Kernel("CPUWNA16LinearKernel", "kernels/linear/mixed_precision/cpu.py", weights="bfloat16"),
    },
}
EXPERTS: dict[Card, dict[Kind, Kernel]] = {
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
        "blocks": Kernel("TrtLlmFp8Experts", f"{MOE}/trtllm_fp8_moe.py", activations="FP8 per 128"),
        "rows": CUTLASS_EXPERTS,
        "packed": MARLIN_EXPERTS,
    },
    "vllm-cpu": {
        "blocks": Kernel("CPUExpertsFp8", f"{MOE}/cpu_moe.py", weights="bfloat16"),
        "rows": Kernel("CPUExpertsFp8", f"{MOE}/cpu_moe.py", weights="bfloat16"),
        "packed": Kernel("CPUExpertsInt4", f"{MOE}/cpu_moe.py", activations="int8 per token"),
    },
}


def kernel(card: Card, where: Where, kind: Kind, shape: tuple[int, ...]) -> Kernel:
    """The kernel for a matrix (R, C) that is stored so."""
    if kind == "plain":
        return PLAIN if where == "linear" else PLAIN_EXPERTS
    found = (LINEARS if where == "linear" else EXPERTS)[card][kind]
    # vLLM's should_use_deepgemm_for_fp8_linear
    return CUTLASS_BLOCKS if found is DEEP_GEMM and (shape[0] % 64 or shape[1] % 128) else found
