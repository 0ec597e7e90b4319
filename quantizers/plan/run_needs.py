"""Estimate disk, memory and time of a run before it starts, from the plan and the sizes of its data.

Bytes follow from shapes. Time is the number of operations, of bytes read, written and hashed, and of weights
dequantized, each divided by an assumed rate; `assumptions` lists the rates. A run reads and writes the whole source
and output this often:

    layers  read the source, and hash it as it arrives; hash the output in memory, write it, and read it back (from the
            page cache) to hash file and tensors; dequantize the source's weights and the output's for the texts and
            again for the audit, and the source's twice for the norm's scale and once to be solved
    proof   read the output from the disk and hash it; compute logits of the held-out set

Legend: T tokens, H hidden, I expert width, E experts, K experts chosen per token.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quantizers.architectures.sizes import Sizes
from quantizers.calibration.set import DataSource
from quantizers.recipe.locations import set_location

from .job import Job
from .plan import Plan
from .solve_memory import DeviceMemory, device_memory
from .states import calibration_bytes

# Operations per second: of the forward pass and the calibration sums, and of the float32 search and rounding.
RATES = {"CPU": (0.5e12, 0.3e12), "GPU": (300e12, 30e12)}
WEIGHTS = {"CPU": 0.5e9, "GPU": 20e9}  # weights per second: read from memory, dequantized and copied to the device
DISK_RATE = 1e9  # bytes per second, read or written
HASH_RATE = 1.5e9  # bytes per second
ITEMSIZES = {"CPU": 4, "GPU": 2}  # bytes of one element of a hidden state
HOST = 1 << 30  # bytes of host memory for the program and its libraries


@dataclass(frozen=True)
class Estimate:
    """All sizes in bytes, times in seconds.

    Attributes:
        tokens, held_out: upper bounds for the calibration set and the held-out set; None if the size is unknown until
            the set is read. 0 held-out tokens mean that there is no evaluation.
        source: bytes of the source.
        output: disk space needed in addition to the source.
        states: hidden states of the calibration set during the run, by kind of device: host memory, or disk space where
            they do not fit.
        host: host memory for two layers of the source, one of the output, what lies outside the layers, and the program
            itself.
        memory: device memory, by kind of device: with the sums of one unit of experts at a time, and with all that is
            worth holding.
        operations: multiplications and additions of the layers and the proof.
        seconds: by kind of device: `layers`, `proof`, and `all` for their sum.
        drawn: whether `tokens` are those of the recipe's calibration.tokens.
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
    drawn: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the assumptions."""
        return asdict(self) | {"assumptions": assumptions(self.drawn)}


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
    """Estimate one run.

    Args:
        output_bytes: size of the finished checkpoint.
        tokens: upper bound for the calibration set.
        held_out: upper bound for the held-out set's tokens; 0 without one.
        longest: upper bound for the tokens of one sequence.
        grid: number of candidates in the scale search; 0 without a search.
    """
    numbers = range(plan.layers)
    layer_source = max(sum(action.spec.bytes for action in plan.of_layer(n)) for n in numbers)
    layer_output = max(sum(spec.bytes for spec in plan.shard(n).values()) for n in numbers)
    outside = sum(action.spec.bytes for action in plan.of_layer(None))
    memory = {}
    for name in ITEMSIZES:
        whole = device_memory(plan, sizes, longest, name == "GPU", None, tokens)
        memory[name] = (whole.smallest, whole.peak)
    states = None
    if tokens is not None:
        states = {name: calibration_bytes(sizes, tokens, itemsize) for name, itemsize in ITEMSIZES.items()}
    forward, solve, logits = _operations(plan, sizes, tokens or 0, held_out or 0, grid)
    source = sum(action.spec.bytes for action in plan.actions)
    weights = sum(math.prod(a.spec.shape) for a in plan.actions if a.is_weight and a.layer not in plan.mtp)
    known = tokens is not None and held_out is not None
    seconds = {}
    for name, (forward_rate, solve_rate) in RATES.items():
        layers = forward / forward_rate + solve / solve_rate + 7 * weights / WEIGHTS[name]
        layers += (source + output_bytes) / DISK_RATE + (source + 3 * output_bytes) / HASH_RATE
        proof = logits / forward_rate + output_bytes / DISK_RATE + output_bytes / HASH_RATE
        seconds[name] = {"layers": layers, "proof": proof, "all": layers + proof}
    return Estimate(
        tokens,
        held_out,
        source,
        output_bytes,
        states,
        2 * layer_source + layer_output + outside + HOST,
        memory,
        forward + solve + logits if known else None,
        seconds if known else None,
    )


def _operations(plan: Plan, sizes: Sizes, tokens: int, held_out: int, grid: int) -> tuple[float, float, float]:
    """Operations: of forward passes and sums, which grow with T; of search and rounding; of logits."""
    hidden, width, experts = (sizes[word] for word in ("hidden", "width", "experts"))
    in_layers = (a for a in plan.actions if a.layer is not None and a.layer not in plan.mtp)
    kept = sum(math.prod(action.spec.shape) for action in in_layers if action.is_kept_matrix)
    layers = len(plan.quantized_layers)
    routed = layers * sizes["chosen"] * 3 * hidden * width
    forced = layers * (experts * (2 * hidden * width + width**2) + (1 + sizes["chosen"]) * hidden**2)
    # Calibration passes once through the kept matrices and once through the quantized experts, a held-out text through
    # the source and through the output.
    forward = tokens * (kept + forced + routed) + held_out * 2 * (kept + routed)
    # tr(D G Dᵀ) for each candidate, then GPTQ: two triangular products and a factorization.
    searched = 2 * width * hidden**2 + hidden * width**2
    solve = layers * experts * ((grid + 2) * searched + hidden**3 + width**3)
    return 2.0 * forward, 2.0 * solve, 2 * 2.0 * held_out * hidden * sizes["vocabulary"]


def assumptions(drawn: bool = False) -> list[str]:
    """The assumptions behind the figures, one line each.

    Args:
        drawn: whether the recipe says how many tokens are drawn from its set.
    """
    (cpu, cpu_solve), (gpu, gpu_solve) = RATES["CPU"], RATES["GPU"]
    return [
        "tokens: the recipe's calibration.tokens; every held-out text as long as its sequence_length allows"
        if drawn
        else "tokens: every sample as long as its sequence_length allows, which few are",
        f"time on a GPU: {gpu / 1e12:.0f}e12 operations a second in bfloat16, {gpu_solve / 1e12:.0f}e12 in float32",
        f"time on a CPU: {cpu / 1e12:.1f}e12, and {cpu_solve / 1e12:.1f}e12 for search and rounding; "
        f"disk {DISK_RATE / 1e9:.0f} GB/s",
        f"weights read and dequantized a second: {WEIGHTS['GPU'] / 1e9:.0f}e9 for a GPU, {WEIGHTS['CPU'] / 1e9:.1f}e9 "
        f"on a CPU; {HASH_RATE / 1e9:.1f} GB/s hashed",
        "layers: with held-out texts through source and output and the audit of each shard; proof: logits and one last "
        "reading of the shards; measuring for a budget comes on top",
        "memory: with the sums of one unit of experts at a time, and with those of all, and on a GPU with the hidden "
        "states as well; auditing a shard comes on top",
    ]


def estimate_run(job: Job, output_bytes: int) -> Estimate:
    """Estimate a run of this job. This reads the calibration set's YAML file, but none of its data."""
    from quantizers.calibration.set import read_set

    path = set_location(job.recipe.calibration_set, job.path)
    longest, awq = read_set(path).lengths[-1], job.recipe.experts.awq
    perplexity = job.recipe.verify and job.recipe.verify.perplexity
    held_out = _most_tokens(set_location(perplexity.data, job.path)) if perplexity else 0
    grid = awq.grid if awq else 0
    most, asked = _most_tokens(path), job.recipe.calibration_tokens
    drawn = asked is not None and (most is None or asked < most)
    tokens = asked if drawn else most
    needs = estimate(job.plan, job.sizes, output_bytes, tokens=tokens, held_out=held_out, longest=longest, grid=grid)
    return replace(needs, drawn=drawn)


def _most_tokens(path: Path) -> int | None:
    """Upper bound for a set's tokens; None if its sources would have to be read to know."""
    from quantizers.calibration.set import read_set

    calibration = read_set(path)
    counts = [(_most_samples(source, path.parent), calibration.length_of(source)) for source in calibration.sources]
    known = [count * length for count, length in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def memory_on_gpu(job: Job, limit: int) -> DeviceMemory:
    """What a run on a GPU holds there within `limit` bytes.

    Raises:
        InputError: the limit is too small even for one unit of experts at a time.
    """
    from quantizers.calibration.set import read_set

    path = set_location(job.recipe.calibration_set, job.path)
    most, asked = _most_tokens(path), job.recipe.calibration_tokens
    known = [count for count in (most, asked) if count is not None]
    return device_memory(job.plan, job.sizes, read_set(path).lengths[-1], True, limit, min(known, default=None))


def _most_samples(source: DataSource, folder: Path) -> int | None:
    """Upper bound for a source's samples; None if it would have to be read to know."""
    if source.samples != "all":
        return source.samples
    file = folder / source.dataset
    if not source.is_local or file.suffix != ".jsonl" or not file.is_file():
        return None
    with file.open("rb") as stream:
        return sum(1 for line in stream if line.strip())
