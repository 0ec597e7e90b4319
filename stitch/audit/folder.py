"""Audits what lies beside the shards of a finished checkpoint: config.json, side files, stray files.

A tokenizer, a chat template or a rope_theta decides what a model says as much as its weights do.
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
    """Keys of config.json whose value is not what this program makes of the source's, one line each.

    Args:
        found, expected: the candidate's config.json, and the one that this program would write.
        ours: whether this program wrote the candidate. Other programs may write an equivalent quantization_config
            differently, so theirs is not compared; eval/consumers checks how serving engines read it.
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
    """Side files that are missing, differ from the source's, or do not exist in the source."""
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
    return lines + [
        f"{name}: the source has no such file, and loaders read it; remove it" for name in added(folder, names)
    ]


def added(folder: Path, known: Collection[str]) -> list[str]:
    """Names of side files that a loader reads or runs, and that are not among the known ones."""
    return [file.name for file in side_files(folder) if file.name not in known and _is_loaded(file)]


def _is_loaded(file: Path) -> bool:
    return file.suffix in LOADED or file.name in LOADED_NAMES


def strays(folder: Path, shards: Collection[str]) -> list[str]:
    """Weight files that the index does not name, and folders with templates or code: some loaders read them too, or
    even prefer them.

    Args:
        shards: the file names in the index.
    """
    lines = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in WEIGHTS and path.name not in shards:
            lines.append(f"{path.name}: weights that the index does not name, which some loaders take all the same")
        elif path.is_dir() and not path.name.startswith("."):
            loadable = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix in (".py", ".jinja"))
            if loadable:
                lines.append(
                    f"{loadable[0].relative_to(folder)}: in a folder of its own, where loaders may look; remove it"
                )
    return lines


def folders_left_out(source: Path) -> list[str]:
    """A line for the report that names the source's sub-folders, none of which is copied; empty if it has none."""
    names = sorted(path.name for path in source.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [f"folders of the source that were not copied: {', '.join(names)}"] if names else []
