"""Audit of config.json, side files (tokenizer, chat template, code) and stray files of a checkpoint.

A tokenizer, a chat template or rope_theta changes a model's output as much as its weights do.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from quantizers.checkpoint.reader import CONFIG, WEIGHTS, side_files
from quantizers.system.files import file_sha256

QUANTIZATION = "quantization_config"
# Endings and names of other files that a loader reads or runs.
LOADED = (".py", ".json", ".jinja", ".model", ".tiktoken")
LOADED_NAMES = ("vocab.txt", "merges.txt")


def config_differences(found: Mapping[str, Any], expected: Mapping[str, Any], ours: bool) -> list[str]:
    """Keys of config.json with another value than this program would write, one line each.

    Args:
        found, expected: the candidate's config.json, and the one that this program would write.
        ours: this program wrote the candidate. Other tools may write an equivalent quantization_config differently, so
            theirs is not compared; eval/serving checks how engines read it.
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


def side_file_differences(folder: Path, source: Path) -> list[str]:
    """Side files that are missing, differ from the source's, or are not in the source."""
    lines = []
    names = [str(file.relative_to(source)) for file in side_files(source)]
    for name in names:
        try:
            same = file_sha256(folder / name) == file_sha256(source / name)
        except FileNotFoundError:
            lines.append(f"{name}: missing; the source has it")
        except OSError as failure:
            lines.append(f"{name}: cannot be read ({failure.strerror})")
        else:
            if not same:
                lines.append(f"{name}: differs from the source's")
    return lines + [f"{name}: not in the source, but loaders read it; remove it" for name in added(folder, names)]


def added(folder: Path, known: Collection[str]) -> list[str]:
    """Names of unknown side files that a loader reads or runs."""
    files = (file for file in side_files(folder) if file.suffix in LOADED or file.name in LOADED_NAMES)
    return [name for file in files if (name := str(file.relative_to(folder))) not in known]


def strays(folder: Path, shards: Collection[str]) -> list[str]:
    """Weight files that are not in the index: some loaders read or prefer them.

    Args:
        shards: the file names in the index.
    """
    return [
        f"{path.name}: weights file not in the index; some loaders load it anyway"
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in WEIGHTS and path.name not in shards
    ]
