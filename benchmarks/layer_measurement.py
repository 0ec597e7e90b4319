"""Time and memory of one layer on this machine: random weights of a model's real size through the code of a run.

The layer is quantized, verified and evaluated by `quantize_layers`, as every layer of a run is. Layers without experts
that come before the first one with experts are measured as well. From these, the time of the whole run follows: phases
that read calibration tokens grow with their number, those of the evaluation texts with theirs, and those that work on
the experts' matrices with the number of experts.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clock import Clock, listening
from safetensors.torch import save_file

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for
from quantizers.calibration.samples import CalibrationData, Sample, token_tensors
from quantizers.checkpoint.reader import CONFIG, SINGLE, Checkpoint, open_folder, torch_dtype
from quantizers.checkpoint.safetensors_header import FP8, Spec
from quantizers.device.devices import device_limit, forward_dtype, is_accelerator, machine
from quantizers.eval.fidelity.metrics import Text
from quantizers.formats.fp8 import SCALE, SCALE_INV, declared_block
from quantizers.output import journal
from quantizers.pipeline.quantize import quantize_layers
from quantizers.planning.assign_actions import expected_tensors, make_plan
from quantizers.planning.device_memory import DeviceMemory, Placement, Residents, calibration_bytes, device_memory
from quantizers.planning.estimate import calibration_lengths, cut_to, evaluation_lengths, layer_work
from quantizers.planning.expert_batches import tokens_per_chunk
from quantizers.planning.gpus import rates_of_cpu
from quantizers.planning.job import Job
from quantizers.planning.plan import METADATA
from quantizers.recipe.schema import Stop
from quantizers.solve.kernel_check import verify_kernels
from quantizers.system.errors import ArchitectureError, InputError
from quantizers.system.formatting import gib
from quantizers.system.host_memory import available
from quantizers.system.progress import duration, peak_memory
from quantizers.walk.context import Context

OUTLIERS = 8  # number of outlier channels in a norm, and the factor that enlarges them
VOCABULARY = 256  # of the random model: embeddings and logits are not measured
PROGRAM = 1 << 30  # bytes of host memory for the program and its libraries
WARM_UP = 16  # tokens of a first layer, which pays for imports, compilation and first calls
TOKENS = "tokens"
TEXTS = "evaluation tokens"
EXPERTS = "experts"
HESSIANS = "Hessians"
# The phases of a layer in their order, and what their time grows with. Each token is routed to as many of few experts
# as of many: the Hessians of routed tokens do not grow with the number of experts, as those of w2 do.
GROWS_WITH = {
    "read": [EXPERTS], "materialise": [EXPERTS], "reference": [TEXTS], "observe": [TOKENS], "dequantize": [EXPERTS],
    "forced pass": [TOKENS, EXPERTS], "Hessians": [TOKENS, HESSIANS], "changes": [TOKENS], "search": [EXPERTS],
    "rounding": [EXPERTS], "other solving": [EXPERTS], "pack": [EXPERTS], "propagate": [TOKENS], "candidate": [TEXTS],
    "compare": [TEXTS], "write": [EXPERTS],
}  # fmt: skip


def measure_layer(
    job: Job,
    device: torch.device,
    *,
    tokens: int | None = None,
    experts: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Quantize one random layer of the job's model, whose shards are not needed, and extrapolate to the whole run.

    Args:
        tokens: calibration tokens, and evaluation tokens at most; one token chunk of the device by default.
        experts: fewer than the model has; by default as many as fit into memory.
        limit: bytes of device memory that may be used; None for the device's own limit.

    Returns:
        `phases` (seconds measured, what they grow with, seconds of a layer of the run), `layer`, `dense_layer` and
        `run` in seconds, peak memory in bytes, and the sizes that were measured beside those of the run.

    Raises:
        InputError: the sets' sizes are unknown, or not even the smallest layer fits.
    """
    run_lengths, run_texts = _run_lengths(job)
    schemes = job.allocation.candidates if job.allocation else job.plan.schemes
    verify_kernels(device, {(s.bits, s.group_size, job.recipe.experts.signed) for s in schemes})
    tokens = min(tokens or tokens_per_chunk(is_accelerator(device)), sum(run_lengths))
    lengths, texts = cut_to(run_lengths, tokens), cut_to(run_texts, tokens)
    with tempfile.TemporaryDirectory(prefix="quantize-measure-") as name:
        folder = Path(name)
        small, memory = _largest_fitting(job, lengths, sum(texts), device, experts, limit)
        _announce(small, lengths, texts, device)
        smallest = _smallest(job, is_accelerator(device))
        _quantize_random(smallest, memory, [WARM_UP], [WARM_UP] if texts else [], device, folder / "warm-up")
        shutil.rmtree(folder / "warm-up")
        with listening(Clock(device)) as clock:
            entries = _quantize_random(small, memory, lengths, texts, device, folder)
    ratios = {
        TOKENS: sum(run_lengths) / tokens,
        TEXTS: sum(run_texts) / sum(texts) if texts else 0.0,
        EXPERTS: job.facts.num_experts / small.facts.num_experts,
        HESSIANS: _hessian_work(job.facts) / _hessian_work(small.facts),
    }
    *dense, measured = (entry["seconds"] for entry in entries)
    solving = clock.seconds()  # the phases of `solve`
    rest = max(measured.pop("solve") - sum(solving.values()), 0.0)
    return extrapolated(job, measured | solving | {"other solving": rest}, dense, ratios) | {
        "tokens": tokens,
        "held_out": sum(texts),
        "sizes": {word: size.value for word, size in small.facts.sizes.items()},
        "run_tokens": sum(run_lengths),
        "run_held_out": sum(run_texts),
        "run_experts": job.facts.num_experts,
        "peak_memory_bytes": max(peak_memory(device), *(entry["peak_memory_bytes"] for entry in entries)),
        "machine": machine(device),
    }


