"""What servers make one linear module of, by the names of the parts."""

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
