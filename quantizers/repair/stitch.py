"""Two checkpoints become one, which is verified and reported as a run's is: `quantizers.stitch_experts`.

Nothing is known of the experts' calibration; report and card say so, and repeat what the experts' checkpoint says of
itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from quantizers.checkpoint.reader import open_checkpoint
from quantizers.checkpoint.source_identity import source_digest
from quantizers.commands import options as opt
from quantizers.commands.run import FinishedCheckpoint, print_default
from quantizers.device.determinism import ordered
from quantizers.device.devices import choose_device
from quantizers.distributed.process_group import RESUME
from quantizers.output import journal
from quantizers.output.manifest import refuse_incomplete, text_sha256
from quantizers.pipeline.report_files import write_report
from quantizers.recipe.portable import facts_copy, source_name
from quantizers.stitch.audit.checkpoint import verify
from quantizers.system.errors import OutputError
from quantizers.system.files import write_text
from quantizers.system.interrupts import interruptible
from quantizers.system.output_files import FACTS
from quantizers.system.progress import progress

from .mix import belong_together, write_mix
from .report import stitch_report


@opt.documented
def stitch_experts(
    source: Annotated[str | Path, opt.Option("the FP8 model: a folder or Hub id")],
    experts: Annotated[
        str | Path,
        opt.Option("a checkpoint with packed experts, quantized from a BF16 copy of the source"),
        "a checkpoint with packed experts, quantized by any tool from a BF16 copy of the source",
    ],
    output: Annotated[
        str | Path | None,
        opt.Option(
            "folder for the mixed checkpoint, new or empty; out/<name of --experts>-stitched by default",
            names=opt.OUTPUT,
            is_path=True,
        ),
        "a new or empty folder, or that of the same call that was interrupted; out/<name of experts>-stitched by "
        "default",
    ] = None,
    *,
    repair_router: Annotated[
        bool, opt.Option("compensate the router for the smoothed norms of the experts' checkpoint")
    ] = False,
    facts: opt.Facts = None,
    device: opt.Device = "auto",
    command: opt.Command = (),
) -> FinishedCheckpoint:
    """Build a mixed checkpoint: experts from one checkpoint, everything else from the FP8 source.

    Progress is printed on standard error. An interrupted call resumes when it is made again.

    Returns:
        The checkpoint. Gates that failed, such as an uncompensated router, do not raise: see `passed`.

    Raises:
        CheckpointError: the two do not belong together, or have a format that cannot be stitched.
        OutputError: the folder holds something else.
    """
    refuse_incomplete(Path(source))
    refuse_incomplete(Path(experts))
    if output is None:
        output = Path("out") / f"{Path(source_name(str(experts), Path.cwd())).name}-stitched"
        print_default(output)
    output, own = Path(output), Path(facts) if facts is not None else None
    opened, theirs = open_checkpoint(str(source)), open_checkpoint(str(experts))
    location = os.path.relpath(opened.folder) if Path(source).expanduser().is_dir() else str(source)
    copied = facts_copy(own)
    settings = {
        "source": source_name(opened.name, Path.cwd()),
        "experts": source_name(theirs.name, Path.cwd()),
        "digests": {"source": source_digest(opened), "experts": source_digest(theirs)},
        "repair_router": repair_router,
    } | {name: text_sha256(text) for name, text in copied.items()}
    finished = journal.finished_report(output)
    if finished is not None:
        if finished.get("stitched") != settings:
            raise OutputError(output, "holds another finished output", "choose another --output")
        return FinishedCheckpoint(output, finished | {"already_done": True}, location)
    on = choose_device(device)
    with interruptible(RESUME) as check, ordered():
        mix = belong_together(opened, theirs, on, own)
        journal.refuse_strangers(output)
        with journal.locked(output):
            work = journal.work_folder(output)
            if not (work / "moving").exists():
                journal.refuse_changes(work, settings, output)
                journal.note_command(work, command)
                written = write_mix(mix, work, repair_router=repair_router, check=check)
                folder = work / "output"
                copied |= {FACTS: mix.facts.as_yaml()} if mix.facts.probes else {}
                for name, text in copied.items():
                    write_text(text, folder / name)
                with progress("verifying", mix.facts.num_layers, check=check) as step:
                    audit = verify(folder, opened, on, written, step, own=mix.facts)
                write_report(folder, stitch_report(mix, settings, folder, audit, written), copied)
                write_text("", work / "moving")
            return FinishedCheckpoint(output, journal.move_into_place(work, output), location)
