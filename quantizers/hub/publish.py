"""Checks before an upload to the Hub: the run's report, what speaks against publishing, and a forced publication."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantizers.output.journal import refuse_unfinished
from quantizers.output.record import seal_of
from quantizers.run.card import write_with_card
from quantizers.system.errors import OutputError
from quantizers.system.own_files import REPORT
from quantizers.system.text_table import number

if TYPE_CHECKING:
    import torch

    from quantizers.checkpoint.reader import Checkpoint


def read_report(folder: Path) -> dict[str, Any]:
    """The report of a finished run.

    Raises:
        OutputError: the folder is not a finished output of this program.
    """
    refuse_unfinished(folder)
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        if not isinstance(report, dict) or not {"source", "settings", "gates", "files"} <= set(report):
            raise ValueError("not a report")
    except (OSError, ValueError):
        raise OutputError(f"{folder}: has no {REPORT} of a finished run; give the output of `quantize run`") from None
    return report


def problems_of(folder: Path, report: dict[str, Any], source: Checkpoint, device: torch.device) -> list[str]:
    """Everything that speaks against publishing: what `quantize verify` finds, and the gates that failed."""
    from quantizers.run.verification import verify_folder

    verification = verify_folder(folder, source, device)
    failed = [
        f"gate {gate['name']} failed: {number(gate['value'], '.4g')}, limit {gate['limit']:.4g} ({gate['meaning']})"
        for gate in report["gates"]
        if not gate["passed"] and gate["name"] not in ("audit", "consumers")
    ]
    return [*verification.differences, *verification.misread, *failed]


def state(folder: Path, report: dict[str, Any], reason: str | None, problems: list[str]) -> None:
    """State in report and card that a checkpoint is published despite its problems, or remove that statement.

    Args:
        reason: given by the user, with --force.
        problems: see `problems_of`; if empty, the statement is removed.

    Raises:
        OutputError: the report itself was changed, so its figures are not those that were measured.
    """
    if report.get("seal") != seal_of(report):
        raise OutputError(
            f"{folder / REPORT}: was changed since the run wrote it, so its figures are not published, even with "
            "--force; restore it"
        )
    forced = {"reason": reason, "problems": problems} if problems else None
    if report.get("forced") == forced:
        return
    kept = {key: value for key, value in report.items() if key != "forced"}
    write_with_card(folder, kept | ({"forced": forced} if forced else {}))
