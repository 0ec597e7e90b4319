"""A finished checkpoint checked and uploaded to the Hub: `quantizers.publish`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizers.system.errors import CheckpointError, InputError
from quantizers.system.output_files import files_below


@dataclass(frozen=True)
class Publication:
    """The result of `publish`.

    Attributes:
        problems: the checks that failed, one line each; after an upload only those that were forced.
        uploaded: whether the files are on the Hub now.
        figures: what `quantize publish --json` prints: files with their hashes; after an upload the commit's URL, of a
            rehearsal the checklist.
    """

    problems: list[str]
    uploaded: bool
    figures: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether every check passed, or was forced."""
        return not self.problems or self.figures["forced"] is not None


def publish(
    folder: str | Path,
    repo: str,
    *,
    license: str | None = None,
    base_model: str | None = None,
    thorough: bool = False,
    source: str | Path | None = None,
    private: bool | None = None,
    revision: str = "main",
    dry_run: bool = False,
    force: str | None = None,
    device: str = "auto",
) -> Publication:
    """Check a finished checkpoint and upload it to the Hub, then compare the Hub's hashes with the local ones.

    The token is that of `hf auth login` or HF_TOKEN. An interrupted upload resumes when this is called again.

    Args:
        folder: an output of `run` or `stitch`.
        repo: owner/name; created if it does not exist.
        license: by the Hub's name; the source's by default.
        base_model: the source's Hub id, if it was read from a folder.
        thorough: compare every tensor with the source again, as `verify` does.
        source: the source model, a folder or Hub id, which implies `thorough`; the one in report.json by default.
        private: visibility of a new repository; None for the account's default.
        revision: branch; created if it does not exist.
        dry_run: check and list the files, without uploading.
        force: a reason to publish even if a check fails; the model card states it.
        device: where tensors are compared: cpu, cuda, cuda:N, or auto.

    Raises:
        CheckpointError: a check failed, without `force` or `dry_run`.
        InputError: the folder is not a finished output, an argument is wrong, or there is no token.
        QuantizeError: the Hub cannot be reached, or its files differ afterwards.
    """
    from quantizers.commands.verify import source_of
    from quantizers.device.devices import choose_device
    from quantizers.system.progress import progress

    from .checks import account_points, card_points, check_output, local_files, read_report, rehash
    from .publication import rewrite, with_publication
    from .upload import upload

    folder = Path(folder)
    if force is not None and not force.strip():
        raise InputError("--force: give the reason, which the card states")
    report = read_report(folder)
    after = with_publication(report, repo, license, base_model)
    for point in card_points(after):
        if point.state == "missing" and not dry_run:  # whose checklist says so
            print(f"the card has no {point.name}: {point.words}", file=sys.stderr)
    with progress("hashing", len(report["files"]) + 1) as step:
        files = local_files(folder, report, step)
    opened = None
    if thorough or source is not None:
        opened = source_of(folder, None if source is None else str(source), report["source"]["revision"])
    problems, notes = check_output(folder, report, files, opened, choose_device(device))
    for note in notes:
        print(note, file=sys.stderr)
    if problems and force is None and not dry_run:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointError(f"{folder}: {problems[0]}{more}; repair it, or give --force with a reason")
    figures: dict[str, Any] = {"repo": repo, "revision": revision, "problems": problems, "forced": force}
    if dry_run:
        sent = {file.name for file in files}
        figures |= {
            "private": private,
            "files": [vars(file) for file in files],
            "bytes": sum(file.size for file in files),
            "not_sent": [name for name in files_below(folder) if name not in sent],
            "checklist": [vars(point) for point in (*card_points(after), *account_points(repo, private))],
        }
        return Publication(problems, False, figures)
    after.pop("forced", None)
    if problems:  # the card then says that it was published all the same, and why
        after["forced"] = {"reason": force, "problems": problems}
    files = rehash(folder, files, rewrite(folder, report, after))
    with progress("publishing", 2) as step:
        published = upload(folder, files, repo, revision, private, step)
    return Publication(problems, True, published | figures)
