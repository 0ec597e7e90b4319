"""What lies beside the shards of a finished checkpoint, against its source: config.json, side files, strays.

A tokenizer, a template or a rope_theta decides what a model says as much as its weights do.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from quantizers.checkpoint.reader import CONFIG, WEIGHTS, side_files
from quantizers.system.own_files import file_sha256

QUANTIZATION = "quantization_config"
# Of what a folder may hold besides: what a loader reads or runs.
LOADED = (".py", ".json", ".jinja", ".model", ".tiktoken")
LOADED_NAMES = ("vocab.txt", "merges.txt")


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
        if file.name not in names and _is_loaded(file):
            lines.append(f"{file.name}: the source has no such file, and loaders read it; remove it")
    return lines


def _is_loaded(file: Path) -> bool:
    return file.suffix in LOADED or file.name in LOADED_NAMES


def strays(folder: Path, shards: Collection[str]) -> list[str]:
    """Weights beside those of the index, and folders with templates or code: some loaders take these too, or first.

    Args:
        shards: the names of the files that the index names.
    """
    lines = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in WEIGHTS and path.name not in shards:
            lines.append(f"{path.name}: weights that the index does not name, which some loaders take all the same")
        elif path.is_dir() and not path.name.startswith("."):
            found = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix in (".py", ".jinja"))
            if found:
                lines.append(
                    f"{found[0].relative_to(folder)}: in a folder of its own, where loaders may look; remove it"
                )
    return lines


def folders_left_out(source: Path) -> list[str]:
    """The source's own folders, none of which is copied: a line for the report where there are such."""
    names = sorted(path.name for path in source.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [f"folders of the source that were not copied: {', '.join(names)}"] if names else []
