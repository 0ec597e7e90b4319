"""`quantize` with the rule for small layers lowered, so that threads differ; a process may stop at a given place.

python tests/stopping.py run RECIPE --output DIR        or below torchrun
STOP_AFTER_LAYER=N    rank 0 gets SIGTERM as soon as layer N is in the journal
STOP_AFTER_MEASURING=N  the same as soon as layer N is measured for a budget
KILLED_RANK=N         rank N gets SIGKILL as it begins to solve the second layer
HALTED_RANK=N         rank N does not begin to solve the second layer, and waits for what happens
KILLED_ATTEMPT=N      only when torchrun has started the processes N times before
SLOW_LAST_WORDS=S     a process that ends waits S seconds before it says why
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

from plotted import drawn_once

from quantizers.budget import measure
from quantizers.cli import main as cli
from quantizers.device import devices
from quantizers.distributed.torch_group import DistributedGroup
from quantizers.eval.report import plots
from quantizers.pipeline import layer_entry, quantizer

real_message, pause = DistributedGroup.first_failure, float(os.environ.get("SLOW_LAST_WORDS", "0"))


def slow_message(*arguments: Any) -> Any:
    time.sleep(pause)
    return real_message(*arguments)


DistributedGroup.first_failure = slow_message
devices.SMALL_LAYER = 0
plots.draw = drawn_once(plots.draw)  # as in the tests' own process
real = layer_entry.write_json
real_solve, layers = quantizer.solve_layer, iter(range(1_000_000))


def stop_after(last: int, path: Any, entry: Any) -> None:
    real(path, entry)
    if isinstance(entry, dict) and entry.get("layer") == last:
        os.kill(os.getpid(), signal.SIGTERM)


def die_in_the_second(*arguments: Any, **named: Any) -> Any:
    if next(layers) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return real_solve(*arguments, **named)


def halt_in_the_second(*arguments: Any, **named: Any) -> Any:
    while next(layers) >= 1:
        named["check"]()
        time.sleep(0.01)
    return real_solve(*arguments, **named)


layer_entry.write_json = partial(stop_after, int(os.environ.get("STOP_AFTER_LAYER", "-1")))
measure.write_json = partial(stop_after, int(os.environ.get("STOP_AFTER_MEASURING", "-1")))
if os.environ.get("HALTED_RANK", "nobody") == os.environ.get("RANK"):
    quantizer.solve_layer = halt_in_the_second
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
if os.environ.get("KILLED_RANK", "nobody") == os.environ.get("RANK") and (
    os.environ.get("KILLED_ATTEMPT", attempt) == attempt
):
    quantizer.solve_layer = die_in_the_second

if __name__ == "__main__":
    cli.main()
