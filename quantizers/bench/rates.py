"""What a device can do at best: matmuls, copies, and what it costs to start work there and to wait for it.

    python -m quantizers.bench.rates --device cuda --json

`quantize bench layer` states its phases as shares of the first three. The others are what a count of the program's
operations has to assume (`quantize bench count`): each is the fastest of five tries on a quiet device.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from quantizers.device.kind import accelerated

LAUNCHES = 1000


def device_rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """The device's peak rates: operations per second of matmuls in `dtype` and float32, bytes per second of a copy."""
    size = 8192 if device.type == "cuda" else 2048

    def rate(kind: torch.dtype) -> float:
        a = torch.randn(size, size, device=device).to(kind)
        return 2.0 * size**3 / _best(device, lambda: a @ a)

    block = torch.empty(2**30 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(block)
    copy = 2.0 * block.numel() / _best(device, lambda: target.copy_(block))
    return {"matmul": rate(dtype), "matmul_float32": rate(torch.float32), "copy": copy}


def waiting_rates(device: torch.device) -> dict[str, float]:
    """What moving and starting work costs.

    Returns:
        Bytes per second from host memory (`from_pageable`, and on a GPU `from_pinned`); seconds of one small operation
        among a thousand (`launch`), of one look at a number (`synchronisation`), and of a batch of float32 Cholesky
        factorizations (`cholesky`), which has the shape of one unit of MiniMax-M2.1 on a GPU: 16 of 3,072.
    """
    on_card = accelerated(device)
    block = torch.empty(2**28 if on_card else 2**26, dtype=torch.uint8)
    target = torch.empty_like(block, device=device)
    found = {"from_pageable": block.numel() / _best(device, lambda: target.copy_(block))}
    if device.type == "cuda":
        pinned = block.pin_memory()
        found["from_pinned"] = block.numel() / _best(device, lambda: target.copy_(pinned, non_blocking=True))
    one = torch.zeros(1, device=device)

    def launches() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    found["launch"] = _best(device, launches) / LAUNCHES
    found["synchronisation"] = _best(device, lambda: one.add_(1).item())
    count, columns = (16, 3072) if on_card else (2, 256)
    x = torch.randn(count, columns, columns, device=device)
    gram = x @ x.mT + columns * torch.eye(columns, device=device)
    found["cholesky"] = _best(device, lambda: torch.linalg.cholesky_ex(gram))
    return found


def _best(device: torch.device, work: Callable[[], Any], repeats: int = 5) -> float:
    timed(device, work)
    return min(timed(device, work)[1] for _ in range(repeats))


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of some work, and the seconds it took."""
    _wait(device)
    started = time.perf_counter()
    result = work()
    _wait(device)
    return result, time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Print the rates of one device."""
    from quantizers.device.devices import choose_device, forward_dtype, machine

    parser = argparse.ArgumentParser(description="What a device can do at best.")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    given = parser.parse_args()
    device = choose_device(given.device)
    rates = device_rates(device, forward_dtype(device)) | waiting_rates(device)
    if given.json:
        print(json.dumps({"rates": rates, "machine": machine(device)}, indent=1))
        return
    for name, rate in rates.items():
        print(f"{name:16}{rate:.3g}")


if __name__ == "__main__":
    main()
