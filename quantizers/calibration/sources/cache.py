"""A cache of loaded sets on disk, for later runs and for runs without a network.

`<key>.json` belongs to one set and one tokenizer. It contains the versions of the sources, the digest, and
everything except the tokens. `<digest>.npy` contains the tokens of all samples, concatenated. An entry
whose tokens do not match its digest is ignored.
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

FORMAT = 3  # increase it when the same set gives other tokens or fields


def default_cache() -> Path:
    """`moe-quantizers/calibration` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "moe-quantizers" / "calibration"


def recall(
    cache: Path, calibration: CalibrationSet, fingerprint: str, versions: list[str | SourceError]
) -> CalibrationData | None:
    """The cached result for the same set, tokenizer and versions, or None.

    A source that cannot be reached now matches any cached version; a source with another error matches none.
    """
    try:
        entry = json.loads((cache / f"{_key(calibration, fingerprint)}.json").read_bytes())
        if not all(map(_agree, versions, entry["versions"])):
            return None
        tokens = np.load(cache / f"{entry['digest']}.npy", allow_pickle=False)
        ends = np.cumsum([sample["tokens"] for sample in entry["samples"]])
        samples = tuple(
            Sample(**sample | {"tokens": sample_tokens, "languages": tuple(sample["languages"])})
            for sample, sample_tokens in zip(entry["samples"], np.split(tokens, ends[:-1]), strict=True)
        )
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None  # missing or damaged: load again
    if digest_of(samples) != entry["digest"]:
        return None
    return CalibrationData(
        name=calibration.name,
        sequence_length=calibration.sequence_length,
        lengths=calibration.lengths,
        samples=samples,
        digest=entry["digest"],
        dropped=tuple(Dropped(**dropped) for dropped in entry["dropped"]),
        versions=tuple(entry["versions"]),
    )


def remember(cache: Path, calibration: CalibrationSet, fingerprint: str, data: CalibrationData) -> None:
    """Write a loaded set to the cache. Failing to write is not an error."""
    entry = {
        "versions": data.versions,
        "digest": data.digest,
        "dropped": [asdict(dropped) for dropped in data.dropped],
        "samples": [_fields(sample) for sample in data.samples],
    }
    text = json.dumps(entry, ensure_ascii=False).encode()
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
