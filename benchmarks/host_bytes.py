"""Gigabytes that a host passes in a CPU-second: read and hashed, dequantized, packed, saved, read back.

    python benchmarks/host_bytes.py --experts 24

By the program's own functions, on random experts of MiniMax-M2.1's size, in FP8 blocks and as INT4 in groups of 32. The
best of some repeats is printed, of the CPU time of all threads; files come from the page cache.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quantizers.architectures.matrices import MATRICES
from quantizers.checkpoint.loaded_tensors import load_tensors
from quantizers.checkpoint.reader import Checkpoint, as_bytes
from quantizers.checkpoint.safetensors_header import read_header
from quantizers.formats.format import PACKED, SCALE
from quantizers.formats.fp8 import Fp8Blocks
from quantizers.formats.packed_integers import Integers
from quantizers.stitch.write.shard import changes, read_back, write_shard
from quantizers.system.formatting import text_table

HIDDEN, WIDTH, BAND = 3072, 1536, 128
SHAPES = {matrix: (HIDDEN, WIDTH) if matrix == "down" else (WIDTH, HIDDEN) for matrix in MATRICES}


def best(work: Callable[[], Any], repeats: int) -> float:
    """CPU seconds of all threads, at best."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    seconds = []
    for _ in range(repeats):
        before = spent()
        work()
        seconds.append(spent() - before)
    return min(seconds)


def measure(folder: Path, experts: int, repeats: int) -> dict[str, float]:
    """Gigabytes in a CPU-second, by the step; of INT4's packing those of its codes, a byte each."""
    fp8, int4, draw = Fp8Blocks(), Integers(4, 32), torch.Generator().manual_seed(0)
    source: dict[str, torch.Tensor] = {}
    codes: dict[str, torch.Tensor] = {}
    for expert in range(experts):
        for matrix, shape in SHAPES.items():
            raw = torch.randint(0, 120, shape, dtype=torch.uint8, generator=draw)
            source[f"{expert}.{matrix}.weight"] = raw.view(torch.float8_e4m3fn)
            source[f"{expert}.{matrix}.{SCALE}"] = torch.rand(fp8.scale_shape(shape), generator=draw)
            codes[f"{expert}.{matrix}"] = (raw % 16).view(torch.int8) - 8
    save_file(source, folder / "source.safetensors")
    infos = read_header(folder / "source.safetensors")
    checkpoint, buffer = Checkpoint(folder, str(folder), {}, infos), None
    buffer = load_tensors(checkpoint, infos).buffer  # whose pages are there from now on
    numbers, read = sum(len(as_bytes(c)) for c in codes.values()), sum(info.size for info in infos.values())

    def dequantize() -> None:
        for name in codes:
            weight, scale = source[f"{name}.weight"], source[f"{name}.{SCALE}"]
            for first in range(0, len(weight), BAND):
                fp8.unpack([weight[first : first + BAND], scale[first // BAND : first // BAND + 1]], weight.shape[1])

    packed = {f"{name}.{PACKED}": int4.pack(c) for name, c in codes.items()}
    shard = folder / "output.safetensors"
    digest, saved = write_shard(packed, shard), sum(p.nbytes for p in packed.values())
    steps: Mapping[str, tuple[Callable[[], Any], int]] = {
        "read and hashed (SHA-256)": (lambda: load_tensors(checkpoint, infos, None, buffer), read),
        "dequantized from FP8 on a CPU": (dequantize, numbers),
        "packed as INT4 on a CPU": (lambda: [int4.pack(c) for c in codes.values()], numbers),
        "saved, and read back": (lambda: write_shard(packed, shard), saved),
        "read back alone": (lambda: read_back(shard), saved),
        "compared with a shard's digest": (lambda: changes(shard, digest), saved),
    }
    return {name: round(size / best(work, repeats) / 1e9, 2) for name, (work, size) in steps.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rates = measure(Path(folder), options.experts, options.repeats)
    print(json.dumps(rates) if options.json else text_table(["bytes", "GB in a CPU-second"], [*rates.items()]))


if __name__ == "__main__":
    main()
