"""A set as the commands load it: with progress, many sources at a time, and kept on the disk.

What was loaded before is found again while set, tokenizer and data are the same, so a run that goes on, and
each process of several, does not ask the Hub for all of it a second time.
"""

from __future__ import annotations

from pathlib import Path

from quantizers.calibration.sources.cache import default_cache

from .data import CalibrationData
from .loading import load_samples

WORKERS = 8  # sources that are loaded at the same time


def samples(path: Path, tokenizer: Path, trust_remote_code: bool = False) -> CalibrationData:
    """Load a calibration or held-out set.

    Args:
        path: the set's YAML file.
        tokenizer: a checkpoint's folder.
        trust_remote_code: whether the tokenizer may bring code of its own.

    Raises:
        CalibrationError: see `load_samples`.
    """
    from rich.console import Console

    from quantizers.calibration.report.view import loading

    with loading(Console(stderr=True)) as seen:
        return load_samples(
            path,
            str(tokenizer),
            trust_remote_code=trust_remote_code,
            workers=WORKERS,
            progress=seen,
            cache=default_cache(),
        )
