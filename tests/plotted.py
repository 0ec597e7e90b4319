"""Plots, which take most of the time of a small run, in fewer copies."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path

from made_once import write_whole

from quantizers.eval.report.schema import Report
from quantizers.output.manifest import as_read

# What plots show, in a report's words, and a PNG of one pixel.
PLOTTED = (
    *("calibration", "coverage", "kl", "categories", "families", "positions", "long", "hidden_error", "router"),
    "weight_error",
)
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")
Draw = Callable[[Report], tuple[dict[str, bytes], list[str]]]


def drawn_once(real: Draw, folder: Path | None = None) -> Draw:
    """`plots.draw`, but plots of random models are a pixel and a checksum of what they would show.

    Those of the trained model and of models with dense layers are drawn, once for all equal reports: of this process,
    and of others that have the same `folder`.
    """
    drawn: dict[str, tuple[dict[str, bytes], list[str]]] = {}

    def draw(made: Report) -> tuple[dict[str, bytes], list[str]]:
        report = as_read(made.as_dict())
        layers = [{key: value for key, value in row.items() if key != "seconds"} for row in report.get("layers", ())]
        name = Path(report["source"]["model"]).name
        shown = {key: report.get(key) for key in PLOTTED} | {"name": name, "layers": layers}
        checksum = hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()
        if name == "tiny-minimax-m2" or report.get("plan", {}).get("dense_layers"):
            kept = folder and folder / checksum
            if checksum not in drawn and kept and kept.exists():
                drawn[checksum] = pickle.loads(kept.read_bytes())
            elif checksum not in drawn:
                drawn[checksum] = real(made)
                if kept:
                    write_whole(kept, pickle.dumps(drawn[checksum]))
            return drawn[checksum]
        plots_of = {"calibration": "calibration", "coverage": "coverage", "kl": "fidelity", "layers": "layers"}
        return {plot: PIXEL + checksum.encode() for key, plot in plots_of.items() if report.get(key)}, []

    return draw
