"""`--publish-as-you-go`: what of a run's publication goes beyond its uploads.

The repository is private until the output is proven: the gates have passed, and every file on the Hub has the hash of
the one here, or, of a shard that was removed here, the hash with which it was written. A run that fails its gates
uploads nothing but its shards.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizers.output import journal
from quantizers.output.uploads import LocalFile, Uploads, hashed, is_to_be_made, require_token, written_shard
from quantizers.planning.plan import WAITING
from quantizers.system.errors import OutputError
from quantizers.system.output_files import REPORT


@dataclass(frozen=True)
class Destination:
    """Where a run publishes its output as it goes.

    Attributes:
        repo: owner/name, on the Hub.
        remove: remove shards here once they are there.
        private: leave the repository private at the end.
    """

    repo: str
    remove: bool = False
    private: bool = False


def named(destination: Destination | None) -> dict[str, Any]:
    """What a report says of a publication, from which its card has its commands."""
    return {"published": {"repo": destination.repo}} if destination else {}


def refuse_early(destination: Destination | None, output: Path, *, fresh: bool) -> None:
    """Raise what `uploads_of` raises, before a source is downloaded; if `fresh`, for a run that begins anew."""
    if destination and fresh:
        is_to_be_made(destination.repo, ours=False)
    elif destination and journal.finished_report(output) is None:
        uploads_of(destination, output)


def uploads_of(destination: Destination | None, output: Path) -> Uploads | None:
    """The uploads of a run in this folder; None if it does not publish as it goes.

    Raises:
        OutputError: an earlier call of the run published elsewhere.
        InputError: the Hub or the repository is not as it must be, see `is_to_be_made`.
    """
    work = journal.work_folder(output)
    before = journal.uploads(work)
    if before.get("files") and before["repo"] != (destination and destination.repo):
        raise OutputError(
            f"{output}: this run publishes to {before['repo']} as it goes; give --publish-as-you-go {before['repo']} "
            "as before, or start over with --fresh"
        )
    if destination is None:
        return None
    if moving := (work / "moving").exists():  # then all is uploaded, and it may be public
        require_token()
    is_new = not moving and is_to_be_made(destination.repo, ours=before.get("repo") == destination.repo)
    return Uploads(work, destination.repo, most=WAITING if destination.remove else None, is_new=is_new)


@contextmanager
def begun(uploads: Uploads | None, destination: Destination | None) -> Iterator[None]:
    """Within the block finished shards are uploaded."""
    if uploads is None or destination is None:
        yield
        return
    uploads.begin()
    until = "private" if destination.private or uploads.stays_private else "private until the end"
    print(f"publishing as it goes to {uploads.url}, {until}", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        uploads.end()


def card_gaps(report: dict[str, Any]) -> dict[str, str]:
    """Why the card has no licence of the Hub's, and no model on the Hub that was quantized, by their keys in it."""
    from eval.report.pages import front_matter, strange_licenses

    front = front_matter(report)
    said = report.get("experts", {}).get("card", {}).get("license", ())
    license_hint = f" (the experts' card says {', '.join(said)})" if said else ""
    made_from = report["source"].get("made_from", ())
    model_hint = f" (made from {', '.join(made_from)} according to its card)" if made_from else ""
    gaps = {
        "license": f"the source names none{license_hint}",
        "base_model": f"the source was a folder{model_hint}",
    }
    gaps = {key: words for key, words in gaps.items() if not front.get(key)}
    strange = [] if "license" in report.get("published", {}) else strange_licenses(report["source"]["license"])
    return gaps | (
        {"license": f"{', '.join(strange)}: no name of the Hub's, so the card says other"} if strange else {}
    )


def say_gaps(report: dict[str, Any], destination: Destination | None) -> None:
    """Name on standard error what the card of a run that publishes will lack."""
    for key, words in card_gaps(report).items() if destination else ():
        print(f"the card has no {key}: {words}; add it on the Hub, after the run", file=sys.stderr)


def _failed(report: dict[str, Any]) -> list[str]:
    return [gate["name"] for gate in report["gates"] if not gate["passed"]]


def published(report: dict[str, Any], destination: Destination | None, output: Path) -> dict[str, Any]:
    """What a report says of its publication: nothing if a gate failed, unless shards were removed."""
    removed = sorted(name for name in report["audit"]["digests"] if not (output / name).is_file())
    if destination is None or (_failed(report) and not removed):
        return {}
    return {"published": {"repo": destination.repo} | ({"removed": removed} if removed else {})}


def refuse_unpublished(report: dict[str, Any], destination: Destination | None, output: Path) -> None:
    """Raise an OutputError if an output that was finished before is to be published as it is made."""
    repo = report.get("published", {}).get("repo")
    if destination and repo != destination.repo and not _failed(report):
        raise OutputError(
            f"{output}: was finished before{f' and published as {repo}' if repo else ', without publishing'}; "
            f"`quantize publish {output} --repo {destination.repo}` uploads it"
        )


def finish(uploads: Uploads | None, work: Path, output: Path, check: Callable[[], None]) -> None:
    """Upload the rest of a complete output and compare all of it, or say why not."""
    if uploads is None:
        return
    folder = work / "output"
    report = json.loads((folder / REPORT).read_text())
    if failed := _failed(report):
        print(
            f"{uploads.repo}: stays private, with shards alone: a gate failed ({', '.join(failed)}); delete it; or "
            f"`hf download {uploads.repo} --local-dir {output}` brings removed shards back, and `quantize publish "
            f"{output} --repo {uploads.repo} --force REASON` publishes all the same",
            file=sys.stderr,
        )
        return
    shards = [written_shard({"shard": name, "digest": one}) for name, one in report["audit"]["digests"].items()]
    known = {shard.name for shard in shards}
    files: list[LocalFile] = [hashed(folder, name) for name in sorted({*report["files"], REPORT} - known)]
    if others := uploads.finish(files, shards, check):
        print(f"on {uploads.url}, but not of this output: {', '.join(others)}", file=sys.stderr)


def open_up(uploads: Uploads | None, destination: Destination | None) -> None:
    """Make the repository of a proven output public, unless it is to stay private; say which."""
    if uploads is None or destination is None or not uploads.proven:
        return
    why = "as --private says" if destination.private else "as it was before" if uploads.stays_private else ""
    if not why:
        uploads.make_public()
    print(
        f"{uploads.url}: {f'private, {why}' if why else 'public'}; the Hub's hashes equal those here", file=sys.stderr
    )
