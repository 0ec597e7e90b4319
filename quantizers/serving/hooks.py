"""Engines that read an output: checks of a plan and of a folder, the GPUs that it fits, `serve-check`.

See `quantizers.hooks`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import device
    from typer import Typer

    from quantizers.architectures.architecture import Architecture
    from quantizers.architectures.families import Own
    from quantizers.checkpoint.reader import Checkpoint
    from quantizers.checkpoint.remote import HubFiles
    from quantizers.eval.report.schema import Report, Serving
    from quantizers.formats.format import Format
    from quantizers.model.streamed_model import StreamedModel
    from quantizers.planning.job import Job
    from quantizers.planning.plan import Plan
    from quantizers.recipe.cards import Card

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


def served_model(checkpoint: Checkpoint, facts: Architecture, device: device, card: Card) -> StreamedModel:
    """See `as_served.ServedModel`."""
    from .as_served import ServedModel

    return ServedModel(checkpoint, facts, device, card)


def kernels_of(model: StreamedModel, checkpoint: Checkpoint, experts: Format | None) -> dict[str, str]:
    """See `as_served.kernels_of`."""
    from . import as_served

    return as_served.kernels_of(model, checkpoint, experts)


def how_to_serve(plan: Plan, facts: Architecture, source: Checkpoint, name: str) -> Serving:
    """See `section.how_to_serve`."""
    from . import section

    return section.how_to_serve(plan, facts, source, name)


def fits_on(job: Job, vram: list[str], checked: ServingCheck, budget: int | None, **options: Any) -> dict[str, Any]:
    """See `vram.fits_on`."""
    from .vram import fits_on

    return fits_on(job, vram, checked, budget, **options)


def on_card(report: Report, place: str) -> dict[str, Any]:
    """See `card.on_card`."""
    from . import card

    return card.on_card(report, place)


def plan_remarks(numbers: dict[str, Any]) -> list[str]:
    """Say why `plan` gives no command for vLLM; nothing if it does."""
    from .commands import without_vllm

    if "vllm" in numbers["servers"]:
        return []
    return [without_vllm(numbers["servers"], transformers=numbers.get("transformers", True))]


def next_commands(report: Report, folder: str) -> list[str]:
    """The command that serves a finished output, if vLLM knows the family."""
    return [f"vllm serve {folder}"] if "vllm" in report.serving.servers else []


def look_at_machine(rows: Rows) -> None:
    """See `installed.look_for_servers`."""
    from .installed import look_for_servers

    look_for_servers(rows)
