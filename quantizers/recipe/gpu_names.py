"""GPUs by name (gpus.yaml): as people write them, and as nvidia-smi and torch print them."""

from __future__ import annotations

import difflib
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from quantizers.system.errors import InputError

LISTED = re.compile(r"^GPU \d+:\s*|\s*\(UUID: .*\)$", re.IGNORECASE)  # around a name, by `nvidia-smi -L`
SLICE = re.compile(r"\b\d+g\.(\d+)gb\b", re.IGNORECASE)  # a part of a GPU, by MIG
MEMORY = re.compile(r"(?<![A-Z0-9.])(\d+)[\s_-]?G(?:I?B)?(?![A-Z0-9])")
MOST, SIMILAR = 4, 0.6  # suggestions at most, and what difflib calls them at least
_DIGITS = re.compile(r"\d[\dO]*")


@cache
def _documents() -> tuple[set[str], dict[str, dict[str, Any]]]:
    words, entries = yaml.safe_load_all(Path(__file__).with_name("gpus.yaml").read_text())
    return {word for line in words for word in line}, entries


def known_gpus() -> dict[str, dict[str, Any]]:
    """The entries of gpus.yaml, by name."""
    return _documents()[1]


def find_gpu(text: str, place: str, count: int = 1) -> str:
    """The known GPU of a name, in upper or lower case and with spaces, hyphens or neither.

    Args:
        place: the option or key, for errors.
        count: how many of them were asked for, for the remedy.

    Raises:
        InputError: it is a slice of a GPU (MIG), no or no single GPU has this name, or none of this memory.
    """
    if part := SLICE.search(text):
        sliced = f"{part[0]} is a slice of a GPU (MIG)"
        raise InputError(place, sliced, f"give the memory of such slices, as {count}x{part[1]}GiB")
    name = LISTED.sub("", text).upper()
    if exact := _match(name, by_family=False):
        return exact[0]
    asked = MEMORY.search(name)
    memory = int(asked[1]) if asked else None
    without = MEMORY.sub(" ", name)
    family = _match(without, by_family=True)
    fitting = [gpu for gpu in family if known_gpus()[gpu]["memory"] == memory]
    if fitting:
        return fitting[0]
    remedy = f"give the memory of each, as {count}x{memory or 96}GiB"
    if family:
        known = " or ".join(str(size) for size in sorted({known_gpus()[gpu]["memory"] for gpu in family}))
        if memory is not None:
            raise InputError(place, f"as far as is known this GPU has {known} GB, not {memory}", remedy)
        raise InputError(place, f"this GPU has {known} GB", f"say which, as {' or '.join(family)}")
    suggestion = _suggestion(without, memory)
    names = "" if suggestion else f", or one of {', '.join(sorted(known_gpus()))}"
    raise InputError(place, f"no GPU {text} is known{suggestion}", f"{remedy}{names}")


def gpus_named(text: str) -> list[str]:
    """The known GPUs of a name, whatever their memory, and if it is a slice of one; none if it is unknown."""
    name = SLICE.sub("", LISTED.sub("", text)).upper().replace("MIG", "")
    return _match(name, by_family=False) or _match(MEMORY.sub(" ", name), by_family=True)


def _words(name: str) -> list[str]:
    return re.findall(r"[^\s_/()-]+", name)


def _match(name: str, *, by_family: bool) -> list[str]:
    """The GPUs whose name, or that without its memory, has the same words but for those that say nothing of a GPU.

    Of several the most exact ones: an "H100 PCIe" is no H100 with another word.
    """
    idle, entries = _documents()
    matched: dict[str, int] = {}
    for gpu, entry in entries.items():
        for other in (gpu, *entry.get("also", ())):
            parts = (other.removesuffix(f"-{entry['memory']}") if by_family else other).split("-")
            rest = "".join(word for word in _words(name) if word in parts or word not in idle)
            if rest and "".join(parts) in (rest, f"RTX{rest}"):
                matched[gpu] = max(len(parts), matched.get(gpu, 0))
    return [gpu for gpu, count in matched.items() if count == max(matched.values())]


def _suggestion(name: str, memory: int | None) -> str:
    """` (did you mean H100, 80 GB?)`: known names with the same numbers, read as they look, and of that memory if any.

    No name that differs in a number: an RTX 3080 is no RTX 3090. None for a laptop's, which has less memory than others
    of its name.
    """
    idle, entries = _documents()
    looks = "".join(
        word for word in _words(_DIGITS.sub(lambda match: match[0].replace("O", "0"), name)) if word not in idle
    )
    alike: dict[str, str] = {}
    for gpu, entry in entries.items():
        plain, family = gpu.replace("-", ""), gpu.removesuffix(f"-{entry['memory']}")
        letters, own = (set(re.sub(r"\d", "", text)) for text in (looks, plain))
        same = re.findall(r"\d+", family) == re.findall(r"\d+", looks) and (letters <= own or own <= letters)
        if same and memory in (None, entry["memory"]) and "LAPTOP" not in (*_words(name), *_words(gpu)):
            alike[plain] = f"{gpu}, {entry['memory']} GB"
    close = [looks] if looks in alike else difflib.get_close_matches(looks, alike, MOST, SIMILAR)
    return f" (did you mean {', or '.join(alike[plain] for plain in close)}?)" if close else ""
