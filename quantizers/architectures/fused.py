"""Linear modules by name: those that servers fuse into one, and those that they load in FP8."""

from __future__ import annotations

from typing import Final

# What every server that is known here does, whatever the family. By the server's name for the module: the last parts of
# the published names, in its order.
FUSED: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# What vLLM or SGLang does in some families: one of which nothing is known may be among them.
FUSED_IN_SOME: Final = FUSED | {
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),  # vLLM
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),  # SGLang
    "w13": ("w1", "w3"),
}
# What vLLM since 0.32 looks up beside the two matrices of an expert without a gate: it formats the name that is None.
NO_MATRIX: Final = "None"
# Names of attention's, shared experts' and dense layers' matrices, which servers take in FP8. Not among them are those
# that make a number for each head or token, such as `shared_expert_gate`: servers build them plain.
ATTENTION: Final = (
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
    "kv_b_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz",
)  # fmt: skip
MLP: Final = (
    "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "input_linear", "output_linear",
)  # fmt: skip
NOT_IN_FP8: Final = ("indexer", "compressor", "gate", "router")  # below which modules of the same names lie


def fits_fp8(name: str) -> bool:
    """Whether servers take a linear module of a layer in FP8, by its name without the layer's prefix."""
    *parents, last = name.split(".")
    return last in (*ATTENTION, *MLP) and not any(parent in NOT_IN_FP8 for parent in parents)
