"""A finished checkpoint checked and uploaded to the Hub: `quantizers.publish`.

Report and card are rewritten for the publication: repository, licence, base model, and a forced publication. The upload
can be resumed, and ends with a comparison of the Hub's hashes with the local ones, see output/uploads.py.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import torch
from httpx import HTTPError
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import RepositoryNotFoundError

from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.remote import files_of
from quantizers.commands import options as opt
from quantizers.device.devices import choose_device
from quantizers.eval.coverage.summary import gate_figures
from quantizers.eval.report.pages import front_matter, html_report
from quantizers.eval.report.schema import Forced, Published, Report
from quantizers.eval.report.summary import repository
from quantizers.output.manifest import add_files, output_facts, read_record, refuse_incomplete, seal_of, write_record
from quantizers.output.uploads import MESSAGE, LocalFile, compare, hashed, require_token
from quantizers.pipeline.consumers import folder_findings, unchecked_notes
from quantizers.pipeline.publication import card_gaps
from quantizers.pipeline.report_files import (
    FRONT_MATTER,
    check_manifest,
    parsed,
    pictures,
    read_front_matter,
    write_with_card,
)
from quantizers.recipe.portable import is_hub_id
from quantizers.stitch.audit.checkpoint import added, strays
from quantizers.stitch.write.shard import changes, recorded_digests
from quantizers.system.errors import CheckpointError, InputError, OutputError
from quantizers.system.files import write_text
from quantizers.system.hub_client import AGAIN, LOGIN, status_of, upload_errors
from quantizers.system.interrupts import handle_signals
from quantizers.system.output_files import CARD, PAGE, REPORT, files_below, is_within
from quantizers.system.progress import Step, progress
from quantizers.system.strict_yaml import dump

PATIENCE = 10.0  # seconds to wait for the Hub's answer
PUBLICATION_KEYS = ("license", "license_name", "license_link", "base_model", "base_model_relation")


@dataclass(frozen=True)
class Publication:
    """The result of `publish`.

    Attributes:
        problems: the checks that failed, one line each; after an upload only those that were forced.
        uploaded: whether the files are on the Hub now.
        figures: what `quantize publish --json` prints: files with their hashes; after an upload the commit's URL, of a
            rehearsal the checklist, and in `stops` what would stop an upload.
    """

    problems: list[str]
    uploaded: bool
    figures: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether every check passed, or was forced; of a rehearsal, whether nothing was found to stop an upload."""
        return not self.figures.get("stops")


