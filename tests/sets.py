"""Calibration sets written for a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def rows_set(
    folder: Path, rows: list[tuple[str, str]], name: str = "set", samples: int | str = "all", **head: Any
) -> Path:
    """A set of (category, text) in a file of its own; `head` has other keys at the top."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"category": category, "text": text}) for category, text in rows]
    (folder / f"{name}.jsonl").write_text("\n".join(lines))
    source = {"dataset": f"{name}.jsonl", "columns": ["text"], "shape": "text", "samples": samples}
    body = (
        {"name": "mine", "sequence_length": 100} | head | {"sources": [source | {"category": {"column": "category"}}]}
    )
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(body))
    return path
