"""What a run that goes on looks at first: are its texts the same, and its finished shards as they were written?"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from eval.fidelity.held_out import HeldOut
from quantizers.output import journal
from quantizers.output.fingerprint import refuse_changes
from quantizers.system.errors import OutputError
from quantizers.system.progress import checked, progress


def refuse_other_texts(work: Path, layers: int, held: HeldOut, output: Path) -> None:
    """Finished layers were measured on the texts that the run began with. (A run may go on without any.)

    Raises:
        OutputError: now it is other texts, or then it was none.
    """
    if journal.done_layers(work, layers) and not (work / journal.HELD_OUT).exists():
        raise OutputError(
            f"{output}: its finished layers were measured on no held-out set; leave verify.perplexity out as before, "
            "or start over with --fresh"
        )
    refuse_changes(work, {"held_out": held.about["digest"]}, output, journal.HELD_OUT)


def find_damage(work: Path, layers: int, output: Path, check: Callable[[], None]) -> list[int]:
    """The finished layers of an earlier call whose shards are no longer as they were written; each is named."""
    entries = journal.done_layers(work, layers)
    for kept in journal.kept_files(work):
        if journal.damaged_shards(work, [json.loads(kept.read_text())]):
            kept.unlink()  # its shard is written at the beginning, so it will be written again
    if not entries:
        return []
    with progress("checking", len(entries), unit="shard") as step:
        damaged = journal.damaged_shards(work, entries, checked(step, check))
    for layer, problem in damaged.items():
        print(f"{output}: layer {layer}: {problem}; it is made again", file=sys.stderr)
    return list(damaged)
