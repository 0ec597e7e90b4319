"""Checks before an upload: the run's report, the hashes of the files, the gates; and what a dry run says is missing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eval.report.pages import front_matter, strange_licenses
from quantizers.output.journal import refuse_unfinished
from quantizers.output.manifest import output_facts, read_record, seal_of
from quantizers.pipeline.report_files import check_manifest
from quantizers.system.errors import OutputError
from quantizers.system.formatting import gate_figures
from quantizers.system.output_files import CARD, REPORT, is_within
from quantizers.system.progress import Step
from stitch.audit.checkpoint import added, strays
from stitch.write.digests import changes, recorded_digests

if TYPE_CHECKING:
    import torch

    from quantizers.checkpoint.reader import Checkpoint

LOGIN = "log in with `hf auth login`, or set HF_TOKEN to one with write access"
PATIENCE = 10.0  # seconds to wait for the Hub's answer
CHUNK = 1 << 24  # bytes read at a time


@dataclass(frozen=True)
class LocalFile:
    """A file to upload."""

    name: str  # in the folder, with those of subfolders, and on the Hub
    size: int  # bytes
    sha256: str  # the Hub's hash of a file stored as LFS or Xet
    blob: str  # git's blob id (SHA-1), the Hub's hash of any other file


def read_report(folder: Path) -> dict[str, Any]:
    """The report of a finished run or stitch; an OutputError without one, or if it was modified since."""
    refuse_unfinished(folder)
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


def hashed(folder: Path, name: str) -> LocalFile:
    """A file with its hashes."""
    path = folder / name
    length = path.stat().st_size
    sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % length, usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(CHUNK):
            sha256.update(block)
            blob.update(block)
    return LocalFile(name, length, sha256.hexdigest(), blob.hexdigest())


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
    """One step; `open` if its state is unknown, or decided later."""

    name: str
    state: Literal["done", "missing", "open"]
    words: str


def card_points(report: dict[str, Any]) -> list[Point]:
    """Whether the card names a licence, and the model on the Hub that was quantized."""
    front = front_matter(report)
    said = report.get("experts", {}).get("card", {}).get("license", ())
    license_hint = f" (the experts' card says {', '.join(said)})" if said else ""
    made_from = report["source"].get("made_from", ())
    model_hint = f" (made from {', '.join(made_from)} according to its card)" if made_from else ""
    missing = {
        "license": f"the source names none{license_hint}; give --license NAME",
        "base_model": f"the source was a folder{model_hint}; give --base-model OWNER/NAME",
    }
    strange = [] if "license" in report.get("published", {}) else strange_licenses(report["source"]["license"])
    if strange:
        missing["license"] = f"{', '.join(strange)}: no name of the Hub's, so the card says other; give --license NAME"
    return [
        Point(key, "missing", words)
        if not front.get(key) or (key == "license" and strange)
        else Point(key, "done", _said(front.get(f"{key}_name", front[key])))
        for key, words in missing.items()
    ]


def _said(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


def account_points(repo: str, private: bool | None) -> list[Point]:
    """Whether there is a token and a repository, as far as the Hub answers; nothing is uploaded."""
    from httpx import HTTPError
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    token = get_token()
    points = [Point("token", "done", "found") if token else Point("token", "missing", LOGIN)]
    as_new = {True: "as private", False: "as public", None: "with default visibility"}[private]
    try:
        info = HfApi().model_info(repo, timeout=PATIENCE)
    except RepositoryNotFoundError:
        return [*points, Point("repository", "open", f"{repo}: not found; will be created {as_new}")]
    except (HTTPError, OSError) as failure:
        status = getattr(getattr(failure, "response", None), "status_code", None)
        if token and status in (401, 403):
            return [Point("token", "missing", f"the Hub refuses it ({status}); {LOGIN}")]
        return [*points, Point("repository", "open", f"{repo}: the Hub did not answer")]
    ignored = "; --private and --public have no effect" if private not in (None, info.private) else ""
    return [*points, Point("repository", "done", f"{repo} exists, {'private' if info.private else 'public'}{ignored}")]