def _quantize_random(
    job: Job, memory: DeviceMemory, lengths: list[int], texts: list[int], device: torch.device, folder: Path
) -> list[dict[str, Any]]:
    """The journal's entries of the layers of a random model of the job's sizes, quantized with random tokens."""
    job = replace(job, source=write_random(folder / "model", job.config, job.facts, device))
    for file in {info.file for info in job.opened.tensors.values()}:
        with file.open("rb") as stream:  # out of the page cache, as far as the system complies: the disk is to be read
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for name in ("layers", "output"):
        (folder / name).mkdir()
    _reset_peak(device)
    placement = Placement(
        Residents(memory.resident, memory.unit, memory.smallest),
        inputs="device" if memory.inputs else "memory",
        states="device" if memory.states else "memory",
        texts_on_device=memory.texts,
    )
    context = Context(folder, device, placement)
    samples = tuple(Sample(_random_tokens(length), "random", "random") for length in lengths)
    data = CalibrationData("random", max(lengths), (max(lengths),), samples, "", (), ())
    evaluation = [Text(torch.from_numpy(_random_tokens(length)).long(), "random", length) for length in texts]
    with torch.no_grad():
        # With limits, though none is set, the shard is waited for within the layer: so its time is known.
        quantize_layers(job, data, token_tensors(data, VOCABULARY), context, evaluation, stop=Stop())
    return journal.done_layers(folder, job.facts.num_layers)


def _announce(job: Job, lengths: list[int], texts: list[int], device: torch.device) -> None:
    """Say what is measured, and how long it takes where that can be estimated and is long: on a CPU."""
    line = f"measuring one layer: {job.facts.num_experts} experts, {sum(lengths):,} tokens"
    seconds = layer_work(job, job.facts.moe_layers[0], lengths, texts).seconds(rates_of_cpu())
    if device.type == "cpu" and seconds > 60:
        line += f"; about {duration(seconds)} are estimated, less with fewer --experts and --tokens"
    print(line, file=sys.stderr, flush=True)


