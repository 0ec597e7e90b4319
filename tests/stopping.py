"""`quantize` with the rule for small layers lowered, so that threads differ; after a layer rank 0 may be interrupted.

python tests/stopping.py run RECIPE --output DIR        or below torchrun
STOP_AFTER_LAYER=N    SIGTERM as soon as layer N is in the journal
"""

from __future__ import annotations

import os
import signal
from typing import Any

from quantizers.cli import main as cli
from quantizers.device import devices
from quantizers.run import layer_loop

devices.SMALL_LAYER = 0
real, last = layer_loop.write_json, int(os.environ.get("STOP_AFTER_LAYER", "-1"))


def stop_after(path: Any, entry: Any) -> None:
    real(path, entry)
    if entry["layer"] == last:
        os.kill(os.getpid(), signal.SIGTERM)


layer_loop.write_json = stop_after

if __name__ == "__main__":
    cli.main()
