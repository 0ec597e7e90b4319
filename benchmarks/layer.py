"""Takes one layer of real size through every phase: seconds, share of the device's peak rate, time for the whole model.

The peak rates are measured on the same device in the same run. The timed code is the program's own; random
FP8 weights are first written to a temporary folder, and dropped from the page cache.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from quantizers.architectures.families import architecture_for
from quantizers.architectures.sizes import Sizes, sizes_of
from quantizers.checkpoint.held import held_tensors, hold, layer_names
from quantizers.checkpoint.reader import CONFIG, Checkpoint
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.device.devices import device_limit, forward_dtype, machine
from quantizers.device.kind import accelerated
from quantizers.device.timing import Clock, listening
from quantizers.forward.halves import finish, observe
from quantizers.forward.layered_model import LayeredModel
from quantizers.forward.recorded import RecordedRows, recorded_rows
from quantizers.forward.states import Rows
from quantizers.forward.weights import ExpertWeights
from quantizers.plan.making import make_plan
from quantizers.plan.solve_memory import device_memory
from quantizers.plan.units import rows_of_block
from quantizers.recipe.schema import Experts
from quantizers.solve.awq import SEARCH_ROWS, row_step
from quantizers.solve.expert_unit import SEARCH_ROWS as WIDTH_SEARCH_ROWS
from quantizers.solve.layer import solve_layer
from quantizers.solve.symmetric import blocks
from quantizers.system.progress import peak_memory
from quantizers.system.residents import Residents
from stitch.audit.layer import LayerAudit, audit_layer
from stitch.write.shard import kept_hashes, layer_tensors, write_shard

from .random_model import BLOCK, published, resized, write_random
from .rates import device_rates, timed

LAYER_PHASES = (
    "read", "hold", "materialise", "dequantize", "observe", "forced pass", "sums", "changes", "search",
    "rounding", "pack", "write", "audit", "install", "propagate",
)  # fmt: skip
# Phases whose time grows with the number of experts.
PER_EXPERT = set(LAYER_PHASES) - {"observe", "propagate"}
OVERLAPPED = {"read", "hold", "write", "audit"}  # done by a background thread while a layer is computed


def measure_layer(
    like: str,
    tokens: int,
    experts: int | None,
    device: torch.device,
    *,
    length: int = 8192,
    limit: int | None = None,
    work: Path | None = None,
    rates: dict[str, float] | None = None,
    **sizes: int,
) -> dict[str, Any]:
    """Take one random layer through all phases.

    Args:
        like: a model with published facts in this program, see `random_model.published`.
        tokens: calibration tokens, in sequences of `length`.
        experts: fewer than the model has, for small machines; phases in PER_EXPERT are extrapolated.
        limit: bytes of device memory that may be used, see `plan.solve_memory.device_memory`.
        rates: the device's peak rates, where they were measured before.
        sizes: other sizes, by this program's names for them.

    Returns:
        Seconds by phase; the device's peak rates, in operations and bytes per second, and the phases' shares of
        them; peak memory; the time that the whole model would take.
    """
    config = published(like)
    facts = architecture_for(config, CONFIG)
    whole = sizes_of(facts, config, CONFIG)
    number = whole.moe_layers[0]  # after the dense ones, which are written but not measured
    small = resized(config, layers=number + 1, vocabulary=256, **(sizes | ({"experts": experts} if experts else {})))
    small |= {"bos_token_id": 0, "eos_token_id": 1}
    size = sizes_of(facts, small, CONFIG)
    dtype, settings = forward_dtype(device), Experts()
    length = min(length, tokens)
    clock = Clock(device)
    host: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=work) as name:
        folder = Path(name)
        source = write_random(folder / "model", small, device)
        specs = {key: Spec(info.dtype, info.shape) for key, info in source.tensors.items()}
        plan = make_plan(facts, size, specs, settings, "random", BLOCK)
        memory = device_memory(plan, size, length, accelerated(device), limit or device_limit(device))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        model = LayeredModel(source, facts, size, device, dtype)
        states, recorded = _rows(folder, size, tokens, length, dtype, rows_of_block(accelerated(device)))
        host["read"], source_bytes = _read_cold(source)
        held, host["hold"] = timed(device, lambda: hold(source, layer_names(source, facts, number)))
        with clock.block("materialise"):
            there = held.to(device)
            weights = ExpertWeights(there, facts, size, number, device, dtype)
            context = model.layer(number, there, experts=False)
            layer = context.__enter__()
        with clock.block("observe"):
            observe(model, layer, states, recorded)
        norm = held.tensor(facts.layer(number, facts.norm.tensor)) if plan.folds else None
        with listening(Clock(device)) as inside:
            residents = Residents(memory.resident, memory.unit, memory.smallest)
            solved = solve_layer(model, layer, norm, recorded, settings, weights=weights.unit, residents=residents)
        context.__exit__(None, None, None)
        packed, host["pack"] = timed(device, lambda: layer_tensors(plan, number, held, solved, near=there))
        shard = folder / "shard.safetensors"
        _, host["write"] = timed(device, lambda: write_shard(packed.host, shard, kept_hashes(plan, number, held)))
        made = held_tensors(held, packed.device, shard)
        _, host["audit"] = timed(
            device, lambda: audit_layer(number, facts, size, there, made, device=device, audit=LayerAudit())
        )
        with clock.block("install"):
            context = model.layer(number, made)
            layer = context.__enter__()
        with clock.block("propagate"):
            finish(model, layer, states, "the layer")
        context.__exit__(None, None, None)
        written = (folder / "shard.safetensors").stat().st_size
        peak = peak_memory(device)
    measured = clock.seconds() | inside.seconds() | host
    measured = {phase: measured[phase] for phase in LAYER_PHASES}
    rates = rates or device_rates(device, dtype)
    total = sum(len(rows) for rows in states)
    return {
        "like": like,
        "sizes": dict(size),
        "tokens": total,
        "unit": memory.unit,
        "resident": memory.resident,
        "seconds": measured,
        "rates": rates,
        "shares": shares(measured, size, total, settings, rates=rates, source_bytes=source_bytes, written=written),
        "peak_memory_bytes": peak,
        "source_bytes": source_bytes,
        "written_bytes": written,
        "whole_model": extrapolate(measured, size, whole),
        "machine": machine(device),
    }


def _rows(
    folder: Path, size: Sizes, tokens: int, length: int, dtype: torch.dtype, block: int
) -> tuple[Rows, RecordedRows]:
    lengths = [length] * max(1, tokens // length)

    def rows(name: str, width: int, kind: torch.dtype) -> Rows:
        return Rows(folder / f"{name}.bin", lengths, width, kind, block=block)

    states = rows("states", size["hidden"], dtype)
    generator = torch.Generator().manual_seed(1)
    for i in range(len(states)):
        states[i] = torch.randn(length, size["hidden"], generator=generator)
    return states, recorded_rows(rows, size, dtype)


def _read_cold(source: Checkpoint) -> tuple[float, int]:
    """Seconds to read all the checkpoint's files, and their bytes. The page cache is dropped first, as far as the
    system complies.
    """
    files = {info.file for info in source.tensors.values()}
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    buffer, total, started = bytearray(4 * 2**20), 0, time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while got := stream.readinto(buffer):
                total += got
    return time.perf_counter() - started, total


def shares(
    seconds: dict[str, float],
    size: Sizes,
    tokens: int,
    settings: Experts,
    *,
    rates: dict[str, float],
    source_bytes: int,
    written: int,
) -> dict[str, float]:
    """The share of the peak rate that each phase reaches, from the minimum of operations or bytes that it needs.

    Only the additions and multiplications of matmuls are counted, and of symmetric products only the half that
    is computed. Rounding does more than matmuls, so it has no share.
    """
    experts, hidden, width = size["experts"], size["hidden"], size["width"]
    down_gram, hidden_gram = _half(width) * width, _half(hidden) * hidden
    grid = settings.awq.grid if settings.awq else 0
    forced = 2.0 * tokens * experts * 2 * width * hidden
    sums = 2.0 * tokens * (experts * down_gram + size["chosen"] * hidden_gram + hidden**2)
    norm_rows = 2 * width / row_step(2 * width * experts, SEARCH_ROWS)
    down_rows = hidden / row_step(hidden, WIDTH_SEARCH_ROWS)
    search = 2.0 * grid * experts * (norm_rows * hidden_gram + down_rows * down_gram)
    return {
        "forced pass": forced / seconds["forced pass"] / rates["matmul"],
        "sums": sums / seconds["sums"] / rates["matmul"],
        "search": search / seconds["search"] / rates["matmul_float32"],
        "dequantize": 5.0 * source_bytes / seconds["dequantize"] / rates["copy"],  # reads 1 byte, writes 4 (float32)
        "pack": 1.5 * 3 * experts * hidden * width / seconds["pack"] / rates["copy"],  # reads 1 byte, writes half
        "write": 1.0 * written / seconds["write"] / rates["copy"],
    }


def _half(columns: int) -> float:
    """How many columns each column of a symmetric product is multiplied with, on average: about half of them."""
    return sum((columns - start) * (end - start) for start, end in blocks(columns)) / columns


def extrapolate(seconds: dict[str, float], size: Sizes, whole: Sizes) -> dict[str, float]:
    """Seconds for all layers with experts of the whole model, with as many tokens: one phase after the other, and with
    reading and writing overlapped with computing.
    """
    factor = {phase: whole["experts"] / size["experts"] if phase in PER_EXPERT else 1.0 for phase in seconds}
    layer = {phase: seconds[phase] * factor[phase] for phase in seconds}
    overlapped = sum(layer[phase] for phase in OVERLAPPED)
    computed = sum(layer.values()) - overlapped
    layers = len(whole.moe_layers)
    return {
        "layers": layers,
        "seconds": layers * sum(layer.values()),
        "seconds_overlapped": layers * max(computed, overlapped),
    }
