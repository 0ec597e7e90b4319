"""Load a set as the commands do: with a progress line, several sources at a time, and a cache on disk.

The cache is used while set, tokenizer and data are unchanged, so a resumed run, or each process of a run with
several, does not download everything again.
"""

from __future__ import annotations

from pathlib import Path

from quantizers.calibration.sources.cache import default_cache

from .data import CalibrationData
from .loading import load_samples

WORKERS = 8  # sources loaded at the same time


def samples(path: Path, tokenizer: Path, trust_remote_code: bool = False) -> CalibrationData:
    """Load a calibration or held-out set.

    Args:
        path: the set's YAML file.
        tokenizer: a checkpoint's folder.
        trust_remote_code: whether code from the tokenizer's repository may run.

    Raises:
        CalibrationError: see `load_samples`.
    """
    from rich.console import Console

    from quantizers.calibration.report.view import loading

    with loading(Console(stderr=True)) as show_progress:
        return load_samples(
            path,
            str(tokenizer),
            trust_remote_code=trust_remote_code,
            workers=WORKERS,
            progress=show_progress,
            cache=default_cache(),
        )
