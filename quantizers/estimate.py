"""What a run will need, before it starts: disk, memory and time, from the plan and the size of its data.

Bytes follow from shapes. Time is arithmetic: the multiplications and additions that the method needs,
over rates that are assumptions. Pure; every assumption is part of the answer.

Legend: T tokens, H hidden, I expert width, E experts, K chosen experts of a token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .architecture import Sizes
from .memory import device_memory
from .plan import Plan

# Operations a second: of the forward pass and the sums, and of the float32 search and rounding.
RATES = {"CPU": (0.5e12, 0.3e12), "GPU": (300e12, 30e12)}
DISK_RATE = 1e9  # bytes a second, of reading the source once and writing the output once
HOST = 1 << 30  # bytes that the program and its libraries take by themselves


@dataclass(frozen=True)
class Estimate:
    """All sizes in bytes, times in seconds.

    Attributes:
        tokens: of the calibration set at most; None where its size is not known before it is read.
        output, states: disk that is needed beside the source; states only while it runs, by kind of device.
        host: one layer's source bytes, and the program itself.
        memory: of the device, by its kind: with one expert solved at a time, and with all at once.
        seconds: by kind of device.
    """

    tokens: int | None
    source: int
    output: int
    states: dict[str, int] | None
    host: int
    memory: dict[str, tuple[int, int]]
    operations: float | None
    seconds: dict[str, float] | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the assumptions."""
        return asdict(self) | {"assumptions": assumptions()}


def estimate(plan: Plan, sizes: Sizes, output_bytes: int, tokens: int | None, longest: int, grid: int) -> Estimate:
    """The needs of one run.

    Args:
        output_bytes: of the finished checkpoint.
        tokens: of the calibration set at most.
        longest: tokens of one sequence at most.
        grid: candidates of the scale search, 0 without one.
    """
    hidden = sizes["hidden"]
    layer_source = max(sum(action.spec.bytes for action in plan.of_layer(n)) for n in range(plan.layers))
    memory = {}
    for name, itemsize in (("CPU", 4), ("GPU", 2)):
        whole = device_memory(plan, sizes, longest, itemsize, None)
        least = max(whole.layer + whole.fixed, whole.peak - (whole.chunk - 1) * whole.expert)
        memory[name] = (least, whole.peak)
    states = None
    if tokens is not None:
        choices = 4 * 2 * sizes["chosen"]  # which experts, and their weights
        # Hidden states before and after a layer, and what its MoE block sees.
        states = {"CPU": tokens * (4 * 3 * hidden + choices), "GPU": tokens * (2 * 3 * hidden + choices)}
    forward, solve = _operations(sizes, tokens or 0, grid)
    source = sum(action.spec.bytes for action in plan.actions)
    seconds = {
        name: forward / fast + solve / slow + (source + output_bytes) / DISK_RATE
        for name, (fast, slow) in RATES.items()
    }
    return Estimate(
        tokens,
        source,
        output_bytes,
        states,
        layer_source + HOST,
        memory,
        forward + solve if tokens is not None else None,
        seconds if tokens is not None else None,
    )


def _operations(sizes: Sizes, tokens: int, grid: int) -> tuple[float, float]:
    """Multiplications and additions of all layers: forward and sums, which grow with T; search and rounding."""
    hidden, width, experts, layers = (sizes[word] for word in ("hidden", "width", "experts", "layers"))
    attention = 2 * hidden * (sizes["heads"] + sizes["kv_heads"]) * sizes["head_dim"]
    expert = 3 * hidden * width
    observe = attention + experts * (2 * hidden * width + width**2) + (1 + sizes["chosen"]) * hidden**2
    propagate = attention + sizes["chosen"] * expert
    # tr(D G Dᵀ) for each candidate; then GPTQ: two triangular products and a factorization.
    searched = 2 * width * hidden**2 + hidden * width**2
    solve = experts * ((grid + 2) * searched + hidden**3 + width**3)
    return 2.0 * layers * tokens * (observe + propagate), 2.0 * layers * solve


def assumptions() -> list[str]:
    """What the figures rest on, a line each."""
    (cpu, cpu_solve), (gpu, gpu_solve) = RATES["CPU"], RATES["GPU"]
    return [
        "tokens: every sample as long as its sequence_length allows, which few are",
        f"time on a GPU: {gpu / 1e12:.0f}e12 operations a second in bfloat16, {gpu_solve / 1e12:.0f}e12 in float32",
        f"time on a CPU: {cpu / 1e12:.1f}e12, and {cpu_solve / 1e12:.1f}e12 for search and rounding; "
        f"disk {DISK_RATE / 1e9:.0f} GB/s",
        "memory: with one expert solved at a time, and with all at once; verifying and evaluating come on top",
    ]
