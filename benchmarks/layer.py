"""One layer of a model's real size beside the device's peak rates, and under torch's profiler.

    python benchmarks/layer.py minimax-m2.1-fp8-int4 --device cuda --tokens 16384
    python benchmarks/layer.py minimax-m2.1-fp8-int4 --device cuda --experts 16 --trace trace.json.gz

The layer has random weights, and goes through the code of a run; from its phases follows the time of the whole run, see
layer_measurement.py. The rates are measured in the same process: each is the best of five tries on a quiet device. A
trace opens in https://ui.perfetto.dev; gaps between kernels are where the device waits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from layer_measurement import measure_layer
from torch.profiler import ProfilerActivity, profile

from quantizers.device.devices import choose_device, forward_dtype, is_accelerator, use_threads
from quantizers.planning.job import prepare
from quantizers.system.formatting import parse_bytes, size, text_table
from quantizers.system.progress import duration

ROWS = 25  # operations of a profile that are printed
LAUNCHES = 1000


def device_rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Peak rates: operations per second of matmuls in `dtype` and in float32, bytes per second of a copy on the device
    and to it, seconds of a small operation among many (`launch`), and of a batch of Cholesky factorizations.
    """
    large = is_accelerator(device)
    size, number = (8192, 2**30) if large else (1024, 2**26)

    def rate(kind: torch.dtype) -> float:
        a = torch.randn(size, size, device=device).to(kind)
        return 2.0 * size**3 / _best(device, lambda: a @ a)

    block = torch.empty(number, dtype=torch.uint8, device=device)
    target, host = torch.empty_like(block), torch.empty(number, dtype=torch.uint8)
    small = torch.zeros(1, device=device)
    count, columns = (16, 3072) if large else (2, 256)
    x = torch.randn(count, columns, columns, device=device)
    hessian = x @ x.mT + columns * torch.eye(columns, device=device)
    return {
        "matmul": rate(dtype),
        "matmul_float32": rate(torch.float32),
        "copy": 2.0 * number / _best(device, lambda: target.copy_(block)),
        "from_host": number / _best(device, lambda: target.copy_(host)),
        "launch": _best(device, lambda: [small.add_(1) for _ in range(LAUNCHES)]) / LAUNCHES,
        "cholesky": _best(device, lambda: torch.linalg.cholesky_ex(hessian)),
    }


def _best(device: torch.device, work: Callable[[], Any], repeats: int = 5) -> float:
    return min(_seconds(device, work) for _ in range(repeats + 1))


def _seconds(device: torch.device, work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def shares(result: dict[str, Any], rates: dict[str, float]) -> dict[str, float]:
    """The share of the peak rate of matmuls that the two phases reach, by the closed form of planning/estimate.py."""
    sizes, seconds = result["sizes"], {row["phase"]: row["seconds"] for row in result["phases"]}
    experts, hidden, width, chosen = (float(sizes[name]) for name in ("experts", "hidden", "width", "chosen"))
    work = {
        "forced pass": 4 * experts * hidden * width,
        "Hessians": experts * width**2 + (chosen + 1) * hidden**2,
    }
    return {
        phase: result["tokens"] * operations / seconds[phase] / rates["matmul"] for phase, operations in work.items()
    }


def rates_text(rates: dict[str, float]) -> str:
    """The rates in one line."""
    return (
        f"peak: matmul {rates['matmul'] / 1e12:.3g} TFLOP/s, float32 {rates['matmul_float32'] / 1e12:.3g}; copy "
        f"{rates['copy'] / 1e9:.3g} GB/s, from the host {rates['from_host'] / 1e9:.3g}; launch "
        f"{rates['launch'] * 1e6:.1f} us; Cholesky batch {rates['cholesky'] * 1e3:.0f} ms"
    )


def measured_table(result: dict[str, Any]) -> str:
    """The phases of a layer, and the time of the run that follows."""
    rows = [(row["phase"], f"{row['seconds']:.2f}", row["grows_with"], f"{row['run']:.2f}") for row in result["phases"]]
    sizes, dense = result["sizes"], result["dense_layers"]
    evaluated = f" and {result['held_out']:,} evaluation tokens" if result["held_out"] else ""
    others = f" and {dense} without at {_duration(result['dense_layer'])}" if dense else ""
    threads = result["machine"]["threads"]
    lines = [
        f"measured on {result['machine']['device']}, {threads} thread{'s' if threads > 1 else ''}: one layer of "
        f"random weights, {sizes['experts']} of {result['run_experts']} experts of {sizes['hidden']} x "
        f"{sizes['width']}, {result['tokens']:,} of {result['run_tokens']:,} calibration tokens{evaluated}",
        "",
        text_table(("phase", "seconds", "grows with", "in a layer of the run"), rows),
        "",
        f"peak memory {size(result['peak_memory_bytes'])}",
        f"the whole run: {duration(result['run'])}, extrapolated: {result['layers']} layers with experts at "
        f"{_duration(result['layer'])} each{others}",
        "each phase is multiplied by the ratio of what it grows with; reading overlaps with computing; logits and "
        "the last reading of the output are not included",
    ]
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    return duration(seconds) if seconds >= 60 else f"{seconds:.2f} s"


def main() -> None:
    """Measure one layer and the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--tokens", type=int, help="calibration tokens; one token chunk by default")
    parser.add_argument("--experts", type=int, help="fewer than the model has")
    parser.add_argument("--device-memory", help="bytes of the device that may be used, such as 20GiB")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto")
    parser.add_argument("--trace", help="file for a trace of all operations; .json.gz to have it compressed")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    given = parser.parse_args()
    job, device = prepare(given.recipe, offline_facts=True), choose_device(given.device)
    limit = parse_bytes(given.device_memory, "--device-memory") if given.device_memory else None
    use_threads(job.facts)
    rates = device_rates(device, forward_dtype(device))
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_accelerator(device)
    watched: AbstractContextManager[Any] = profile(activities=activities) if given.trace else contextlib.nullcontext()
    with watched as profiled:
        result = measure_layer(job, device, tokens=given.tokens, experts=given.experts, limit=limit)
    result |= {"rates": rates, "shares": shares(result, rates)}
    if given.json:
        print(json.dumps(result, indent=1))
    else:
        reached = ", ".join(f"{phase} {share:.0%}" for phase, share in result["shares"].items())
        print(f"{measured_table(result)}\n{rates_text(rates)}\nof the matmul's peak: {reached}")
    if given.trace:
        profiled.export_chrome_trace(given.trace)
        by = "self_device_time_total" if is_accelerator(device) else "self_cpu_time_total"
        print(profiled.key_averages().table(sort_by=by, row_limit=ROWS))


if __name__ == "__main__":
    main()
