"""Loaded sets on disk, so that a second run, or one without a network, need not load again.

`<key>.json` belongs to one set and tokenizer: the versions of the sources it was loaded from, the
digest, and everything but the tokens. `<digest>.npy` has the tokens of all samples, one after the
other. What does not lead back to its digest is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quantizers.calibration.data import CalibrationData, Dropped, Sample, digest_of
from quantizers.calibration.set import CalibrationSet

from .rows import SourceError, Unreachable

FORMAT = 2  # changes whenever the same set would give other tokens or fields


def default_cache() -> Path:
    """`moe-quantizers/calibration` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "moe-quantizers" / "calibration"


def recall(
    cache: Path, calibration: CalibrationSet, fingerprint: str, versions: list[str | SourceError]
) -> CalibrationData | None:
    """What was loaded before from the same set, tokenizer and versions, or None.

    A source that cannot be reached now agrees with any version; one that is wrong with none.
    """
    try:
        kept = json.loads((cache / f"{_key(calibration, fingerprint)}.json").read_bytes())
        if not all(map(_agree, versions, kept["versions"])):
            return None
        tokens = np.load(cache / f"{kept['digest']}.npy", allow_pickle=False)
        ends = np.cumsum([sample["tokens"] for sample in kept["samples"]])
        samples = tuple(
            Sample(**sample | {"tokens": part, "languages": tuple(sample["languages"])})
            for sample, part in zip(kept["samples"], np.split(tokens, ends[:-1]), strict=True)
        )
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None  # nothing there, or damaged: load again
    if digest_of(samples) != kept["digest"]:
        return None
    return CalibrationData(
        name=calibration.name,
        sequence_length=calibration.sequence_length,
        lengths=calibration.lengths,
        samples=samples,
        digest=kept["digest"],
        dropped=tuple(Dropped(**dropped) for dropped in kept["dropped"]),
        versions=tuple(kept["versions"]),
    )


def remember(cache: Path, calibration: CalibrationSet, fingerprint: str, data: CalibrationData) -> None:
    """Keep what was loaded. A cache that cannot be written is no reason to fail."""
    kept = {
        "versions": data.versions,
        "digest": data.digest,
        "dropped": [asdict(dropped) for dropped in data.dropped],
        "samples": [_fields(sample) for sample in data.samples],
    }
    text = json.dumps(kept, ensure_ascii=False).encode()
    tokens = np.concatenate([sample.tokens for sample in data.samples])
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _write(cache / f"{data.digest}.npy", lambda file: np.save(file, tokens, allow_pickle=False))
        _write(cache / f"{_key(calibration, fingerprint)}.json", lambda file: file.write(text))
    except OSError:
        return


def _agree(now: str | SourceError, then: str) -> bool:
    return isinstance(now, Unreachable) or now == then


def _key(calibration: CalibrationSet, fingerprint: str) -> str:
    settings = calibration.model_dump(mode="json", exclude={"name"})
    text = json.dumps([FORMAT, settings, fingerprint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _fields(sample: Sample) -> dict[str, Any]:
    values = {field.name: getattr(sample, field.name) for field in fields(Sample)}
    return values | {"tokens": len(sample.tokens)}


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        write(file)
    os.replace(temporary, path)
