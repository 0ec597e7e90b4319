"""What scripts/first_hour_gpu.sh asks of JSON that the program printed: one line each.

    python scripts/first_hour_figures.py machine VERSION.json DEVICE
    python scripts/first_hour_figures.py rates RATES.json
    python scripts/first_hour_figures.py source RECIPE                     where the recipe's model lies
    python scripts/first_hour_figures.py least RECIPE DEVICE               the least --device-memory that a run takes
    python scripts/first_hour_figures.py gates REPORT.json REPORT.json EVALUATION.json
    python scripts/first_hour_figures.py card LAYER.json                     its name for bench count, if it has one
    python scripts/first_hour_figures.py seconds LAYER.json
    python scripts/first_hour_figures.py layer LAYER.json COUNT.json

The exit code is 1 where two sides differ too much.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

KL_RATIO = 1.1  # a GPU adds in another order, so some codes differ, and KL by some percent
COUNT_RATIO = 2.0  # beyond it a rate is wrong, or something is done that was not counted
ELSEWHERE = {"read", "write"}  # phases of the disk, which a count states apart


def machine(file: str, device: str) -> int:
    """The device's name and memory, and the versions that matter there."""
    found = _read(file)
    name = device if ":" in device or device == "cpu" else f"{device}:0"
    card = next((one for one in found["devices"] if one["device"] == name), None)
    if card is None:
        print(f"no device {name}")
        return 1
    versions = found["versions"]
    built = f", CUDA {found['cuda']}" if found["cuda"] else ""
    print(f"{card['name']}, {card['bytes'] / 2**30:.0f} GiB; torch {versions['torch']}{built}")
    return 0


def rates(file: str) -> int:
    """Peak rates, and what waiting costs."""
    found = _read(file)["rates"]
    copies = (
        f"{kind.replace('_', ' ')} {found[kind] / 1e9:.1f}"
        for kind in ("from_pageable", "from_pinned")
        if kind in found
    )
    print(
        f"matmul {found['matmul'] / 1e12:.3g}, float32 {found['matmul_float32'] / 1e12:.3g} Top/s; "
        f"copy {found['copy'] / 1e9:.0f}, {', '.join(copies)} GB/s; launch {found['launch'] * 1e6:.1f} µs, "
        f"synchronisation {found['synchronisation'] * 1e6:.0f} µs; Cholesky batch {found['cholesky'] * 1e3:.0f} ms"
    )
    return 0


def source(recipe: str) -> int:
    """Where the model of a recipe lies."""
    from quantizers.plan.job import prepare

    job = prepare(recipe)
    print(job.opened.folder)
    return 0


def least(recipe: str, device: str) -> int:
    """The bytes of a device with which as little as possible is held there."""
    from quantizers.calibration.load_set import load_set
    from quantizers.plan.job import prepare
    from quantizers.plan.solve_memory import device_memory
    from quantizers.recipe.read import set_location

    job = prepare(recipe)
    place = set_location(job.recipe.calibration_set, job.path)
    data = load_set(place, job.opened.folder, job.recipe.source.trusts_tokenizer, job.recipe.calibration_tokens)
    tokens = sum(len(sample.tokens) for sample in data.samples)
    memory = device_memory(job.plan, job.sizes, data.lengths[-1], device != "cpu", None, tokens)
    print(f"{memory.smallest}B")
    return 0


def gates(ours: str, cpus: str, evaluation: str) -> int:
    """Whether two runs passed the same gates, and how far both are from the source by one evaluation."""
    first, second = ({gate["name"]: gate["passed"] for gate in _read(report)["gates"]} for report in (ours, cpus))
    kl = [one["kl"]["mean"] for one in _read(evaluation)["candidates"]]
    different = sorted(name for name in first | second if first.get(name) != second.get(name))
    said = f"gates differ: {', '.join(different)}" if different else f"the same {len(first)} gates"
    print(f"{said}; KL {kl[0]:.5f}, of the CPU's output {kl[1]:.5f}")
    return int(bool(different) or max(kl) > KL_RATIO * min(kl))


def card(file: str) -> int:
    """The measured GPU's name among the cards that are counted."""
    from quantizers.cost.cards import CARDS

    words = _read(file)["machine"]["device"].lower().replace("-", " ").split()  # a GH200 is no H200
    print(next((one for one in CARDS if set(one.split("-")) <= set(words)), ""))
    return 0


def seconds(file: str) -> int:
    """Seconds of a layer on a device that is not counted."""
    found = _read(file)
    print(f"{sum(found['seconds'].values()):.2f} s; {found['machine']['device']} is no card of bench count; see CARD")
    return 0


def layer(measured: str, counted: str) -> int:
    """Seconds of a layer beside the count's, in the phases that both have."""
    took, (name, wanted) = _read(measured)["seconds"], next(iter(_read(counted)["cards"].items()))
    common = [phase for phase in took if phase in wanted["phases"] and phase not in ELSEWHERE]
    all_took, all_wanted = (sum(part[phase] for phase in common) for part in (took, wanted["phases"]))
    far = [
        phase
        for phase in common
        if took[phase] > COUNT_RATIO * wanted["phases"][phase] and took[phase] > 0.02 * all_took
    ]
    print(
        f"{all_took:.2f} s, counted {all_wanted:.2f} s ({name}), ratio {all_took / all_wanted:.2f}; "
        f"beyond {COUNT_RATIO:g} times: {', '.join(far) or 'no phase'}"
    )
    return int(all_took > COUNT_RATIO * all_wanted and not name.startswith("CPU"))


def _read(file: str) -> Any:
    return json.loads(Path(file).read_text())


COMMANDS: dict[str, Callable[..., int]] = {
    each.__name__: each for each in (machine, rates, source, least, gates, card, seconds, layer)
}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv[1]](*sys.argv[2:]))
