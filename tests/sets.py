"""Calibration sets written for a test."""

from __future__ import annotations

from pathlib import Path

import yaml
from conftest import REPOSITORY

SHORT, LONG = 48, 300


EMBEDDED = REPOSITORY / "calibration" / "embedded"


def write_set(folder: Path, short: int = SHORT, long: int = LONG) -> Path:
    """Three short texts and two long ones of the shipped held-out set."""
    kinds = (("held-out-code", 3, short), ("held-out-long", 2, long))
    sources = []
    for name, count, length in kinds:
        lines = (EMBEDDED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        (folder / f"{name}.jsonl").write_text("\n".join(lines[:count]) + "\n", encoding="utf-8")
        source = {"dataset": f"{name}.jsonl", "samples": "all", "category": {"column": "category"}}
        shape = {"columns": ["text"], "shape": "text"} if name.endswith("long") else {}
        sources.append(
            source | {"columns": ["prompt", "answer"], "shape": "prompt-answer", "sequence_length": length} | shape
        )
    path = folder / "long-set.yaml"
    path.write_text(yaml.safe_dump({"name": "long-set", "sequence_length": SHORT, "seed": 1, "sources": sources}))
    return path
