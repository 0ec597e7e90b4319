"""Checks before an upload to the Hub: the run's report, and what speaks against publishing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantizers.output.journal import refuse_unfinished
from quantizers.output.manifest import carried_facts, seal_of
from quantizers.run.manifest_check import check_manifest
from quantizers.system.errors import OutputError
from quantizers.system.formatting import gate_figures
from quantizers.system.output_files import CARD, REPORT
from stitch.audit.folder import added, strays
from stitch.write.digests import changes, recorded_digests

from .local_files import LocalFile

if TYPE_CHECKING:
    import torch

    from quantizers.checkpoint.reader import Checkpoint

ALWAYS = ("audit", "consumers")  # the gates that every output of this program has


@dataclass(frozen=True)
class Checks:
    """What speaks against publishing a folder, and how that was found out.

    Attributes:
        problems: one line each; empty if nothing does.
        notes: what is not a fault but worth knowing.
        with_source: whether the tensors were compared with the source now. Otherwise that was done when the output was
            made, the sealed report says so, and every file still has the hash that it had then.
    """

    problems: list[str]
    notes: list[str]
    with_source: bool


def read_report(folder: Path) -> dict[str, Any]:
    """The report of a finished run or stitch.

    Raises:
        OutputError: the folder is not a finished output of this program, or its report was changed, so that its figures
            are not those that were measured.
    """
    refuse_unfinished(folder)
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        if not isinstance(report, dict) or not {"source", "gates", "files"} <= set(report):
            raise ValueError("not a report")
        if not {"settings", "stitched"} & set(report):
            raise ValueError("of neither a run nor a stitch")
    except (OSError, ValueError):
        raise OutputError(
            f"{folder}: has no {REPORT} of a finished run; give the output of `quantize run` or `quantize stitch`"
        ) from None
    if report.get("seal") != seal_of(report):
        raise OutputError(
            f"{folder / REPORT}: was changed since the run wrote it, so its figures are not published, even with "
            "--force; restore it"
        )
    return report


def check_folder_by(
    folder: Path,
    report: dict[str, Any],
    files: list[LocalFile],
    source: Callable[[], Checkpoint],
    device: torch.device,
    *,
    thorough: bool,
) -> Checks:
    """Check a folder by its report, and with its source if the report does not suffice or if that is asked.

    Args:
        files: all that would be sent, hashed.
        source: opens the source; called only if it is needed.
        thorough: compare with the source in any case, as `quantize verify` does.
    """
    if not thorough and vouches(report, files):
        problems, notes = _by_report(folder, report, files)
        return Checks(problems, notes, with_source=False)
    from quantizers.run.verification import verify_folder

    found = verify_folder(folder, source(), device)
    problems = [*found.differences, *found.misread, *_failed(report, ALWAYS)]
    return Checks(_each_once(problems + _changed(folder, report, files)), list(found.record.notes), with_source=True)


def vouches(report: dict[str, Any], files: list[LocalFile]) -> bool:
    """Whether a report says how its output was audited, and has a hash of every file but its own and the card.

    The card's text may be edited; its front matter is compared elsewhere. Reports of older versions lack some of this.

    Args:
        report: sealed, see `read_report`.
    """
    hashes = _recorded(report)
    named = [file.name for file in files if file.name not in (REPORT, CARD)]
    return {gate["name"] for gate in report["gates"]} >= set(ALWAYS) and all(name in hashes for name in named)


def _recorded(report: dict[str, Any]) -> dict[str, str]:
    """SHA-256 of each file in a report, by name: of shards from when they were written, of the rest from the end."""
    shards = {name: digest["sha256"] for name, digest in recorded_digests(report).items()}
    return dict(report.get("sha256", {})) | shards


def _changed(folder: Path, report: dict[str, Any], files: list[LocalFile]) -> list[str]:
    """What changed in the files, as they would be sent, since the report took their hashes; one line each."""
    hashes, digests, lines = _recorded(report), recorded_digests(report), []
    for file in files:
        if file.name not in (REPORT, CARD) and hashes.get(file.name, file.sha256) != file.sha256:
            tensors = changes(folder / file.name, digests[file.name]) if file.name in digests else []
            lines += tensors or [f"{file.name}: changed since the run wrote it"]
    return lines


def _by_report(folder: Path, report: dict[str, Any], files: list[LocalFile]) -> tuple[list[str], list[str]]:
    """Problems and notes, found without the source."""
    from eval.consumers.folder import check_folder

    record = check_manifest(folder)
    problems = [*record.differences, *_changed(folder, report, files), *strays(folder, recorded_digests(report))]
    problems += [f"{name}: is no file of it, and loaders read it; remove it" for name in added(folder, report["files"])]
    consumers = check_folder(folder, carried_facts(folder))
    if consumers is None:
        problems.append(f"{folder.name}: cannot be opened as a checkpoint; `quantize verify` says why")
    problems += [str(finding) for finding in consumers.errors] if consumers else []
    audit = report["audit"]["differences"]
    problems += [*audit, *_failed(report, ("audit",) if audit else ())]
    return _each_once(problems), list(record.notes)


def _each_once(lines: list[str]) -> list[str]:
    return list(dict.fromkeys(lines))


def _failed(report: dict[str, Any], checked_again: tuple[str, ...]) -> list[str]:
    """A line for each gate that failed, except for those that were checked again."""
    return [
        "gate {} failed: {}, limit {} ({})".format(gate["name"], *gate_figures(gate), gate["meaning"])
        for gate in report["gates"]
        if not gate["passed"] and gate["name"] not in checked_again
    ]
