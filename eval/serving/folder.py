"""Runs `check.check` on a folder."""

from __future__ import annotations

from pathlib import Path

from quantizers.architectures.families import architecture_for
from quantizers.architectures.sizes import sizes_of
from quantizers.checkpoint.reader import CONFIG, open_folder
from quantizers.system.errors import InputError

from .check import check
from .findings import Consumers


def check_folder(folder: Path, own: Path | None = None) -> Consumers | None:
    """How each serving engine would read a folder; None if it cannot be opened, which the audit reports.

    Args:
        own: a file with the user's own facts about the family.
    """
    try:
        candidate = open_folder(folder)
        facts = architecture_for(candidate.config, str(folder / CONFIG), own)
        sizes = sizes_of(facts, candidate.config, str(folder / CONFIG))
    except InputError:
        return None
    return check(candidate.config, candidate.tensors, facts, sizes)
