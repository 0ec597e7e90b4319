"""`quantize stitch` from beginning to end: the two checkpoints become one, which is proven and reported as a run's is.

What a run knows of its calibration nobody knows here; report and card say so, and repeat what the experts' checkpoint
says of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eval.consumers.folder import check_folder
from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.source_files import source_digest
from quantizers.device.devices import versions
from quantizers.output import journal
from quantizers.output.fingerprint import refuse_changes
from quantizers.output.folder import finished_report, move_into_place, refuse_strangers
from quantizers.output.record import describe_files, text_sha256
from quantizers.plan.plan import summary
from quantizers.recipe.portable import facts_copy, source_name
from quantizers.system.errors import OutputError
from quantizers.system.files import write_text
from quantizers.system.output_files import CARD, PAGE
from quantizers.system.progress import checked, progress
from stitch.audit.checkpoint import verify
from stitch.audit.folder import folders_left_out
from stitch.mix import Mix, as_rows, belong_together, describe, write_mix
from stitch.write.digests import ShardDigest

from .card import write_with_card
from .card_facts import about_source, serving
from .origin import told_by
from .proof import own_gates


def stitch(
    source: Checkpoint,
    experts: Checkpoint,
    output: Path,
    device: torch.device,
    *,
    repair_router: bool = False,
    check: Callable[[], None] = lambda: None,
    own: Path | None = None,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Build the mixed checkpoint, audit it against its source as `quantize verify` does, and report.

    Args:
        source: the FP8 checkpoint.
        experts: an experts-only checkpoint made from a BF16 copy of it, by any tool.
        output: a new or empty folder, or that of the same call that was interrupted.
        repair_router: multiply the source's router by the ratio of the norms.
        check: called between steps; may raise to interrupt.
        own: a file with the user's own facts about the family, of which the output then carries a copy.
        command: what the user typed, to be named where the folder is found unfinished.

    Returns:
        The contents of report.json.

    Raises:
        CheckpointError: the two do not belong together, or have a format that cannot be stitched.
        OutputError: the folder holds something else.
    """
    carried = facts_copy(own)
    settings = {
        "source": source_name(source.name, Path.cwd()),
        "experts": source_name(experts.name, Path.cwd()),
        "digests": {"source": source_digest(source), "experts": source_digest(experts)},
        "repair_router": repair_router,
    } | {name: text_sha256(text) for name, text in carried.items()}
    finished = finished_report(output)
    if finished is not None:
        if finished.get("stitched") != settings or "gates" not in finished:  # older versions had no gates
            raise OutputError(f"{output}: holds another finished output; choose another --output")
        return finished | {"already_done": True}
    mix = belong_together(source, experts, device, own)
    refuse_strangers(output)
    with journal.locked(output):
        work = journal.work_folder(output)
        if not (work / "moving").exists():
            refuse_changes(work, settings, output)
            journal.note_command(work, command, mix.sizes["layers"])
            written = write_mix(mix, work, repair_router=repair_router, check=check)
            folder = work / "output"
            for name, text in carried.items():
                write_text(text, folder / name)
            report = _prove(mix, settings, folder, written, device=device, check=check, own=own)
            write_with_card(folder, report | describe_files(folder, carried, later=(CARD, PAGE)))
            write_text("", work / "moving")
        return move_into_place(work, output)


def _prove(
    mix: Mix,
    settings: dict[str, Any],
    folder: Path,
    written: dict[str, ShardDigest],
    *,
    device: torch.device,
    check: Callable[[], None],
    own: Path | None,
) -> dict[str, Any]:
    """Read every file once more, and report all that is known; only the list of files is missing.

    Args:
        settings: by which a later call knows the output again.
        written: digests of the shards, from when they were written.
    """
    source, facts, plan = mix.source, mix.facts, mix.plan
    with progress("verifying", mix.sizes["layers"]) as step:
        audit = verify(folder, source, device, written, checked(step, check), own=own)
    consumers = check_folder(folder, own)
    report: dict[str, Any] = {
        "stitched": settings,
        "source": {
            "model": settings["source"],
            "revision": source.revision,
            "digest": settings["digests"]["source"],
        }
        | about_source(facts, settings["source"], source),
        "experts": {
            "model": settings["experts"],
            "revision": mix.experts.revision,
            "digest": settings["digests"]["experts"],
            "schemes": [asdict(scheme) for scheme in sorted(set(plan.schemes), key=plan.schemes.index)],
        }
        | told_by(mix.experts),
        "plan": {key: value for key, value in summary(plan, mix.sizes).items() if key != "shards"},
        "versions": versions(),
        "examined": describe(mix.found),
        "notes": [*describe(mix.found), *folders_left_out(source.folder)],
        "layers": as_rows(mix.found),
        "audit": audit.as_dict() | {"digests": written},
        "gates": own_gates(audit, consumers),
        "serving": serving(plan, facts, mix.sizes, source, settings["source"]),
    }
    return report | ({"consumers": consumers.as_dict()} if consumers else {})
