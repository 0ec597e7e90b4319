"""What scripts/first_hour_gpu.sh asks of JSON that the program printed: one line each.

    python scripts/first_hour_figures.py machine VERSION.json DEVICE
    python scripts/first_hour_figures.py source RECIPE                     the folder of the recipe's model
    python scripts/first_hour_figures.py least RECIPE DEVICE               the least --device-memory that a run takes
    python scripts/first_hour_figures.py gates REPORT.json REPORT.json EVALUATION.json
    python scripts/first_hour_figures.py layer LAYER.json
    python scripts/first_hour_figures.py full FULL.json

The exit code is 1 where two sides differ too much.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

KL_RATIO = 1.1  # a GPU adds in another order, so some codes differ, and KL by some percent


def machine(file: str, device: str) -> int:
    """The device's name and memory, and the versions that matter there."""
    about = _read(file)
    name = device if ":" in device or device == "cpu" else f"{device}:0"
    card = next((entry for entry in about["devices"] if entry["device"] == name), None)
    if card is None:
        print(f"no device {name}")
        return 1
    versions = about["versions"]
    built = f", CUDA {about['cuda']}" if about["cuda"] else ""
    print(f"{card['name']}, {card['bytes'] / 2**30:.0f} GiB; torch {versions['torch']}{built}")
    return 0


def source(recipe: str) -> int:
    """The folder of a recipe's model."""
    from quantizers.planning.job import prepare

    job = prepare(recipe)
    print(job.opened.folder)
    return 0


def least(recipe: str, device: str) -> int:
    """The bytes of a device with which as little as possible is held there."""
    from quantizers.calibration.load_set import load_set
    from quantizers.planning.device_memory import device_memory
    from quantizers.planning.job import prepare
    from quantizers.recipe.read import set_location

    job = prepare(recipe)
    place = set_location(job.recipe.calibration_set, job.path)
    data = load_set(place, job.opened.folder, job.recipe.source.trusts_tokenizer, job.recipe.calibration_tokens)
    tokens = sum(len(sample.tokens) for sample in data.samples)
    memory = device_memory(job.plan, job.facts, data.lengths[-1], device != "cpu", None, tokens)
    print(f"{memory.smallest}B")
    return 0


def gates(ours: str, cpus: str, evaluation: str) -> int:
    """Whether two runs passed the same gates, and how far both are from the source by one evaluation."""
    first, second = ({gate["name"]: gate["passed"] for gate in _read(report)["gates"]} for report in (ours, cpus))
    kl = [candidate["kl"]["mean"] for candidate in _read(evaluation)["candidates"]]
    different = sorted(name for name in first | second if first.get(name) != second.get(name))
    agreement = f"gates differ: {', '.join(different)}" if different else f"the same {len(first)} gates"
    print(f"{agreement}; KL {kl[0]:.5f}, of the CPU's output {kl[1]:.5f}")
    return int(bool(different) or max(kl) > KL_RATIO * min(kl))


def layer(file: str) -> int:
    """Seconds of a layer and of the whole run, and the device's rates."""
    measured = _read(file)
    seconds = sum(row["seconds"] for row in measured["phases"])
    rates = measured["rates"]
    run = measured["run"] / 3600
    print(
        f"{seconds:.2f} s for {measured['tokens']:,} tokens and {measured['sizes']['experts']} experts, {run:.1f} h "
        f"for the run; matmul {rates['matmul'] / 1e12:.3g}, float32 {rates['matmul_float32'] / 1e12:.3g} TFLOP/s, "
        f"copy {rates['copy'] / 1e9:.0f} GB/s, launch {rates['launch'] * 1e6:.1f} us"
    )
    return 0


def full(file: str) -> int:
    """Layers that are done of a run at real size, their time and memory, and what was resumed."""
    measured = _read(file)
    done, layers = measured["layers"]
    interruptions = [
        process for process in measured["processes"] if process["command"] == "run" and process["ended_by"]
    ]
    ends = ", ".join(f"{process['ended_by']} after layer {process['layers_done']}" for process in interruptions)
    same = "not compared yet"
    if reference := measured.get("reference"):
        bytes_of = "the same bytes" if reference["same"] else "OTHER bytes"
        same = f"{bytes_of} in {reference['layers']} layers as without interruption"
    print(
        f"{done} of {layers} layers, {measured['layer_seconds']:.1f} s each; peak memory "
        f"{measured['memory'][0] / 1e9:.1f} GB of the host, {measured['device_memory'] / 1e9:.1f} GB of the device; "
        f"{ends or 'not interrupted'}; {same}"
    )
    return int(done < layers or not (reference and reference["same"]))


def _read(file: str) -> Any:
    return json.loads(Path(file).read_text())


COMMANDS: dict[str, Callable[..., int]] = {
    command.__name__: command for command in (machine, source, least, gates, layer, full)
}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv[1]](*sys.argv[2:]))
