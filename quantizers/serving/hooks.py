"""Engines that read an output: what this room adds to the program, and which file does it; see `quantizers.hooks`.

Rules that the files share: engines.py says which scheme an engine gives each module, kernels.py which kernel computes
with it, memory.py what fits on a GPU and host_experts.py what in host memory, server_commands.py how a server is
started.
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

    from .findings import ServingCheck
    from .installed import Rows

FUNCTIONS = {"serve_check": "quantizers.serving.serve_check"}


def commands(app: Typer, calibration: Typer) -> None:
    """Add `serve-check`, which compares a running server with our evaluation: cli.py, and serve_check.py."""
    from . import cli

    app.command()(cli.serve_check)


# Would servers read the output? --------------------------------------------------------------------------------------


def check_plan(job: Job, one_expert: bool) -> ServingCheck:
    """Findings on a planned output, before anything long begins: planned.py."""
    from . import planned

    return planned.planned_check(job, one_expert)


def check_folder(folder: Path, own: Own, remote: HubFiles | None) -> ServingCheck | None:
    """Findings on a checkpoint folder, from config.json and headers: check.py."""
    from . import check

    return check.check_folder(folder, own, remote)


def ask_server(folder: Path, own: Own) -> dict[str, Any]:
    """Compare our rules with those of the vLLM that is installed here: ask_vllm.py."""
    from . import ask_vllm

    return ask_vllm.ask_vllm(folder, own)


def look_at_machine(rows: Rows) -> None:
    """Add rows to `doctor` on servers that are installed here: installed.py."""
    from . import installed

    installed.look_for_servers(rows)


# On which GPUs does it fit, and with which command? -----------------------------------------------------------------


def fits_on(job: Job, gpus: list[str], checked: ServingCheck, budget: int | None, **options: Any) -> dict[str, Any]:
    """Estimate for `plan --vram` the memory on each of the GPUs, and changes that make the output fit: vram.py."""
    from . import vram

    return vram.fits_on(job, gpus, checked, budget, **options)


def how_to_serve(plan: Plan, facts: Architecture, source: Checkpoint, name: str) -> Serving:
    """The section `serving` of report.json, with common GPUs that the output fits: report_section.py."""
    from . import report_section

    return report_section.how_to_serve(plan, facts, source, name)


def on_card(report: Report, place: str) -> dict[str, Any]:
    """Values about servers for model card and HTML report: card.py."""
    from . import card

    return card.on_card(report, place)


def plan_remarks(numbers: dict[str, Any]) -> list[str]:
    """The reason why `plan` gives no command for vLLM: server_commands.py."""
    from . import server_commands

    return server_commands.plan_remarks(numbers)


def next_commands(report: Report, folder: str) -> list[str]:
    """The command in the last lines of `run` that serves the output: server_commands.py."""
    from . import server_commands

    return server_commands.next_commands(report, folder)


# What does a card compute? ------------------------------------------------------------------------------------------


def served_model(checkpoint: Checkpoint, facts: Architecture, device: device, card: Card) -> StreamedModel:
    """The model as it is computed by vLLM's kernels on a kind of card, for `--as-served`: as_served.py."""
    from . import as_served

    return as_served.ServedModel(checkpoint, facts, device, card)


def unknown_kernel(plan: Plan, card: Card) -> str | None:
    """The first format of source or output of which no kernel on a card is known, in words: kernels.py."""
    from . import kernels

    return kernels.unknown_kernel(plan, card)


def kernels_of(model: StreamedModel, checkpoint: Checkpoint, experts: Format | None) -> dict[str, str]:
    """The kernel for each kind of matrix there, in words: as_served.py."""
    from . import as_served

    return as_served.kernels_of(model, checkpoint, experts)
