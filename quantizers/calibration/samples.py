"""Load a set as the commands do: with a progress line, several sources at a time, and a cache on disk.

The cache is used while set, tokenizer and data are unchanged, so a resumed run, or each process of a run with
several, does not download everything again.
"""

from __future__ import annotations

from pathlib import Path

from quantizers.calibration.sources.cache import default_cache
from quantizers.system.errors import CalibrationError

from .data import CalibrationData, missing_languages
from .draw import draw
from .loading import load_samples
from .set import KINDS, read_set

WORKERS = 8  # sources loaded at the same time


def samples(path: Path, tokenizer: Path, trust_remote_code: bool = False, tokens: int | None = None) -> CalibrationData:
    """Load a calibration or held-out set.

    Args:
        path: the set's YAML file.
        tokenizer: a checkpoint's folder.
        trust_remote_code: whether code from the tokenizer's repository may run.
        tokens: draw so many, see draw.py; None takes the whole set.

    Raises:
        CalibrationError: see `load_samples`; or the set's `languages.required` does not hold of what was drawn.
    """
    from rich.console import Console

    from quantizers.calibration.report.view import loading

    with loading(Console(stderr=True)) as show_progress:
        data = load_samples(
            path,
            str(tokenizer),
            trust_remote_code=trust_remote_code,
            workers=WORKERS,
            progress=show_progress,
            cache=default_cache(),
        )
    if tokens is None:
        return data
    calibration = read_set(path)
    data = draw(data, tokens, calibration.seed)
    missing = missing_languages(calibration, data.samples)
    if calibration.languages.required and any(missing.values()):
        names = ", ".join(name for kind in KINDS for name in missing[kind])
        raise CalibrationError(
            f"{path}: of {tokens:,} tokens drawn from it none shows {names}; raise calibration.tokens, or drop "
            "languages.required"
        )
    return data