@opt.documented
def publish(
    folder: Annotated[
        str | Path, opt.Argument("a finished output of `quantize run`", "DIR"), "an output of `run` or `stitch`"
    ],
    repo: Annotated[str, opt.Option("repository on the Hub, owner/name; created if it does not exist")],
    *,
    license: Annotated[str | None, opt.Option("licence, by the Hub's name; the source's by default", "NAME")] = None,
    base_model: Annotated[
        str | None, opt.Option("the source's Hub id, if it was read from a folder", "OWNER/NAME")
    ] = None,
    thorough: Annotated[
        bool, opt.Option("compare every tensor with the source again, as `quantize verify` does")
    ] = False,
    source: Annotated[
        str | Path | None,
        opt.Option("the source model, a folder or Hub id; implies --thorough; the one in report.json by default"),
    ] = None,
    private: Annotated[
        bool | None,
        opt.Option("visibility of a new repository; your account's default otherwise", names=("--private/--public",)),
    ] = None,
    revision: Annotated[str, opt.Option("branch; created if it does not exist")] = "main",
    dry_run: Annotated[
        bool, opt.Option("verify, list the files, and say what would stop the upload, without it")
    ] = False,
    force: Annotated[
        str | None, opt.Option("publish even if a check fails; the model card states the reason", "REASON")
    ] = None,
    device: opt.Device = "auto",
) -> Publication:
    """Check a finished checkpoint and upload it to the Hub, then compare the Hub's hashes with the local ones.

    The token is that of `hf auth login` or HF_TOKEN. An interrupted upload resumes when this is called again.

    Raises:
        CheckpointError: a check failed, without `force` or `dry_run`.
        InputError: the folder is not a finished output, an argument is wrong, or there is no token.
        QuantizeError: the Hub cannot be reached, or its files differ afterwards.
    """
    from quantizers.commands.verify import source_of

    folder = Path(folder)
    if force is not None and not force.strip():
        raise InputError("--force", "give the reason, which the card states")
    if device != "auto" and source is None and not thorough:
        raise InputError(
            f"--device {device}", "is where tensors are compared again", "give --thorough too, or leave it out"
        )
    report = read_report(folder)
    after = with_publication(report, repo, license, base_model)
    for point in card_points(after):
        if point.state == "missing" and not dry_run:  # whose checklist says so
            print(f"the card has no {point.name}: {point.words}", file=sys.stderr)
    with progress("hashing", len(report.files) + 1) as step:
        files = local_files(folder, report, step)
    opened = None
    if thorough or source is not None:
        opened = source_of(folder, None if source is None else str(source), report.source.revision)
    problems, notes = check_output(folder, report, files, opened, choose_device(device))
    for note in notes:
        print(note, file=sys.stderr)
    if problems and force is None and not dry_run:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointError(folder, f"{problems[0]}{more}", "repair it, or give --force with a reason")
    figures: dict[str, Any] = {"repo": repo, "revision": revision, "problems": problems, "forced": force}
    if dry_run:
        points = (*card_points(after), *account_points(repo, private))
        stops = [point.name for point in points if point.state == "stops"]
        if problems and force is None:
            stops.insert(0, f"{len(problems)} failed check{'s'[: len(problems) > 1]}")
        figures |= {
            "private": private,
            "not_sent": sorted(set(files_below(folder)) - {file.name for file in files}),
            "checklist": [vars(point) for point in points],
            "stops": stops,
        }
    else:
        # Of problems the card says that it was published all the same, and why.
        after = after.changed(forced=Forced(reason=force, problems=problems) if problems else None)
        rewritten = rewrite(folder, report, after)
        files = [hashed(folder, file.name) if file.name in rewritten else file for file in files]
        with progress("publishing", 2) as step:
            figures |= upload(folder, files, repo, revision, private, step)
    figures |= {"files": [vars(file) for file in files], "bytes": sum(file.size for file in files)}
    return Publication(problems, not dry_run, figures)


# The checks, and what a dry run says is missing ---------------------------------------------------------------------


def read_report(folder: Path) -> Report:
    """The report of a finished run or stitch; an OutputError without one, or if it was modified since, an InputError if
    it is of another version.
    """
    refuse_incomplete(folder)
    report = read_record(folder)
    if not {"source", "gates", "files"} <= report.keys() or not {"settings", "stitched"} & report.keys():
        raise OutputError(
            folder, f"has no {REPORT} of a finished run", "give the output of `quantize run` or `quantize stitch`"
        )
    if report.get("seal") != seal_of(report):
        raise OutputError(
            folder / REPORT,
            "was modified after the run (checksum mismatch), so its figures are not published, even with --force",
            "restore it",
        )
    return parsed(report, folder / REPORT)


def local_files(folder: Path, report: Report, step: Step = lambda _: None) -> list[LocalFile]:
    """The files to upload, hashed: those of the run. Any other file in the folder is not uploaded."""
    files = []
    for name in sorted({*report.files, REPORT}):
        if is_within(name) and (folder / name).is_file():
            files.append(hashed(folder, name))
            step(name)
    return files


