"""Checks of an output folder that an earlier call left: finished by the same recipe, or unfinished and undamaged."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from eval.fidelity.scoring import HeldOut
from quantizers.checkpoint.source_identity import source_digest
from quantizers.output import journal
from quantizers.output.journal import differences, finished_report, refuse_changes, short_value
from quantizers.output.manifest import add_files, seal_of, write_record
from quantizers.planning.job import Job
from quantizers.recipe.portable import Resolved, is_made_by, meaning, resolve_recipe
from quantizers.recipe.read import read_recipe
from quantizers.system.errors import InputError, OutputError
from quantizers.system.files import copy_file
from quantizers.system.output_files import RECIPE
from quantizers.system.progress import checked, progress

from .options import Options

SHOWN = 3  # changed settings that a refusal names


def already_done(job: Job, options: Options, finished: dict[str, Any]) -> dict[str, Any]:
    """The report of a finished output, with `already_done` set; with `with_data`, data files are added first.

    Raises:
        OutputError: the output was made from another recipe or source, or its report.json was changed.
    """
    output, source = options.output, finished.get("source")
    if not is_made_by(finished, job.recipe, job.path):
        changed = _changes(output, job)
        raise OutputError(
            f"{output}: holds the finished output of another recipe{f' ({changed})' if changed else ''}; choose "
            "another --output, or start over with --fresh"
        )
    assert job.source is not None
    if not isinstance(source, dict) or source.get("digest") != source_digest(job.source):
        raise OutputError(
            f"{output}: holds the finished output of another source than {job.location}; choose another --output, or "
            "start over with --fresh"
        )
    if options.with_data:
        finished = _add_data(output, finished, resolve_recipe(job.recipe, job.path))
    if journal.work_folder(output).exists():  # the run was killed while it removed its work folder
        with journal.locked(output):
            journal.remove(journal.work_folder(output))
    return finished | {"already_done": True}


def of_another_source(job: Job) -> bool:
    """Whether a recipe lies in a finished checkpoint that was made from another source, so that its run differs."""
    made = (finished_report(job.path.parent) or {}).get("source")
    return isinstance(made, dict) and made.get("digest") not in (None, source_digest(job.opened))


def _changes(output: Path, job: Job) -> str:
    """Where a finished output's own recipe differs from this one; empty if its recipe cannot be read."""
    try:
        before = meaning(*read_recipe(str(output / RECIPE)))
    except InputError:
        return ""
    old, now = (
        settings | {name: yaml.safe_load(text) for name, text in texts.items()}
        for settings, texts in (before, meaning(job.recipe, job.path))
    )
    changes = [f"{key}: {short_value(was)}, now {short_value(value)}" for key, was, value in differences(old, now)]
    return ", ".join([*changes[:SHOWN], *([f"and {len(changes) - SHOWN} more"] if len(changes) > SHOWN else [])])


def _add_data(output: Path, finished: dict[str, Any], resolved: Resolved) -> dict[str, Any]:
    """Copy the calibration sets' data into an output that was finished without it, and return the new report."""
    if set(resolved.data) <= set(finished["files"]):
        return finished
    if finished.get("seal") != seal_of(finished):
        raise OutputError(f"{output}: its report.json was changed since the run wrote it; nothing is added to it")
    for name, file in resolved.data.items():
        copy_file(file, output / name)
    return write_record(output, add_files(output, finished, resolved.data))


def refuse_other_texts(work: Path, layers: int, held: HeldOut, output: Path) -> None:
    """Finished layers were measured on the texts that the run began with. (A run may resume without any.)

    Raises:
        OutputError: now it is other texts, or then it was none.
    """
    if journal.done_layers(work, layers) and not (work / journal.HELD_OUT).exists():
        raise OutputError(
            f"{output}: its finished layers were measured on no held-out set; leave verify.perplexity out as before, "
            "or start over with --fresh"
        )
    refuse_changes(work, {"held_out": held.identity}, output, journal.HELD_OUT)


def find_damage(work: Path, layers: int, output: Path, check: Callable[[], None]) -> list[int]:
    """The finished layers of an earlier call whose shards are no longer as they were written; each is named."""
    entries = journal.done_layers(work, layers)
    for passthrough in work.glob("passthrough-*.json"):
        if journal.damaged_shards(work, [json.loads(passthrough.read_text())]):
            passthrough.unlink()  # its shard is written at the beginning, so it will be written again
    if not entries:
        return []
    with progress("checking", len(entries), unit="shard") as step:
        damaged = journal.damaged_shards(work, entries, checked(step, check))
    for layer, problem in damaged.items():
        print(f"{output}: layer {layer}: {problem}; it is made again", file=sys.stderr)
    return list(damaged)
