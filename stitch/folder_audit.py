"""What lies beside the shards of a finished checkpoint, against its source: config.json, index, side files.

A tokenizer, a template or a rope_theta decides what a model says as much as its weights do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantizers.checkpoint import CONFIG, INDEX, Checkpoint, side_files
from quantizers.plan import Plan

from .digests import file_sha256

QUANTIZATION = "quantization_config"
# Of what a folder may hold besides: what a loader reads or runs.
LOADED = (".py", ".json", ".jinja", ".model", ".tiktoken")


def config_differences(found: Mapping[str, Any], expected: Mapping[str, Any], ours: bool) -> list[str]:
    """Keys of config.json that are not what the source's should have become, one line each.

    Args:
        found, expected: the candidate's config.json, and what this program would write.
        ours: whether this program wrote the candidate. Another's quantization_config may be spelled in another way;
            whether servers read it as it is meant is for eval/consumers.py to say.
    """
    skipped = () if ours else (QUANTIZATION,)
    return [
        f"{CONFIG}: {place} is {_shown(now)}, should be {_shown(before)}"
        for place, before, now in _leaves(expected, found)
        if place.partition(".")[0] not in skipped
    ]


def _leaves(expected: Any, found: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in dict.fromkeys([*expected, *found]):
            inner = f"{place}.{key}" if place else str(key)
            yield from _leaves(expected.get(key, _MISSING), found.get(key, _MISSING), inner)
    elif type(expected) is not type(found) or expected != found:
        yield place, expected, found


_MISSING = object()


def _shown(value: Any) -> str:
    if value is _MISSING:
        return "missing"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def index_differences(candidate: Checkpoint, plan: Plan) -> list[str]:
    """Entries of the index that are not the plan's, where the shards are; another program's layout is its own."""
    path = candidate.folder / INDEX
    files = plan.shards()
    if not path.is_file() or {info.file.name for info in candidate.tensors.values()} != set(files):
        return []
    entries = json.loads(path.read_text(encoding="utf-8"))["weight_map"]  # `open_folder` has read it
    planned = {name: file for file, tensors in files.items() for name in tensors}
    return [
        f"{INDEX}: {name} is said to be in {entries[name]}, should be in {file}"
        for name, file in planned.items()
        if entries.get(name, file) != file
    ]


def side_file_differences(folder: Path, source: Path) -> list[str]:
    """Side files that are missing, have other bytes than the source's, or come from nowhere."""
    lines = []
    names = set()
    for file in side_files(source):
        names.add(file.name)
        try:
            same = file_sha256(folder / file.name) == file_sha256(file)
        except FileNotFoundError:
            lines.append(f"{file.name}: missing; the source has it")
        except OSError as failure:
            lines.append(f"{file.name}: cannot be read ({failure.strerror})")
        else:
            if not same:
                lines.append(f"{file.name}: is not the source's")
    for file in side_files(folder):
        if file.suffix in LOADED and file.name not in names:
            lines.append(f"{file.name}: the source has no such file, and loaders read it; remove it")
    return lines
