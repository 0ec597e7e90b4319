"""What the parts of a decoder layer do, found by running it: no name is read, every claim is a number.

Legend: T tokens, H hidden size, E experts, K experts chosen per token, I width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Roles:
    """The parts of a decoder layer with experts; modules are paths within the layer, as transformers names them.

    Attributes:
        experts: the module of all routed experts, with `gate_up_proj` (E, 2I, H) and `down_proj`
            (E, H, I).
        router: the module whose output holds the chosen experts.
        router_weight: the name of its parameter (E, H).
        chosen: K.
        scoring: what the router makes of its logits before it chooses.
        norm: the module whose output the experts read; None if there is none.
        norm_offset: what it adds to its stored weight before it multiplies.
        readers: the linear modules that read the norm's output besides the router and the experts; `residual` among
            them if the fold is not exact and none of these explains it.
        probes: the largest difference, relative to the largest value, of each probe by name; see `probe`.
    """

    experts: str
    router: str
    router_weight: str
    chosen: int
    scoring: Literal["sigmoid", "softmax"]
    norm: str | None
    norm_offset: int
    readers: tuple[str, ...]
    probes: dict[str, float]