def check_output(
    folder: Path,
    report: Report,
    files: list[LocalFile],
    source: Checkpoint | None,
    device: torch.device,
) -> tuple[list[str], list[str]]:
    """Check a folder against its report, and against its source if that is given, as `quantize verify` does.

    Without it: the tensors were compared with the source when the output was made, according to the report with its
    checksum, and every file still has the hash that it had then.

    Returns the reasons not to publish, and remarks that are none, one line each.
    """
    digests = recorded_digests(report.as_dict())  # of shards, from when they were written; of the rest from the end
    hashes = report.sha256 | {name: digest.sha256 for name, digest in digests.items()}
    files = [file for file in files if file.name not in (REPORT, CARD)]
    if source is not None:
        from quantizers.commands.verify import verify_folder

        verification = verify_folder(folder, source, device)
        record, problems = verification.record, [*verification.differences, *verification.misread]
        rechecked: tuple[str, ...] = ("audit", "consumers")  # the gates of every output of this program
    else:
        record, audit = check_manifest(folder), report.audit.differences
        unknown = [file.name for file in files if file.name not in hashes]
        problems = [f"{name}: {REPORT} has no hash of it; compare it with the source by --thorough" for name in unknown]
        problems += [*record.differences, *strays(folder, digests)]
        more = added(folder, report.files)
        problems += [f"{name}: not a file of this output, but loaders read it; remove it" for name in more]
        serving = folder_findings(folder, output_facts(folder))
        if serving is None:
            problems.append(f"{folder.name}: cannot be opened as a checkpoint; `quantize verify` says why")
        else:
            problems += map(str, serving.errors)
        problems += audit
        rechecked = ("audit",) if audit else ()
    problems += unchecked_notes()
    for gate in report.gates:
        if not gate.passed and gate.name not in rechecked:
            value, limit = gate_figures(gate)
            problems.append(f"gate {gate.name} failed: {value}, limit {limit} ({gate.meaning})")
    for file in files:
        if hashes.get(file.name, file.sha256) != file.sha256:
            tensors = changes(folder / file.name, digests[file.name]) if file.name in digests else []
            problems += tensors or [f"{file.name}: changed since the run wrote it"]
    return list(dict.fromkeys(problems)), list(record.notes)


@dataclass(frozen=True)
class Point:
    """One step of a publication.

    Attributes:
        state: `stops`: an upload would end at it; `missing`: it is published without; `open`: only an upload shows it.
    """

    name: str
    state: Literal["done", "missing", "stops", "open"]
    words: str


def card_points(report: Report) -> list[Point]:
    """Whether the card names a licence, and the model on the Hub that was quantized."""
    front = front_matter(report)
    gaps = card_gaps(report)
    points = []
    for key, option in (("license", "--license NAME"), ("base_model", "--base-model OWNER/NAME")):
        if key in gaps:
            points.append(Point(key, "missing", f"{gaps[key]}; give {option}"))
        else:
            value = front.get(f"{key}_name", front[key])
            points.append(Point(key, "done", ", ".join(value) if isinstance(value, list) else str(value)))
    return points


def account_points(repo: str, private: bool | None) -> list[Point]:
    """Whether there is a token and a repository, as far as the Hub answers; nothing is uploaded."""
    token = get_token()
    points = [Point("token", "done", "found") if token else Point("token", "stops", LOGIN)]
    as_new = {True: "as private", False: "as public", None: "with default visibility"}[private]
    try:
        info = HfApi().model_info(repo, timeout=PATIENCE)
    except RepositoryNotFoundError:
        return [*points, Point("repository", "open", f"{repo}: not found; will be created {as_new}")]
    except (HTTPError, OSError) as failure:
        status = status_of(failure)
        if token and status in (401, 403):
            return [Point("token", "stops", f"the Hub refuses it ({status}); {LOGIN}")]
        return [*points, Point("repository", "open", f"{repo}: the Hub did not answer")]
    ignored = "; --private and --public have no effect" if private not in (None, info.private) else ""
    return [*points, Point("repository", "done", f"{repo} exists, {'private' if info.private else 'public'}{ignored}")]


# Report and card ----------------------------------------------------------------------------------------------------


