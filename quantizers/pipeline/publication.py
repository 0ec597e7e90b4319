"""`--publish-as-you-go`: what of a run's publication goes beyond its uploads.

The repository is private until the output is proven: the gates have passed, and every file on the Hub has the hash of
the one here, or with which a shard that was removed here was written. A run that fails its gates uploads its shards
alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantizers.output import journal
from quantizers.output.journal import Shard, ShardDigest
from quantizers.output.uploads import Uploads, hashed, is_to_be_made, refuse_card, require_token, written_shard
from quantizers.planning.plan import WAITING
from quantizers.system.errors import OutputError
from quantizers.system.formatting import size
from quantizers.system.output_files import REPORT
from quantizers.system.strict_yaml import dump

if TYPE_CHECKING:
    from quantizers.eval.report.schema import Planned, Published, Report

FREE = 100_000_000_000  # bytes of private repositories of an account that pays nothing


@dataclass(frozen=True)
class Destination:
    """Destination to which a run publishes its output as it goes: a `repo` on the Hub, owner/name.

    Shards are removed here once they are there if `remove`; it is left private at the end if `private`.
    """

    repo: str
    remove: bool = False
    private: bool = False


def refuse_early(destination: Destination | None, output: Path, *, fresh: bool) -> None:
    """Raise what `uploads_of` raises, before a source is downloaded; if `fresh`, for a run that begins anew."""
    if destination and fresh:
        is_to_be_made(destination.repo, ours=False)
    elif destination and journal.finished_report(output) is None:
        uploads_of(destination, output)


def uploads_of(destination: Destination | None, output: Path) -> Uploads | None:
    """The uploads of a run in this folder; None if it does not publish as it goes.

    Raises:
        OutputError: an earlier call of the run published elsewhere, and what it removed here is needed.
        InputError: the Hub or the repository is not as it must be, see `is_to_be_made`.
    """
    work = journal.work_folder(output)
    before, moving = journal.uploads(work), (work / "moving").exists()
    away = any(not (work / "output" / name).exists() for name in journal.digests(work))
    if before and (away or moving) and before["repo"] != (destination and destination.repo):
        raise OutputError(
            output,
            f"this run publishes to {before['repo']}, and has removed shards",
            f"give --publish-as-you-go {before['repo']} as before, or start over with --fresh",
        )
    if destination is None:
        return None
    if moving:  # then all is uploaded, and it may be public
        require_token()
    is_new = not moving and is_to_be_made(destination.repo, ours=before.get("repo") == destination.repo)
    return Uploads(work, destination.repo, most=WAITING if destination.remove else None, is_new=is_new)


def card_gaps(report: Planned) -> dict[str, str]:
    """Reasons why the model card has no licence of the Hub's, or no base model on the Hub, by their keys in it."""
    from quantizers.eval.report.pages import front_matter, strange_licenses  # here, and below: with torch
    from quantizers.eval.report.schema import StitchReport

    front = front_matter(report)
    experts = report.experts.card if isinstance(report, StitchReport) else None
    named = (experts or {}).get("license", ())
    license_hint = f" (the experts' card says {', '.join(named)})" if named else ""
    made_from = report.source.made_from
    model_hint = f" (made from {', '.join(made_from)} according to its card)" if made_from else ""
    gaps = {
        "license": f"the source names none{license_hint}",
        "base_model": f"the source was a folder{model_hint}",
    }
    gaps = {key: words for key, words in gaps.items() if not front.get(key)}
    given = report.published is not None and report.published.license is not None
    strange = [] if given else strange_licenses(report.source.license)
    if strange:
        gaps["license"] = f"{', '.join(strange)}: no name of the Hub's, so the card says other"
    return gaps


def begin(uploads: Uploads | None, destination: Destination | None, report: Planned) -> None:
    """Begin to upload finished shards; say where, what is needed there, and what the card will lack.

    Raises:
        InputError: the Hub does not take the card, or refuses a new repository.
    """
    from quantizers.eval.report.pages import front_matter
    from quantizers.eval.report.schema import Published

    if uploads is None or destination is None:
        return
    report = report.changed(published=Published(repo=destination.repo))
    refuse_card(destination.repo, f"---\n{dump(front_matter(report))}---\n")
    for key, words in card_gaps(report).items():
        print(f"the card has no {key}: {words}; add it on the Hub, after the run", file=sys.stderr)
    if (needed := report.plan.output_bytes) > FREE:
        print(
            f"{destination.repo}: needs {size(needed)} of private storage until the end; a free account has "
            f"{size(FREE)}, see https://huggingface.co/docs/hub/storage-limits",
            file=sys.stderr,
        )
    uploads.begin()
    until = "private" if destination.private or uploads.stays_private else "private until the end"
    print(f"publishing as it goes to {uploads.url}, {until}", file=sys.stderr, flush=True)


def published(report: Report, destination: Destination | None, output: Path) -> Published | None:
    """Return the record of the publication for a report.

    None without a destination, or if a gate failed and no shards were removed.
    """
    from quantizers.eval.report.schema import Published

    removed = sorted(name for name in report.audit.digests if not (output / name).is_file())
    failed = any(not gate.passed for gate in report.gates)
    if destination is None or (failed and not removed):
        return None
    return Published(repo=destination.repo, removed=removed or None)


def _failed(report: dict[str, Any]) -> list[str]:
    """The failed gates of a report.json as it was read, of whatever version."""
    return [gate["name"] for gate in report["gates"] if not gate["passed"]]


def refuse_unpublished(report: dict[str, Any], destination: Destination | None, output: Path) -> None:
    """Raise an OutputError if an output that was finished before is to be published as it is made."""
    repo = report.get("published", {}).get("repo")
    if destination and repo != destination.repo and not _failed(report):
        raise OutputError(
            output,
            f"was finished before{f' and published as {repo}' if repo else ', without publishing'}",
            f"`quantize publish {output} --repo {destination.repo}` uploads it",
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
            f"{output} --repo {uploads.repo} --force REASON` uploads the rest all the same",
            file=sys.stderr,
        )
        return
    digests = report["audit"]["digests"]
    shards = [written_shard(Shard(name, ShardDigest(**digest))) for name, digest in digests.items()]
    known = {shard.name for shard in shards}
    uploads.finish([hashed(folder, name) for name in sorted({*report["files"], REPORT} - known)], shards, check)


def open_up(uploads: Uploads | None, destination: Destination | None) -> None:
    """Make the repository of a proven output public, unless it is to stay private or has other files; say which."""
    if uploads is None or destination is None or not uploads.proven:
        return
    others = uploads.others()
    why = "as --private says" if destination.private else "as it was before" if uploads.stays_private else ""
    if others:
        why = f"as it has {', '.join(others)}, not of this output: delete that and make it public on the Hub"
    if not why:
        uploads.make_public()
    print(
        f"{uploads.url}: {f'private, {why}' if why else 'public'}; the Hub's hashes equal those here", file=sys.stderr
    )
