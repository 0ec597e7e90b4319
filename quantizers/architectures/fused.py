"""What every server that is known here makes one linear module of, whatever the family."""

from __future__ import annotations

from typing import Final

# By the server's name for the module: the last parts of the published names, in its order.
FUSED: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