def with_publication(report: Report, repo: str, license: str | None, base_model: str | None) -> Report:
    """The report with repository, licence and base model; None for those of an earlier publication, or of the source.

    An InputError says that one of them is not in the Hub's format.
    """
    if not is_hub_id(repo):
        raise InputError(f"--repo {repo}", "write it as owner/name")
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        raise InputError(f"--license {license}", "use the Hub's identifier, such as apache-2.0, mit or other")
    if base_model is not None and not is_hub_id(base_model):
        raise InputError(f"--base-model {base_model}", "write it as owner/name")
    before = report.published
    published = Published(  # without `removed`: all shards are here now
        repo=repo,
        license=license or (before.license if before else None),
        base_model=base_model or (before.base_model if before else None),
    )
    return report.changed(published=published)


def rewrite(folder: Path, before: Report, after: Report) -> list[str]:
    """Write report, HTML report and card if the report changed; an edited card keeps its text. Returns their names."""
    if after.as_dict() == before.as_dict():
        return []
    card = folder / CARD
    raw = card.read_bytes() if card.is_file() else b""
    text = raw.decode(errors="replace").replace("\r\n", "\n")
    edited = hashlib.sha256(raw).hexdigest() != before.card.sha256
    if edited and read_front_matter(text) and after.forced == before.forced:
        _keep_edited(folder, text, before, after)
    else:
        write_with_card(folder, after)
    return [name for name in (REPORT, PAGE, CARD) if (folder / name).is_file()]


def _keep_edited(folder: Path, text: str, before: Report, after: Report) -> None:
    """Change only commands and front matter of a model card that was edited."""
    old = repository(before)
    new = repository(after)
    written = before.card.front_matter
    front = {key: value for key, value in front_matter(after).items() if key in written or key in PUBLICATION_KEYS}
    for words in ("vllm serve {}", "--model-path {}", 'from_pretrained("{}"'):
        text = text.replace(words.format(old), words.format(new))
    for key in PUBLICATION_KEYS:
        if front.get(key) != written.get(key):
            text = _with_key(text, key, front.get(key))
    write_text(text, folder / CARD)
    write_text(html_report(after, pictures(after)), folder / PAGE)
    after = after.changed(card=before.card.changed(front_matter=front))
    write_record(folder, add_files(folder, after.as_dict(), [PAGE]))


def _with_key(text: str, key: str, value: Any) -> str:
    """A card with a key of its front matter set, or removed if the value is None."""
    match = FRONT_MATTER.match(text)
    assert match is not None
    front = re.sub(rf"(?m)^{key}:.*\n(?:[ -].*\n)*", "", match[2])
    return f"{match[1]}{front}{'' if value is None else dump({key: value})}{text[match.end() :]}"


# The upload ----------------------------------------------------------------------------------------------------


def upload(
    folder: Path, files: list[LocalFile], repo: str, revision: str, private: bool | None, step: Step
) -> dict[str, Any]:
    """Create the repository and the branch if they are missing, upload the files, and compare the Hub's hashes.

    Returns the URL, the commit, and the `strangers`: files on the Hub that were not uploaded. Raises as `publish` does.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        os.write(2, f"quantize: {repo}: interrupted while uploading; {AGAIN}\n".encode())
        os._exit(128 + number)  # the library's threads would finish their shards first; nothing is written to disk

    require_token()
    api = HfApi()
    with handle_signals(end, signal.SIGINT, signal.SIGTERM), upload_errors(repo, "name another repository"):
        url = str(api.create_repo(repo, private=private, exist_ok=True))
        if revision != "main":
            api.create_branch(repo, branch=revision, exist_ok=True)
        step("uploading")
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=revision,
            allow_patterns=[glob.escape(file.name) for file in files],
            commit_message=MESSAGE,
        )
        step("comparing")
        commit, on_hub = files_of(repo, revision)
    return {"url": url, "commit": commit, "strangers": compare(repo, files, on_hub, "publish again")}
