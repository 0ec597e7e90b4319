"""Rehearsal of a run's end, before its first layer: what a name, a side file or a library breaks is met now.

Report, card, page and pictures are made once, into a folder that is thrown away, with figures that stand for those that
are not measured yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from eval.fidelity.metrics import Measured, Text
from eval.fidelity.scoring import HeldOut
from eval.serving.check import ServingCheck
from quantizers.architectures.matrices import MATRICES
from quantizers.budget.choice import describe_choice
from quantizers.calibration.samples import CalibrationData, category_names
from quantizers.checkpoint.reader import side_files
from quantizers.planning.allocation import Allocation
from quantizers.planning.job import Job
from quantizers.system.errors import InputError, QuantizeError
from stitch.audit.checkpoint import Audit
from stitch.write.digests import ShardDigest

from .report import found_report
from .report_files import write_report


def rehearse(
    job: Job,
    planned: Mapping[str, Any],
    data: CalibrationData,
    evaluation: HeldOut | None,
    engines: ServingCheck,
    texts: Mapping[str, str],
) -> None:
    """Make report, card, page and pictures of stand-in figures.

    Args:
        planned: of `report.planned_report`.
        evaluation: None if nothing is measured.
        engines: of `servable.planned_check`.
        texts: files that the run adds, see `Resolved.texts`.

    Raises:
        InputError: something that would end the run after its last layer. A picture that fails is only a note.
    """
    categories = len(category_names(data.samples))
    layers = [_entry(number, job, categories) for number in range(job.sizes["layers"])]
    written = {job.plan.shard_file(part): ShardDigest(bytes=0, sha256="", tensors="") for part in job.plan.parts}
    try:
        figures = evaluation.figures(_measured(job, evaluation.texts), "the output") if evaluation else None
        report = dict(planned) | found_report(job, data, figures, layers, written, Audit(), engines)
        report |= {"seconds": {"this_process": 0.0, "layers": 0.0}, "peak_memory_bytes": 0}
        if job.allocation:
            measurements = [_measurement(number, job.allocation) for number in job.sizes.moe_layers]
            report["schemes"] = describe_choice(job.allocation, measurements)
        with TemporaryDirectory() as folder:
            write_report(Path(folder), report, texts)
        for file in side_files(job.opened.folder):  # which are copied at the end
            file.open("rb").close()
    except QuantizeError:  # which is a line of its own, such as of a full disk
        raise
    except Exception as failure:
        words = " ".join(str(failure).split())[:300]
        raise InputError(
            f"{job.path}: this run would fail after its last layer ({type(failure).__name__}: {words}), so it was not "
            "begun; correct what is named there, or report it"
        ) from failure


def _entry(number: int, job: Job, categories: int) -> dict[str, Any]:
    """The journal's entry of a layer in which every expert got the same."""
    routed = number not in job.sizes.dense
    return {
        "layer": number,
        "proof": 0.0,
        "seconds": {},
        "error": {"gate_up_rounding": 0.1, "down_rounding": 0.1} if routed else {},
        "fallbacks": [],
        "leaning": None,
        "closeness": None,
        "routed": [[1] * job.sizes["experts"]] * categories if routed else [],
    }


def _measurement(number: int, allocation: Allocation) -> dict[str, Any]:
    """The measurement for a budget of a layer in which every scheme loses the same."""
    losses = dict.fromkeys(map(str, allocation.candidates), 0.1)
    by_matrix = {scheme: dict.fromkeys(MATRICES, 0.1) for scheme in losses}
    figures = {"kl": 0.1, "disturbance": 0.1, "loss": losses, "error": losses, "by_matrix": by_matrix}
    return figures | {"layer": number, "experts": 1}


def _measured(job: Job, texts: list[Text]) -> Measured:
    """An output as close to its source in every token."""
    loss = np.ones(sum(len(text.tokens) - 1 for text in texts))
    parts = [
        {"agreement": None if number in job.sizes.dense else 1.0, "hidden_error": 0.1}
        for number in range(job.sizes["layers"])
    ]
    return Measured(loss, loss, loss / 100, loss.astype(bool), [part | {"long": part} for part in parts])
