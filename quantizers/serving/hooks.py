"""Engines that read an output: checks of a plan and of a folder, the GPUs that it fits, `serve-check`.

See `quantizers.hooks`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typer import Typer

    from quantizers.architectures.architecture import Architecture
    from quantizers.architectures.families import Own
    from quantizers.checkpoint.reader import Checkpoint
    from quantizers.checkpoint.remote import HubFiles
    from quantizers.eval.report.schema import Report
    from quantizers.planning.job import Job
    from quantizers.planning.plan import Plan

    from .check import ServingCheck
    from .installed import Rows

FUNCTIONS = {"serve_check": "quantizers.serving.serve_check"}


def commands(app: Typer, calibration: Typer) -> None:
    """Add `serve-check`."""
    from .cli import serve_check

    app.command()(serve_check)


def check_plan(job: Job, one_expert: bool) -> ServingCheck:
    """See `planned.planned_check`."""
    from .planned import planned_check

    return planned_check(job, one_expert)


def check_folder(folder: Path, own: Own, remote: HubFiles | None) -> ServingCheck | None:
    """See `check.check_folder`."""
    from . import check

    return check.check_folder(folder, own, remote)


def ask_server(folder: Path, own: Own) -> dict[str, Any]:
    """See `ask_vllm.ask_vllm`."""
    from .ask_vllm import ask_vllm

    return ask_vllm(folder, own)


def fits(plan: Plan, facts: Architecture, source: Checkpoint) -> dict[str, Any]:
    """See `vram.fits`."""
    from . import vram

    return vram.fits(plan, facts, source)


def fits_on(job: Job, vram: list[str], checked: ServingCheck, budget: int | None, **options: Any) -> dict[str, Any]:
    """See `vram.fits_on`."""
    from .vram import fits_on

    return fits_on(job, vram, checked, budget, **options)


def on_card(report: Report) -> dict[str, Any]:
    """See `card.on_card`."""
    from . import card

    return card.on_card(report)


def look_at_machine(rows: Rows) -> None:
    """See `installed.look_for_servers`."""
    from .installed import look_for_servers

    look_for_servers(rows)
