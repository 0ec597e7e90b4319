"""Disk, memory and time of a run before it starts: an estimate from shapes and nominal rates, not a measurement.

For one layer with experts of MiniMax-M2.1, Qwen3-30B-A3B and GLM-4.5-Air on an H100 the closed form in `layer_work` is
within a quarter of a trace of every operation of the program. benchmarks/layer.py times a layer on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from quantizers.calibration.set import DataSource, read_set
from quantizers.checkpoint.window import schedule
from quantizers.formats.format import ExpertFormat
from quantizers.recipe.read import set_location

from .device_memory import DeviceMemory, calibration_bytes, device_memory
from .gpus import CPU_SHARES, GPU_SHARES, Rates, rates_of_cpu, rates_of_gpus
from .job import Job, parts_of_run

ITEMSIZES = {"CPU": 4, "GPU": 2}  # bytes of one element of a hidden state
HOST = 1 << 30  # bytes of host memory for the program and its libraries
USABLE = 0.9  # share of a GPU's memory that a run uses
DISK = 1e9  # bytes a second read from or written to files, unless the user says otherwise
PADDED = 1.7  # routed rows of an expert batch, padded to its busiest expert, to those that are routed
CONVERTED_AT_ONCE = 2 * 8 * 4  # bytes for a weight of gate and up, which are in memory as eight float32 arrays each
MOVED_TO_CONVERT = 200  # bytes of memory read and written for a weight that is converted, compared and packed
MOVED_PER_ROW, MOVED_PER_WEIGHT = 36, 500  # bytes of device memory


@dataclass(frozen=True)
class Work:
    """Operations of each kind, bytes of device memory read and written, and bytes of files."""

    products: float = 0.0
    float32: float = 0.0
    factorization: float = 0.0
    moved: float = 0.0
    files: float = 0.0

    def seconds(self, rates: Rates, processes: int = 1, disk: float = DISK) -> float:
        """Computing divided by the number of processes, or the files if they take longer: both happen at once.

        Every machine reads the whole source, and the first one writes the output, so files are not divided.
        """
        computing = (
            self.products / rates.reached("products")
            + self.float32 / rates.reached("float32")
            + self.factorization / rates.reached("factorization")
            + self.moved / rates.reached("bandwidth")
        )
        return max(computing / processes, self.files / disk)


@dataclass(frozen=True)
class Estimate:
    """Needs of a run: all sizes in bytes, times in seconds.

    Attributes:
        seconds: `layers`, `verification`, and `all` for their sum, on this machine's CPU and on every known GPU that
            has the memory; None if a set's size is unknown, and for the library's engine.
    """

    tokens: int | None  # of the calibration set at most; None if unknown until it is read
    held_out: int | None  # the same of the evaluation set
    source: int
    output: int  # disk space needed besides
    states: dict[str, int] | None  # activations of the calibration set, by device: host memory, or disk if they must
    host: int  # memory for two layers of the source and two of the output, the non-layer tensors, and the program
    memory: dict[str, tuple[int, int]]  # by device, with the Hessians of one expert batch, and with all and activations
    seconds: dict[str, dict[str, float]] | None
    processes: int
    several: dict[str, dict[str, float]] | None  # the same on GPUs by so many `processes`; None for one
    measuring: float | None  # to read the source once more for a budget, without the computing; None without one
    assumptions: list[str]  # one line each


def estimate_run(job: Job, output_bytes: int, processes: int = 1, disk: float = DISK) -> Estimate:
    """The needs of a run, from the YAML files of its sets, but none of their data.

    Args:
        output_bytes: size of the finished checkpoint.
        processes: with a GPU each, whose run is estimated besides that of one. More than a layer has expert batches
            save no time.
        disk: bytes a second that each machine reads from or writes to files.
    """
    if job.recipe.experts.convert is not None:
        return _estimate_conversion(job, output_bytes, processes, disk)
    (lengths, drawn), texts = calibration_lengths(job), evaluation_lengths(job)
    tokens, plan = None if lengths is None else sum(lengths), job.plan
    layer_source = max(sum(action.spec.bytes for action in plan.of_layer(n)) for n in range(plan.layers))
    layer_output = max(sum(spec.bytes for spec in plan.shard(n).values()) for n in range(plan.layers))
    memory = {name: _device_memory(job, None, name == "GPU", lengths, texts) for name in ITEMSIZES}
    busy = min(processes, memory["GPU"].units)
    seconds = several = None
    if lengths is not None and texts is not None and plan.experts.engine == "gram":
        kinds = [(number in job.facts.dense, plan.schemes[number]) for number in range(plan.layers)]
        of_kind = {kind: layer_work(job, kinds.index(kind), lengths, texts) for kind in set(kinds)}
        around = 2.0 * sum(a.spec.bytes for part in plan.passthrough_parts for a in plan.of_layer(part))
        layers = [*(of_kind[kind] for kind in kinds), Work(files=around)]
        products = 2.0 * _models(job) * sum(texts) * job.facts.hidden_size * job.facts.vocab_size
        logits = Work(products, files=output_bytes)
        gpus = [rates for rates in rates_of_gpus() if memory["GPU"].smallest <= USABLE * rates.memory]

        def of(rates: Rates, count: int) -> dict[str, float]:
            in_layers = sum(work.seconds(rates, count, disk) for work in layers)
            verification = logits.seconds(rates, count, disk)
            return {"layers": in_layers, "verification": verification, "all": in_layers + verification}

        seconds = {rates.name: of(rates, 1) for rates in (rates_of_cpu(), *gpus)}
        several = {rates.name: of(rates, busy) for rates in gpus} if processes > 1 else None
    source = sum(action.spec.bytes for action in plan.actions)
    return Estimate(
        tokens,
        None if texts is None else sum(texts),
        source,
        output_bytes,
        None if tokens is None else {n: calibration_bytes(job.facts, tokens, size) for n, size in ITEMSIZES.items()},
        2 * (layer_source + layer_output) + sum(action.spec.bytes for action in plan.of_layer(None)) + HOST,
        {name: (needed.smallest, needed.peak) for name, needed in memory.items()},
        seconds,
        processes,
        several,
        source / disk if job.allocation else None,
        _assumptions(drawn, (processes, busy), disk, job.recipe.experts.scheme),
    )


def _estimate_conversion(job: Job, output_bytes: int, processes: int, disk: float) -> Estimate:
    """The needs of a run that converts, which reads no texts and works in one process, whatever was asked for."""
    plan = job.plan
    converted = [action for action in plan.actions if action.kind == "convert"]
    source = sum(action.spec.bytes for action in plan.actions)
    weights = sum(math.prod(action.shape) for action in converted)
    held = [part for part in plan.parts if part not in plan.tables]  # which are copied in pieces
    layer = max(sum(action.spec.bytes for action in plan.of_layer(part)) for part in held)
    written = max(sum(spec.bytes for spec in plan.shard(part).values()) for part in held)
    matrices = CONVERTED_AT_ONCE * max(math.prod(action.shape) for action in converted)
    whole = Work(moved=float(MOVED_TO_CONVERT * weights), files=float(source + output_bytes))
    again = Work(files=float(output_bytes))
    seconds = {}
    for rates in (rates_of_cpu(), *rates_of_gpus()):
        layers, verification = (work.seconds(rates, 1, disk) for work in (whole, again))
        seconds[rates.name] = {"layers": layers, "verification": verification, "all": layers + verification}
    assumptions = [
        "a conversion reads no texts, and works in one process",
        "time: reading, converting, comparing every value and writing, and one last reading of the shards",
        f"files: {disk / 1e9:g} GB/s read or written, beside the computing",
    ]
    memory = dict.fromkeys(ITEMSIZES, (matrices, matrices))
    return Estimate(
        tokens=0,
        held_out=0,
        source=source,
        output=output_bytes,
        states=dict.fromkeys(ITEMSIZES, 0),
        host=2 * layer + written + matrices + HOST,
        memory=memory,
        seconds=seconds,
        processes=processes,
        several=seconds if processes > 1 else None,
        measuring=None,
        assumptions=assumptions,
    )


@dataclass(frozen=True)
class Way:
    """A way to bring the source to a run, and the output to the Hub: bytes on the disk and over the network."""

    name: str
    source: int | None  # on the disk; None if its headers are needed to know it
    output: int  # on the disk
    download: int  # with all passes of a run
    upload: int = 0


def ways_of_source(job: Job, output_bytes: int, processes: int = 1) -> list[Way]:
    """The source on the disk or in the Hub's cache; streamed through the smallest window; its output published as well.

    With a budget a run reads the source twice: to measure, and to quantize.
    """
    stored = sum(action.spec.bytes for action in job.plan.actions)
    passes = 2 if job.allocation else 1
    planned = None if job.source is None else schedule(job.source, parts_of_run(job))
    window, fetched = (planned.needed, passes * planned.traffic) if planned else (None, passes * stored)
    return [
        Way("cached", stored, output_bytes, stored),
        Way("streamed", window, output_bytes, fetched),
        Way("published", window, output_bytes - job.plan.removed_bytes(processes), fetched, output_bytes),
    ]


def layer_work(job: Job, number: int, lengths: Sequence[int], texts: Sequence[int]) -> Work:
    """The work on one layer in closed form. A multiplication and an addition are two operations.

    Args:
        lengths, texts: tokens of each calibration sequence, and of each evaluation text.
    """
    facts = job.facts
    settings = job.plan.experts
    layer = job.plan.of_layer(number)
    hidden, width = float(facts.expert_inputs), float(facts.expert_width)
    readers = float(len(facts.matrices) - 1)  # of an expert's input: gate and up
    experts, chosen = float(facts.num_experts), float(facts.top_k)
    models = _models(job)
    tokens, passes = sum(lengths), sum(lengths) + models * sum(texts)
    passthrough = [action for action in layer if action.is_other_matrix]
    numbers = sum(math.prod(action.shape) for action in passthrough)
    outputs = (a.shape[1] for a in passthrough if "attn" in a.source and a.shape[0] == facts.hidden_size)
    pairs = sum(n * n for n in lengths) + models * sum(n * n for n in texts)
    products = 2.0 * passes * numbers + 2.0 * max(outputs, default=0) * pairs  # with attention
    files = float(sum(a.spec.bytes for a in layer) + sum(spec.bytes for spec in job.plan.shard(number).values()))
    if number in facts.dense:
        return Work(products, files=files)
    products += 2 * readers * tokens * experts * hidden * width  # every expert sees every token
    products += tokens * (experts * width**2 + (chosen + 1) * hidden**2)  # Hessians
    products += 2 * (readers + 1) * chosen * passes * hidden * width  # routed passes
    square = hidden**2 * width + hidden * width**2
    search = settings.awq.grid * experts * square / 4 if settings.awq else 0.0
    rounding = factorization = 0.0
    if settings.rounding == "gptq":
        products += PADDED * chosen * tokens * (2 * readers * hidden * width + 2 * width**2)  # correction of w2
        rounding = 6 * experts * (square + (readers - 1) * hidden**2 * width)
        factorization = 4 / 3 * experts * (hidden**3 + width**3)
    moved = MOVED_PER_ROW * tokens * experts * width + MOVED_PER_WEIGHT * (readers + 1) * experts * hidden * width
    return Work(products, search + rounding, factorization, moved, files)


def _models(job: Job) -> int:
    """The models that the texts go through: source and output, as stored and on each card; two with an FP8 cache."""
    return 2 * (1 + len(job.as_served) + bool(job.plan.cached))


def _device_memory(
    job: Job, limit: int | None, accelerator: bool, lengths: Sequence[int] | None, texts: Sequence[int] | None
) -> DeviceMemory:
    tokens = None if lengths is None else sum(lengths)
    longest = max([*(lengths or [_lengths(job, job.recipe.calibration_set)[1]]), *(texts or ())])
    return device_memory(job.plan, job.facts, longest, accelerator, limit, tokens, held_out=sum(texts or ()))


def memory_on_gpu(job: Job, limit: int) -> DeviceMemory:
    """Device memory of a run on a GPU within `limit` bytes; InputError if they are too few."""
    return _device_memory(job, limit, True, calibration_lengths(job)[0], evaluation_lengths(job))


def _assumptions(drawn: bool, processes: tuple[int, int], disk: float, scheme: ExpertFormat) -> list[str]:
    """One line each. `processes` are those asked for, and those that have an expert batch to solve."""
    on_gpu, on_cpu = (", ".join(f"{share:.0%}" for share in shares.values()) for shares in (GPU_SHARES, CPU_SHARES))
    allowed = "as long as its sequence_length and the model's max_position_embeddings allow"
    lines = [
        f"tokens: the recipe's calibration.tokens; every evaluation text {allowed}"
        if drawn
        else f"tokens: every sample {allowed}, which few are",
        "time: an estimate in closed form, with evaluation and one last reading of the shards, without the check of "
        "the source, which reads it once; with room for all Hessians: a smaller device sweeps over a layer's inputs "
        "more often (--device-memory says how often), which is not counted; a run forecasts from its first layer",
        "rates: nominal ones (quantizers/recipe/gpus.yaml), of which bandwidth, matrix products, float32 and "
        f"factorizations reach {on_gpu} on a GPU and {on_cpu} on a CPU",
        f"files: {disk / 1e9:g} GB/s read or written, beside the computing",
        "memory: with the Hessians of one expert batch at a time, and with those of all and the activations as well",
    ]
    if not scheme.by_kernel:
        without = "as for integers, though it is rounded without our kernels, which takes longer on a GPU"
        lines.append(f"{scheme.short}: {without}")
    asked, busy = processes
    if asked > 1:
        idle = "" if busy == asked else f", as a layer has so many expert batches: {asked - busy:,} would be idle"
        lines.append(f"{asked:,} processes: computing divided by {busy}{idle}; not what they send to each other")
    return lines


def _lengths(job: Job, name: str) -> tuple[list[int] | None, int]:
    """Tokens of every sequence of a set, as its sources and the model's positions allow, and of the longest one.

    The former are None if only reading the set tells their number.
    """
    path = set_location(name, job.path)
    data = read_set(path)
    longest = min(data.lengths[-1], job.facts.positions or data.lengths[-1])
    lengths: list[int] = []
    for source in data.sources:
        samples = _most_samples(source, path.parent)
        if samples is None:
            return None, longest
        lengths += [min(data.length_of(source), longest)] * samples
    return lengths, longest


def _most_samples(source: DataSource, folder: Path) -> int | None:
    """Upper bound for a source's samples; None if it would have to be read to know."""
    if source.samples != "all":
        return source.samples
    file = folder / source.dataset
    if not source.is_local or file.suffix != ".jsonl" or not file.is_file():
        return None
    with file.open("rb") as stream:
        return sum(1 for line in stream if line.strip())


def cut_to(lengths: list[int], tokens: int) -> list[int]:
    """The sequences of a part of a set with so many tokens, the last one cut."""
    starts = accumulate(lengths, initial=0)
    return [min(length, tokens - start) for length, start in zip(lengths, starts, strict=False) if start < tokens]


def calibration_lengths(job: Job) -> tuple[list[int] | None, bool]:
    """Tokens of each calibration sequence at most, None if unknown; and whether they are a part of the set."""
    (most, longest), asked = _lengths(job, job.recipe.calibration_set), job.recipe.calibration_tokens
    if asked is None or (most is not None and asked >= sum(most)):
        return most, False
    return cut_to([longest] * -(-asked // longest) if most is None else most, asked), True


def evaluation_lengths(job: Job) -> list[int] | None:
    """Tokens of each evaluation text at most; none where nothing is evaluated, and None if unknown."""
    perplexity = job.recipe.verify and job.recipe.verify.perplexity
    return _lengths(job, perplexity.data)[0] if perplexity else []