def extrapolated(
    job: Job, measured: Mapping[str, float], dense: list[dict[str, float]], ratios: Mapping[str, float]
) -> dict[str, Any]:
    """Seconds of a layer with experts, of one without, and of all layers and the last reading of the output.

    A run reads a layer while it computes the one before, so the longer of the two counts.

    Args:
        measured: seconds by phase of the layer with experts.
        dense: the same of each layer without experts that was measured.
        ratios: of a layer of the run to the measured one, by what GROWS_WITH names.
    """
    of_run = _scaled(measured, ratios)
    layer = _overlapped(of_run)
    without = [_overlapped(_scaled(seconds, {**ratios, EXPERTS: 1.0, HESSIANS: 1.0})) for seconds in dense]
    moe, others = len(job.facts.moe_layers), len(job.facts.dense)
    dense_layer = sum(without) / len(without) if without else layer if others else 0.0
    return {
        "phases": [
            {"phase": name, "seconds": measured[name], "grows_with": " and ".join(growth), "run": of_run[name]}
            for name, growth in GROWS_WITH.items()
            if name in measured
        ],
        "layer": layer,
        "layers": moe,
        "dense_layer": dense_layer,
        "dense_layers": others,
        "run": moe * layer + others * dense_layer,
    }


def _scaled(seconds: Mapping[str, float], ratios: Mapping[str, float]) -> dict[str, float]:
    return {name: took * math.prod(ratios[word] for word in GROWS_WITH[name]) for name, took in seconds.items()}


def _overlapped(seconds: Mapping[str, float]) -> float:
    reading = seconds.get("read", 0.0)
    return max(reading, sum(seconds.values()) - reading)


def _hessian_work(facts: Architecture) -> int:
    """Multiplications of a token in the Hessians of a layer, see `planning.estimate`."""
    return facts.num_experts * facts.expert_width**2 + (facts.top_k + 1) * facts.hidden_size**2


def _run_lengths(job: Job) -> tuple[list[int], list[int]]:
    """Tokens of each calibration sequence and evaluation text of the run, at most."""
    (lengths, _), texts = calibration_lengths(job), evaluation_lengths(job)
    unknown = "the set's size is unknown before it is read; give"
    if lengths is None:
        raise InputError(f"{job.path}: calibration", f"{unknown} --set calibration.tokens=N")
    if texts is None:
        raise InputError(
            f"{job.path}: verify.perplexity.data",
            f"{unknown} another set, or leave the evaluation out with --set verify.perplexity=null",
        )
    return lengths, texts


def _largest_fitting(
    job: Job, lengths: list[int], held_out: int, device: torch.device, experts: int | None, limit: int | None
) -> tuple[Job, DeviceMemory]:
    """The job of a random model with as many experts as fit, or as were asked for, and its device memory."""
    if experts and experts > job.facts.num_experts:
        raise InputError(f"--experts {experts}", f"the model has {job.facts.num_experts}", "give as many, or fewer")
    accelerator = is_accelerator(device)
    limit = limit or device_limit(device)
    folder = Path(tempfile.gettempdir())
    refused: InputError | None = None
    for count in [experts] if experts else halved(job.facts.num_experts):
        try:
            small = random_job(job, count)
            memory = device_memory(
                small.plan, small.facts, max(lengths), accelerator, limit, sum(lengths), held_out=held_out
            )
            files = 2 * sum(action.spec.bytes for action in small.plan.actions)
            host = files + PROGRAM + (0 if accelerator else memory.smallest)
            host += calibration_bytes(small.facts, sum(lengths), forward_dtype(device).itemsize)
            disk = f"disk space in {folder}", files, shutil.disk_usage(folder).free
            for kind, needed, free in (("host memory", host, available()), disk):
                if needed > free:
                    raise InputError(
                        "", f"{gib(needed)} of {kind} are needed, {gib(free)} are free", "give fewer experts or tokens"
                    )
        except ArchitectureError as impossible:  # fewer are impossible as well
            raise refused or InputError(f"--experts {count}", impossible.without_remedy, impossible.remedy) from None
        except InputError as failure:
            refused = InputError(f"--experts {count}", failure.without_remedy, failure.remedy)
        else:
            return small, memory
    assert refused is not None
    raise refused


