"""What a run will need, before it starts: disk, memory and time, from the plan and the sizes of its data.

Bytes follow from shapes. Time is arithmetic: the multiplications and additions that the method needs, the bytes that
it reads, writes and hashes, the weights that it dequantizes, over rates that are assumptions. Pure; every assumption
is part of the answer. How often a run goes through source and output, in whole files' worth:

    layers  source read and dequantized; output written, and hashed twice while it is still in memory (the shard's
            SHA-256 and a digest for each tensor)
    proof   output read, and its hash compared with that; source and output read and dequantized for the audit, of
            which the output's bytes have just been read; and both again for the evaluation, where there is a
            held-out set

Legend: T tokens, H hidden, I expert width, E experts, K chosen experts of a token.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantizers.architectures.architecture import Sizes
from quantizers.calibration.set import DataSource
from quantizers.recipe.schema import set_location

from .job import Job
from .plan import Plan
from .solve_memory import DeviceMemory, device_memory

# Operations a second: of the forward pass and the sums, and of the float32 search and rounding.
RATES = {"CPU": (0.5e12, 0.3e12), "GPU": (300e12, 30e12)}
WEIGHTS = {"CPU": 0.5e9, "GPU": 20e9}  # weights a second, read from memory, dequantized and brought to the device
DISK_RATE = 1e9  # bytes a second, read or written
HASH_RATE = 1.5e9  # bytes a second
HOST = 1 << 30  # bytes that the program and its libraries take by themselves


@dataclass(frozen=True)
class Estimate:
    """All sizes in bytes, times in seconds.

    Attributes:
        tokens, held_out: of the calibration set and of the held-out set at most; None where its size is not known
            before it is read. 0 held-out tokens: nothing is evaluated.
        output, states: disk that is needed beside the source; states only while it runs, by kind of device.
        host: one layer's source bytes, and the program itself.
        memory: of the device, by its kind: with one expert solved at a time, and with all at once.
        operations: of the layers and of the proof, multiplications and additions.
        seconds: by kind of device: `layers`, `proof`, and `all` of it.
    """

    tokens: int | None
    held_out: int | None
    source: int
    output: int
    states: dict[str, int] | None
    host: int
    memory: dict[str, tuple[int, int]]
    operations: float | None
    seconds: dict[str, dict[str, float]] | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the assumptions."""
        return asdict(self) | {"assumptions": assumptions()}


def estimate(
    plan: Plan,
    sizes: Sizes,
    output_bytes: int,
    *,
    tokens: int | None,
    held_out: int | None,
    longest: int,
    grid: int,
) -> Estimate:
    """The needs of one run.

    Args:
        output_bytes: of the finished checkpoint.
        tokens: of the calibration set at most.
        held_out: tokens of the held-out set at most, 0 without one.
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
    judged = _evaluation(sizes, held_out or 0)
    source = sum(action.spec.bytes for action in plan.actions)
    weights = sum(math.prod(a.spec.shape) for a in plan.actions if a.kind not in ("drop", "rename"))
    evaluated = 0 if held_out == 0 else 1
    known = tokens is not None and held_out is not None
    seconds = {}
    for name, (fast, slow) in RATES.items():
        layers = forward / fast + solve / slow + weights / WEIGHTS[name]
        layers += (source + output_bytes) / DISK_RATE + 2 * output_bytes / HASH_RATE
        proof = judged / fast + 2 * (1 + evaluated) * weights / WEIGHTS[name] + output_bytes / HASH_RATE
        proof += (1 + evaluated) * (source + output_bytes) / DISK_RATE
        seconds[name] = {"layers": layers, "proof": proof, "all": layers + proof}
    return Estimate(
        tokens,
        held_out,
        source,
        output_bytes,
        states,
        layer_source + HOST,
        memory,
        forward + solve + judged if known else None,
        seconds if known else None,
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


def _evaluation(sizes: Sizes, tokens: int) -> float:
    """Of the source's and the output's forward passes over the held-out set, and of their logits."""
    hidden, width = sizes["hidden"], sizes["width"]
    attention = 2 * hidden * (sizes["heads"] + sizes["kv_heads"]) * sizes["head_dim"]
    layer = attention + sizes["chosen"] * 3 * hidden * width
    return 2 * 2.0 * tokens * (sizes["layers"] * layer + hidden * sizes["vocabulary"])


def assumptions() -> list[str]:
    """What the figures rest on, a line each."""
    (cpu, cpu_solve), (gpu, gpu_solve) = RATES["CPU"], RATES["GPU"]
    return [
        "tokens: every sample as long as its sequence_length allows, which few are",
        f"time on a GPU: {gpu / 1e12:.0f}e12 operations a second in bfloat16, {gpu_solve / 1e12:.0f}e12 in float32",
        f"time on a CPU: {cpu / 1e12:.1f}e12, and {cpu_solve / 1e12:.1f}e12 for search and rounding; "
        f"disk {DISK_RATE / 1e9:.0f} GB/s",
        f"weights read and dequantized a second: {WEIGHTS['GPU'] / 1e9:.0f}e9 for a GPU, {WEIGHTS['CPU'] / 1e9:.1f}e9 "
        f"on a CPU; {HASH_RATE / 1e9:.1f} GB/s hashed",
        "proof: audit, and source and output evaluated on the held-out set; measuring for a budget comes on top",
        "memory: with one expert solved at a time, and with all at once; verifying and evaluating come on top",
    ]


def estimate_run(job: Job, output_bytes: int) -> Estimate:
    """What a run of this job would need; its calibration set is read, its data is not."""
    from quantizers.calibration.set import read_set

    path = set_location(job.recipe.calibration, job.path)
    longest, awq = read_set(path).lengths[-1], job.recipe.experts.awq
    asked = job.recipe.verify and job.recipe.verify.perplexity
    held_out = _most_tokens(set_location(asked.data, job.path)) if asked else 0
    grid = awq.grid if awq else 0
    tokens = _most_tokens(path)
    return estimate(job.plan, job.sizes, output_bytes, tokens=tokens, held_out=held_out, longest=longest, grid=grid)


def _most_tokens(path: Path) -> int | None:
    """How many tokens a set can give; None where only reading its sources would tell."""
    from quantizers.calibration.set import read_set

    found = read_set(path)
    counts = [(_most_samples(source, path.parent), found.length_of(source)) for source in found.sources]
    known = [count * length for count, length in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def chunk_on_gpu(job: Job, limit: int) -> DeviceMemory:
    """What a run on a GPU would make of `limit` bytes of its memory.

    Raises:
        InputError: not even one expert at a time fits.
    """
    from quantizers.calibration.set import read_set

    from .solve_memory import device_memory

    longest = read_set(set_location(job.recipe.calibration, job.path)).lengths[-1]
    return device_memory(job.plan, job.sizes, longest, 2, limit)


def _most_samples(source: DataSource, folder: Path) -> int | None:
    """How many samples a source can give; None where only reading it would tell."""
    if source.samples != "all":
        return source.samples
    file = folder / source.dataset
    if not source.is_local or file.suffix != ".jsonl" or not file.is_file():
        return None
    with file.open("rb") as stream:
        return sum(1 for line in stream if line.strip())
