"""Checks before an upload: the run's report, the hashes of the files, the gates; and what a dry run says is missing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eval.report.pages import front_matter
from quantizers.output.manifest import output_facts, read_record, refuse_incomplete, seal_of
from quantizers.output.uploads import LOGIN, LocalFile, hashed
from quantizers.pipeline.publication import card_gaps
from quantizers.pipeline.report_files import check_manifest
from quantizers.system.errors import OutputError
from quantizers.system.formatting import gate_figures
from quantizers.system.output_files import CARD, REPORT, is_within
from quantizers.system.progress import Step
from stitch.audit.checkpoint import added, strays
from stitch.write.shard import changes, recorded_digests

if TYPE_CHECKING:
    import torch

    from quantizers.checkpoint.reader import Checkpoint

PATIENCE = 10.0  # seconds to wait for the Hub's answer


def read_report(folder: Path) -> dict[str, Any]:
    """The report of a finished run or stitch; an OutputError without one, or if it was modified since."""
    refuse_incomplete(folder)
    report = read_record(folder)
    if not {"source", "gates", "files"} <= report.keys() or not {"settings", "stitched"} & report.keys():
        raise OutputError(
            f"{folder}: has no {REPORT} of a finished run; give the output of `quantize run` or `quantize stitch`"
        )
    if report.get("seal") != seal_of(report):
        raise OutputError(
            f"{folder / REPORT}: was modified after the run (checksum mismatch), so its figures are not published, "
            "even with --force; restore it"
        )
    return report


def local_files(folder: Path, report: dict[str, Any], step: Step = lambda _: None) -> list[LocalFile]:
    """The files to upload, hashed: those of the run. Any other file in the folder is not uploaded."""
    files = []
    for name in sorted({*report["files"], REPORT}):
        if is_within(name) and (folder / name).is_file():
            files.append(hashed(folder, name))
            step(name)
    return files


def check_output(
    folder: Path,
    report: dict[str, Any],
    files: list[LocalFile],
    source: Checkpoint | None,
    device: torch.device,
) -> tuple[list[str], list[str]]:
    """Check a folder against its report, and against its source if that is given, as `quantize verify` does.

    Without it: the tensors were compared with the source when the output was made, according to the report with its
    checksum, and every file still has the hash that it had then.

    Returns the reasons not to publish, and remarks that are none, one line each.
    """
    digests = recorded_digests(report)  # of shards, from when they were written; of the rest from the end
    hashes = report.get("sha256", {}) | {name: digest["sha256"] for name, digest in digests.items()}
    files = [file for file in files if file.name not in (REPORT, CARD)]
    if source is not None:
        from quantizers.commands.verify import verify_folder

        found = verify_folder(folder, source, device)
        gates = _failed_gates(report, ("audit", "consumers"))  # those of every output of this program
        problems = [*found.differences, *found.misread, *gates]
        notes = found.record.notes
    else:
        problems = [
            f"{file.name}: {REPORT} has no hash of it; compare it with the source by --thorough"
            for file in files
            if file.name not in hashes
        ]
        record = check_manifest(folder)
        problems += [*record.differences, *strays(folder, digests), *_check_without_source(folder, report)]
        notes = record.notes
    for file in files:
        if hashes.get(file.name, file.sha256) != file.sha256:
            tensors = changes(folder / file.name, digests[file.name]) if file.name in digests else []
            problems += tensors or [f"{file.name}: changed since the run wrote it"]
    return list(dict.fromkeys(problems)), list(notes)


def _check_without_source(folder: Path, report: dict[str, Any]) -> list[str]:
    """What is wrong beside what the report has hashes of: files that were added, serving, the audit, gates."""
    from eval.serving.check import check_folder

    problems = [
        f"{name}: not a file of this output, but loaders read it; remove it" for name in added(folder, report["files"])
    ]
    serving = check_folder(folder, output_facts(folder))
    if serving is None:
        problems.append(f"{folder.name}: cannot be opened as a checkpoint; `quantize verify` says why")
    else:
        problems += map(str, serving.errors)
    audit = report["audit"]["differences"]
    return [*problems, *audit, *_failed_gates(report, ("audit",) if audit else ())]


def _failed_gates(report: dict[str, Any], rechecked: tuple[str, ...]) -> list[str]:
    """A line for each failed gate, except those that were checked again."""
    return [
        "gate {} failed: {}, limit {} ({})".format(gate["name"], *gate_figures(gate), gate["meaning"])
        for gate in report["gates"]
        if not gate["passed"] and gate["name"] not in rechecked
    ]


@dataclass(frozen=True)
class Point:
    """One step of a publication.

    Attributes:
        state: `stops`: an upload would end at it; `missing`: it is published without; `open`: only an upload shows it.
    """

    name: str
    state: Literal["done", "missing", "stops", "open"]
    words: str


def card_points(report: dict[str, Any]) -> list[Point]:
    """Whether the card names a licence, and the model on the Hub that was quantized."""
    front, gaps = front_matter(report), card_gaps(report)
    return [
        Point(key, "missing", f"{gaps[key]}; give {option}")
        if key in gaps
        else Point(key, "done", _said(front.get(f"{key}_name", front[key])))
        for key, option in (("license", "--license NAME"), ("base_model", "--base-model OWNER/NAME"))
    ]


def _said(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


def account_points(repo: str, private: bool | None) -> list[Point]:
    """Whether there is a token and a repository, as far as the Hub answers; nothing is uploaded."""
    from httpx import HTTPError
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    token = get_token()
    points = [Point("token", "done", "found") if token else Point("token", "stops", LOGIN)]
    as_new = {True: "as private", False: "as public", None: "with default visibility"}[private]
    try:
        info = HfApi().model_info(repo, timeout=PATIENCE)
    except RepositoryNotFoundError:
        return [*points, Point("repository", "open", f"{repo}: not found; will be created {as_new}")]
    except (HTTPError, OSError) as failure:
        status = getattr(getattr(failure, "response", None), "status_code", None)
        if token and status in (401, 403):
            return [Point("token", "stops", f"the Hub refuses it ({status}); {LOGIN}")]
        return [*points, Point("repository", "open", f"{repo}: the Hub did not answer")]
    ignored = "; --private and --public have no effect" if private not in (None, info.private) else ""
    return [*points, Point("repository", "done", f"{repo} exists, {'private' if info.private else 'public'}{ignored}")]
