"""`quantize stitch` from beginning to end: two checkpoints become one, which is verified and reported as a run's is.

Nothing is known of the experts' calibration; report and card say so, and repeat what the experts' checkpoint says of
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.source_identity import source_digest
from quantizers.output import journal
from quantizers.output.fingerprint import refuse_changes
from quantizers.output.folder import finished_report, move_into_place, refuse_strangers
from quantizers.output.manifest import text_sha256
from quantizers.recipe.portable import facts_copy, source_name
from quantizers.system.errors import OutputError
from quantizers.system.files import write_text
from quantizers.system.progress import checked, progress
from stitch.audit.checkpoint import verify
from stitch.mix import belong_together, write_mix

from .report import stitch_report
from .report_files import write_report


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
            with progress("verifying", mix.sizes["layers"]) as step:
                audit = verify(folder, source, device, written, checked(step, check), own=own)
            write_report(folder, stitch_report(mix, settings, folder, audit, written, own), carried)
            write_text("", work / "moving")
        return move_into_place(work, output)
