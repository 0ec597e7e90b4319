"""Compares our engine with llm-compressor's in one process: on one layer, and over the whole route on a model.

    python benchmarks/compare.py tiny-minimax-m2-fp8-int4 --repeats 3

The layer is random, with MiniMax's proportions. Both engines get the same weights and hidden states, and both
times include attention. The whole route starts from the FP8 files and ends with a checkpoint of FP8 attention
and INT4 experts on disk; imports are done before the clock starts, and our proof is not run.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from layer_measurement import resized, write_random
from library_route import folder_bytes, library_route
from measured_rows import options, recipe_job
from methods import spread

from quantizers.architectures.families import architecture_for, published_config
from quantizers.calibration.load_set import load_set
from quantizers.calibration.samples import CalibrationData, token_tensors
from quantizers.checkpoint.loaded_tensors import layer_names, load_tensors
from quantizers.checkpoint.reader import CONFIG, open_folder
from quantizers.commands.evaluate import measure
from quantizers.device.devices import choose_device, forward_dtype, is_accelerator, machine, versions
from quantizers.model.activation_store import ActivationStore
from quantizers.model.layer_forward import observe
from quantizers.model.layer_weights import ExpertWeights
from quantizers.model.moe_inputs import MoeInputStore, moe_input_store
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.output import journal
from quantizers.pipeline.quantize import quantize_layers
from quantizers.planning.device_memory import Placement, Residents
from quantizers.planning.expert_batches import tokens_per_chunk
from quantizers.planning.job import Job
from quantizers.recipe.read import set_location
from quantizers.recipe.schema import Experts
from quantizers.solve.solver import solve_layer
from quantizers.stitch.write.config_files import write_config_files
from quantizers.system.formatting import size, text_table
from quantizers.walk.context import Context

PUBLISHED = published_config("MiniMaxAI/MiniMax-M2.1")
assert PUBLISHED is not None
LENGTH = 512  # tokens per sequence in the comparison of one layer
OURS, LIBRARY = Experts(), Experts(engine="llmcompressor", scales="minmax", rounding="nearest", routed_weight=0.0)


def layer_sizes(experts: int, hidden: int, width: int) -> dict[str, int]:
    """Sizes of one layer with roughly MiniMax-M2's proportions: heads of 128, together twice the hidden size."""
    heads = max(1, 2 * hidden // 128)
    return {
        "layers": 1,
        "experts": experts,
        "chosen": max(1, experts // 4),
        "hidden": hidden,
        "width": width,
        "heads": heads,
        "kv_heads": max(n for n in (1, 2, 4, 8) if heads % n == 0 and n <= max(1, heads // 6)),
        "vocabulary": 256,
    }


def compare_layer(
    sizes: dict[str, int], tokens: int, repeats: int, device: torch.device, work: Path | None = None
) -> dict[str, Any]:
    """One random layer solved by both engines.

    Args:
        sizes: see `layer_sizes`.
        tokens: approximate, since sequences are whole; each has at most `LENGTH` tokens.

    Returns:
        For each engine: seconds (the median, and each run), CPU seconds (the median), and the peak of memory
        above what was held before, in bytes.
    """
    length = min(LENGTH, tokens)
    config = resized(PUBLISHED, **sizes) | {"bos_token_id": 0, "eos_token_id": 1}
    with tempfile.TemporaryDirectory(dir=work) as folder:
        facts = architecture_for(config, CONFIG)
        checkpoint = write_random(Path(folder) / "model", config, facts, torch.device("cpu"))
        dtype = forward_dtype(device)
        model = StreamedModel(checkpoint, facts, device, dtype)
        generator = torch.Generator().manual_seed(1)
        count = max(1, tokens // length)
        states = [torch.randn(length, sizes["hidden"], generator=generator).to(dtype) for _ in range(count)]
        norm = checkpoint.tensor(facts.layer(0, facts.norm.tensor))
        loaded = load_tensors(checkpoint, layer_names(checkpoint, facts, 0)).to(device)

        def solve(settings: Experts) -> None:
            with model.layer(0, experts=settings.engine != "gram") as layer:
                moe_inputs = observed(model, layer, states)[1]
                weights = ExpertWeights(loaded, facts, 0, device, dtype)
                residents = Residents(sizes["experts"], 1, 0)
                solve_layer(
                    model, layer, norm, moe_inputs, settings,
                    weights=weights.batch, residents=residents, entering=states,
                )  # fmt: skip

        with torch.no_grad():
            _warm_up(model, solve, states)
            ours, library = (
                _seconds_and_memory(partial(solve, settings), repeats, device) for settings in (OURS, LIBRARY)
            )
    return {
        "sizes": sizes,
        "tokens": count * length,
        "ours": ours,
        "library": library,
        "faster": library["seconds"] / ours["seconds"],
    }


def observed(
    model: StreamedModel, layer: DecoderLayer, states: Sequence[torch.Tensor]
) -> tuple[ActivationStore, MoeInputStore]:
    """Sequences (T, H) through the first half of a layer: the residual stream, and what its experts are called with."""
    lengths, chunk = [len(rows) for rows in states], tokens_per_chunk(is_accelerator(model.device))

    def rows(_: str, width: int, dtype: torch.dtype) -> ActivationStore:
        return ActivationStore(None, lengths, width, dtype, chunk=chunk)

    residual, moe_inputs = (
        rows("states", model.facts.hidden_size, model.dtype),
        moe_input_store(rows, model.facts, model.dtype),
    )
    for i, values in enumerate(states):
        residual[i] = values
    observe(model, layer, residual, moe_inputs)
    return residual, moe_inputs


def _warm_up(model: StreamedModel, solve: Callable[[Experts], None], states: list[torch.Tensor]) -> None:
    """Run both engines once on 16 tokens per sequence, so that imports and first calls are not timed."""
    kept = states[:]
    states[:] = [states[0][:16]] * len(states)
    for settings in (OURS, LIBRARY):
        solve(settings)
    states[:] = kept


def _seconds_and_memory(work: Callable[[], object], repeats: int, device: torch.device) -> dict[str, Any]:
    """Time and peak memory of some work, over several repeats."""
    seconds = []
    cpu_seconds = []
    memory = []
    for _ in range(repeats):
        gc.collect()
        before = _reset_peak(device)
        started, cpu_started = time.perf_counter(), time.process_time()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
        memory.append(_peak(device) - before)
    return {
        "seconds": statistics.median(seconds),
        "each": seconds,
        "cpu_seconds": statistics.median(cpu_seconds),  # varies less than seconds on a shared machine
        "memory_bytes": max(memory),
    }


def _reset_peak(device: torch.device) -> int:
    """Reset the peak of memory, and return the bytes held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    # Return freed memory to the system: reused by the next work, it would not show in that work's peak.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    """Peak of memory since `_reset_peak`, in bytes."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _status(key: str) -> int:
    """A size from /proc/self/status, in bytes."""
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def compare_route(
    job: Job, data: CalibrationData, repeats: int, device: torch.device, work: Path | None = None
) -> dict[str, Any]:
    """Take both whole routes on a recipe's source, and measure both results on its held-out set's short texts.

    Args:
        data: the calibration samples, see `methods.spread`.

    Returns:
        For each route: seconds (the median, and by step), memory, bytes written, and KL; and the model, the set and the
        number of its tokens.
    """
    source = job.source
    assert source is not None
    assert job.recipe.verify is not None
    assert job.recipe.verify.perplexity is not None
    tokens = token_tensors(data, job.facts.vocab_size)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        own = replace(job, recipe=job.recipe.model_copy(update={"experts": OURS}))
        steps: dict[str, list[dict[str, float]]] = {"ours": [], "library": []}
        written: dict[str, dict[str, int]] = {}

        def ours(place: Path) -> None:
            for name in ("layers", "output"):
                (place / name).mkdir(parents=True)
            residents = Residents(job.facts.num_experts, 1, 0)
            quantize_layers(own, data, tokens, Context(place, device, Placement(residents, "files", "files")))
            layers_done = time.perf_counter()
            write_config_files(place / "output", own.opened, own.plan, own.facts)
            entries = journal.done_layers(place, job.facts.num_layers)
            phases = {p: sum(e["seconds"].get(p, 0.0) for e in entries) for p in entries[0]["seconds"]}
            steps["ours"].append(phases | {"assemble": time.perf_counter() - layers_done})
            states = _states_bytes(job, tokens, device)
            written["ours"] = {"output": folder_bytes(place / "output"), "states, removed": states}

        def library(place: Path, sequences: Sequence[torch.Tensor] = tokens) -> None:
            place.mkdir()
            result = library_route(source, job.facts, sequences, OURS, place, own=job.facts_file)
            steps["library"].append(result["seconds"])
            written["library"] = result["bytes"]

        results: dict[str, Any] = {}
        warm = Path(folder) / "warm"
        library(warm, tokens[:2])  # imports and first calls
        shutil.rmtree(warm)
        # Ours comes last: it changes settings of the allocator, which must not affect the library's figures.
        for name, route, place in (("library", library, "stitched"), ("ours", ours, "output")):
            steps[name].clear()
            runs = map(route, [Path(folder) / f"{name}-{n}" for n in range(repeats)])
            results[name] = _seconds_and_memory(partial(next, runs), repeats, device)
            results[name]["steps"] = {
                step: statistics.median(seconds[step] for seconds in steps[name]) for step in steps[name][0]
            }
            results[name]["bytes"] = written[name]
            results[name]["folder"] = Path(folder) / f"{name}-0" / place
        held_out = set_location(job.recipe.verify.perplexity.data, job.path)
        opened = [open_folder(results[name].pop("folder")) for name in ("ours", "library")]
        measured = measure(
            source, opened, held_out, device, Path(folder) / "eval",
            trust_remote_code=job.recipe.source.trusts_tokenizer, own=job.facts_file,
        )  # fmt: skip
    for name, figures in zip(("ours", "library"), measured, strict=True):
        results[name]["kl"] = figures.kl.mean
        results[name]["top1"] = figures.top1
    return results | {
        "model": Path(job.location).name,
        "set": data.name,
        "tokens": sum(len(t) for t in tokens),
        "faster": results["library"]["seconds"] / results["ours"]["seconds"],
        "kl_ratio": results["ours"]["kl"] / results["library"]["kl"],
    }


def _states_bytes(job: Job, tokens: Sequence[torch.Tensor], device: torch.device) -> int:
    """Peak bytes of the hidden states between two layers and at the experts, and of the router's choices."""
    row = 2 * forward_dtype(device).itemsize * job.facts.hidden_size + 8 * job.facts.top_k
    return row * sum(len(t) for t in tokens)


def compare_with_library(
    job: Job, sizes: dict[str, int], layer_tokens: int, route_tokens: int, repeats: int, device: torch.device
) -> dict[str, Any]:
    """Make both comparisons; see `compare_layer` and `compare_route`."""
    source = job.source
    assert source is not None
    recipe = job.recipe
    data = load_set(
        set_location(recipe.calibration_set, job.path),
        source.folder,
        recipe.source.trusts_tokenizer,
        recipe.calibration_tokens,
    )
    return {
        "layer": compare_layer(sizes, layer_tokens, repeats, device),
        "route": compare_route(job, spread(data, route_tokens), repeats, device),
        "repeats": repeats,
        "machine": machine(device),
        "versions": versions(),
    }


def compare_table(result: dict[str, Any]) -> str:
    """The result as text: one layer and the whole route, ours beside the library's."""
    layer, route = result["layer"], result["route"]
    header = ("", "ours", "llm-compressor", "ratio")

    def row(name: str, ours: float, library: float, form: str = "{:.2f}") -> tuple[str, ...]:
        return name, form.format(ours), form.format(library), f"{library / ours:.1f}x" if ours > 0 else ""

    def sized(name: str, ours: int, library: int) -> tuple[str, ...]:
        return name, size(ours), size(library), f"{library / ours:.1f}x" if ours > 0 else ""

    sizes = layer["sizes"]
    rows = [
        row("one layer, seconds", layer["ours"]["seconds"], layer["library"]["seconds"]),
        row("one layer, CPU seconds", layer["ours"]["cpu_seconds"], layer["library"]["cpu_seconds"]),
        sized("one layer, memory", layer["ours"]["memory_bytes"], layer["library"]["memory_bytes"]),
        row("whole route, seconds", route["ours"]["seconds"], route["library"]["seconds"]),
        row("whole route, CPU seconds", route["ours"]["cpu_seconds"], route["library"]["cpu_seconds"]),
        sized("whole route, memory", route["ours"]["memory_bytes"], route["library"]["memory_bytes"]),
        row("KL, nats", route["ours"]["kl"], route["library"]["kl"], "{:.4f}"),
    ]
    lines = [
        text_table(header, rows),
        "",
        f"layer: {sizes['experts']} experts of {sizes['hidden']} x {sizes['width']}, {layer['tokens']:,} tokens",
        f"route: {route['tokens']:,} tokens; the source's files in, a checkpoint out; KL is "
        f"{route['kl_ratio']:.2f} times the library's",
    ]
    for who in ("ours", "library"):
        steps = ", ".join(f"{step} {seconds:.1f}" for step, seconds in route[who]["steps"].items())
        written = ", ".join(f"{name} {number:,}" for name, number in route[who]["bytes"].items())
        lines += [f"{who}: seconds: {steps}", f"{who}: bytes written: {written}"]
    lines.append(f"medians of {result['repeats']}; {result['machine']['threads']} threads; imports left out")
    return "\n".join(lines)


def main() -> None:
    """Compare both engines on a random layer, and both routes on a recipe's model."""
    parser = options(__doc__)
    parser.add_argument("--repeats", type=int, default=1, help="seconds are the median")
    parser.add_argument("--experts", type=int, default=16, help="of the random layer")
    parser.add_argument("--hidden", type=int, default=512, help="of the random layer")
    parser.add_argument("--width", type=int, default=256, help="of the random layer's experts")
    given = parser.parse_args()
    sizes = layer_sizes(given.experts, given.hidden, given.width)
    job, device = recipe_job(given.recipe), choose_device(given.device)
    result = compare_with_library(job, sizes, given.tokens, given.tokens, given.repeats, device)
    print(json.dumps(result, indent=1) if given.json else compare_table(result))


if __name__ == "__main__":
    main()
