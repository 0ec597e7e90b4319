"""An output that was finished before: is it that of this recipe and source, and is all of it there?"""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import join
from typing import Any

import yaml

from quantizers.checkpoint.source_identity import is_source
from quantizers.output import journal
from quantizers.output.manifest import add_files, seal_of, write_record
from quantizers.planning.job import Job
from quantizers.recipe.portable import is_made_by, meaning, resolve_recipe
from quantizers.recipe.read import read_recipe
from quantizers.system.errors import InputError, OutputError
from quantizers.system.files import copy_file
from quantizers.system.formatting import short_path
from quantizers.system.output_files import RECIPE

from . import publication as publishing
from .options import Options

SHOWN = 3  # changed settings that a refusal names


def already_done(job: Job, options: Options, finished: dict[str, Any]) -> dict[str, Any]:
    """The report of an output that this recipe and source made; with `with_data`, data files are added first.

    Raises:
        OutputError: it is of another recipe or source, incomplete, or its report was changed.
    """
    output = options.output
    refuse_another(job, output, finished)
    removed = finished.get("published", {}).get("removed", ())
    shards = (name for name in finished["files"] if name.endswith(".safetensors") and name not in removed)
    if gone := [name for name in shards if not (output / name).is_file()]:
        more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
        raise OutputError(
            output,
            f"was finished before, and {gone[0]}{more} went missing since",
            "put back what is missing, or start over with --fresh",
        )
    if options.imatrix and not options.imatrix_file.exists():
        command = join(["quantize", "imatrix", short_path(job.path), "--output", str(options.imatrix_file)])
        raise OutputError(
            output,
            "was finished before, without an importance matrix",
            f"`{command}` writes it, with the --source, --calibration and --set of this run",
        )
    publishing.refuse_unpublished(finished, options.destination, output)
    if options.with_data:
        data = resolve_recipe(job.recipe, job.path).data
        if not set(data) <= set(finished["files"]):
            if finished.get("seal") != seal_of(finished):
                raise OutputError(
                    output, "its report.json was changed since the run wrote it", "nothing is added to it"
                )
            for name, file in data.items():
                copy_file(file, output / name)
            finished = write_record(output, add_files(output, finished, data))
    work = journal.work_folder(output)
    if work.exists():  # the run was killed while it removed its work folder
        with journal.locked(output):
            journal.remove(work)
    return finished | {"already_done": True}


def refuse_another(job: Job, output: Path, finished: dict[str, Any]) -> None:
    """Raise an OutputError if a finished output is that of another recipe or, if it is open, of another source."""
    remedy = "choose another --output, or start over with --fresh"
    if not is_made_by(finished, job.recipe, job.path):
        changed = _changes(output, job)
        raise OutputError(
            output, f"holds the finished output of another recipe{f' ({changed})' if changed else ''}", remedy
        )
    if job.source and not is_source(finished.get("source"), job.source, job.location):
        raise OutputError(output, f"holds the finished output of another source than {job.location}", remedy)


def _changes(output: Path, job: Job) -> str:
    """List the differences of a finished output's own recipe from this one; empty if its recipe cannot be read."""
    try:
        before = meaning(*read_recipe(str(output / RECIPE)))
    except InputError:
        return ""
    old, now = (
        settings | {name: yaml.safe_load(text) for name, text in texts.items()}
        for settings, texts in (before, meaning(job.recipe, job.path))
    )
    changes = [
        f"{key}: {journal.short_value(was)}, now {journal.short_value(value)}"
        for key, was, value in journal.differences(old, now)
    ]
    return ", ".join([*changes[:SHOWN], *([f"and {len(changes) - SHOWN} more"] if len(changes) > SHOWN else [])])


def warn_of_another_source(job: Job) -> None:
    """Say it if the recipe lies in a finished checkpoint that was made from another source, so that its run differs."""
    made = (journal.finished_report(job.path.parent) or {}).get("source")
    if isinstance(made, dict) and made.get("digest") and not is_source(made, job.opened, job.location):
        print(
            f"{job.path}: the checkpoint beside it was made from another source than {job.location}, so this will "
            "not give the same bytes",
            file=sys.stderr,
        )
