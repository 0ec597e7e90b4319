"""One small random layer under torch's profiler: the operations that take longest, and a trace to look at.

    python scripts/profile_layer.py --device cuda --like minimax-m2.1 --experts 16 --tokens 8192 --trace trace.json.gz

A CPU takes a column at a time for each expert, millions of operations at real width: give --hidden 128 --width 64
there. The trace opens in https://ui.perfetto.dev. Gaps between kernels are where the device waits for Python.
"""

from __future__ import annotations

import argparse

from torch.profiler import ProfilerActivity, profile

from quantizers.bench.layer import measure_layer
from quantizers.bench.rates import device_rates
from quantizers.device.devices import choose_device, forward_dtype

ROWS = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--like", default="minimax-m2.1")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, help="another size than the model's")
    parser.add_argument("--width", type=int, help="of the experts, another size than the model's")
    parser.add_argument("--trace", required=True, help="file for the trace; .json.gz to have it compressed")
    given = parser.parse_args()
    device = choose_device(given.device)
    sizes = {name: size for name in ("hidden", "width") if (size := getattr(given, name))}
    on_card = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]
    rates = device_rates(device, forward_dtype(device))  # before the profile, of which it would be the largest part
    with profile(activities=kinds) as seen:
        measure_layer(
            given.like, given.tokens, given.experts, device, length=min(given.tokens, 8192), rates=rates, **sizes
        )
    averages = seen.key_averages()
    print(averages.table(sort_by="self_device_time_total" if on_card else "self_cpu_time_total", row_limit=ROWS))
    total = sum(event.self_device_time_total if on_card else event.self_cpu_time_total for event in averages)
    print(f"{total / 1e6:.2f} s in {sum(event.count for event in averages):,} operations")
    seen.export_chrome_trace(given.trace)


if __name__ == "__main__":
    main()
