"""Findings on how a planned or a written output would be read, by the rooms that know who reads it.

The core knows no server. Without such a room nothing is checked: a run says so, report.json has it among its notes and
as `consumers.checked`, and `publish` counts it as a failed check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quantizers.architectures.families import Own
from quantizers.checkpoint.remote import HubFiles
from quantizers.hooks import hook
from quantizers.planning.job import Job

NOT_CHECKED = "consumers: not checked, for this installation has no rules of serving engines"


class Finding(Protocol):
    """Difference between what is stored and what an engine would read; as text one line."""

    @property
    def engine(self) -> str:
        """The engines that it is about."""

    @property
    def consequence(self) -> str:
        """Consequence for these engines."""

    @property
    def places(self) -> tuple[str, ...]:
        """The tensors, modules or keys of config.json that have it."""

    def as_dict(self) -> dict[str, Any]:
        """For report.json, without the places."""


class Findings(Protocol):
    """Results of a check, `consumers` in report.json; `errors` are those findings that make it fail."""

    @property
    def counted(self) -> str:
        """Meaning of the number of errors, for the gate `consumers`."""

    @property
    def findings(self) -> Sequence[Finding]:
        """All of them, errors first."""

    @property
    def errors(self) -> Sequence[Finding]:
        """The findings that make `quantize verify` fail."""

    def as_dict(self) -> dict[str, Any]:
        """For report.json."""

    def as_text(self) -> str:
        """For people."""


@dataclass(frozen=True)
class NotChecked:
    """No findings, because nothing was looked at."""

    findings: Sequence[Finding] = ()
    errors: Sequence[Finding] = ()
    counted: str = "nothing"

    def as_dict(self) -> dict[str, Any]:
        """For report.json."""
        return {"checked": False, "schemes": {}, "findings": [], "tensor_parallel": {}, "kernels": {}}

    def as_text(self) -> str:
        """For people."""
        return NOT_CHECKED


def plan_findings(job: Job, *, one_expert: bool = False) -> Findings:
    """Check how engines would read the output of a plan, as far as headers say.

    Args:
        one_expert: the first of a layer's experts stands for all, which are stored alike; this is faster.

    Raises:
        CheckpointError: one of them would read other weights than are stored.
    """
    check_plan = hook("check_plan")
    findings: Findings = NotChecked() if check_plan is None else check_plan(job, one_expert)
    return findings


def folder_findings(folder: Path, own: Own = None, remote: HubFiles | None = None) -> Findings | None:
    """Check how engines would read a checkpoint's folder; None if it cannot be opened, which the audit reports.

    Args:
        own: its architecture, or a file of the user's with it; None for a kept one.
        remote: the Hub's files, for shards that are not in the folder.
    """
    check_folder = hook("check_folder")
    findings: Findings | None = NotChecked() if check_folder is None else check_folder(folder, own, remote)
    return findings


def unchecked_notes() -> list[str]:
    """The note that nothing was checked, if no room can."""
    return [] if hook("check_folder") else [NOT_CHECKED]