def _smallest(job: Job, accelerator: bool) -> Job:
    """A model with as few experts as the router allows; of the real width on an accelerator, whose kernels know it."""
    narrow = {} if accelerator else {"hidden": 256, "width": 256}
    for count in reversed(list(halved(job.facts.num_experts))):
        with contextlib.suppress(InputError):
            return random_job(job, count, **narrow)
    return random_job(job, job.facts.num_experts)


def halved(experts: int) -> Iterator[int]:
    """All experts, half of them, and so on down to two."""
    while experts > 1:
        yield experts
        experts //= 2


def random_job(job: Job, experts: int, **narrow: int) -> Job:
    """The job of a model like the job's, as deep as its first layer with experts, with other sizes, without a source.

    Raises:
        ArchitectureError: the router of such a model cannot have so many experts, or its facts are not of a family.
    """
    first = job.facts.moe_layers[0]
    config = resized(job.config, job.facts, layers=first + 1, experts=experts, vocabulary=VOCABULARY, **narrow)
    config |= {"bos_token_id": 0, "eos_token_id": 1}
    facts = architecture_for(config, CONFIG, job.facts_file)
    if not facts.is_of(config):
        raise ArchitectureError(
            job.facts_file,
            "these are facts about one model, and one of other sizes is needed",
            "give data about its family, as docs/how-to/add-a-family.md explains",
        )
    block = declared_block(config, CONFIG)
    specs = expected_tensors(facts, config, CONFIG)
    plan = make_plan(facts, specs, job.plan.settings(first), CONFIG, block)
    return replace(job, facts=facts, config=config, plan=plan, source=None, allocation=None)


def resized(config: dict[str, Any], facts: Architecture | None = None, **sizes: int) -> dict[str, Any]:
    """config.json with other sizes, by this program's names for them: layers, experts, hidden, width, …

    Layers that predict further tokens are left out: nothing is computed in them.
    """
    facts = facts or architecture_for(config, CONFIG)
    sizes = {"mtp": 0} | sizes
    return config | {facts.sizes[word].key: size for word, size in sizes.items() if word in facts.sizes}


def write_random(folder: Path, config: dict[str, Any], facts: Architecture, device: torch.device) -> Checkpoint:
    """Write the checkpoint that a config.json describes into a new folder, with random weights, and open it.

    Norms have outlier channels; linear weights are scaled by 1/√columns, which preserves the length of a vector.
    Random numbers differ between devices.
    """
    generator = torch.Generator(device).manual_seed(0)
    specs = expected_tensors(facts, config, CONFIG)
    tensors = {name: _draw(name, spec, facts, specs, generator) for name, spec in specs.items()}
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / SINGLE, metadata=METADATA)
    return open_folder(folder)


def _draw(
    name: str, spec: Spec, facts: Architecture, specs: dict[str, Spec], generator: torch.Generator
) -> torch.Tensor:
    module, _, suffix = name.rpartition(".")
    if suffix in (SCALE, SCALE_INV):
        # FP8 codes are normal with standard deviation 64; the weights' is 1/√columns.
        return torch.full(spec.shape, specs[f"{module}.weight"].shape[1] ** -0.5 / 64, dtype=torch_dtype(spec.dtype))
    drawn = torch.randn(spec.shape, generator=generator, device=generator.device)
    if spec.dtype == FP8:
        drawn = (drawn * 64).clamp_(-448, 448)
    elif len(spec.shape) == 1:
        drawn = 0.02 * drawn if suffix.endswith("bias") else 1 + 0.2 * drawn
        if suffix == "weight":
            drawn[:: max(1, drawn.numel() // OUTLIERS)] *= OUTLIERS
    elif name not in (facts.embedding, facts.head):
        drawn *= spec.shape[1] ** -0.5
    return drawn.to(torch_dtype(spec.dtype)).cpu()


def _reset_peak(device: torch.device) -> None:
    """Forget the memory of writing the random weights, see `peak_memory`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _random_tokens(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, VOCABULARY, length, dtype=np.int32)
