"""The portable form of a recipe, published with a finished checkpoint: it contains no path of the machine.

    source       its Hub id, or the folder's own name
    sets         copied next to the recipe as calibration.yaml and held-out.yaml, each with its lock
    own facts    about the model's family, copied as facts.yaml if the recipe names any
    local data   named by content, `data-<first 16 digits of the SHA-256>.jsonl`; copied with --with-data

The copied sets give the same samples as the originals: a run adds a lock for datasets of the Hub, and the copy states
the seed of a local file's order, which depends on its name. Comments are removed: they could contain anything.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quantizers.calibration.local_rows import file_hash, local_file
from quantizers.calibration.lock import Pin, lock_text, read_lock
from quantizers.calibration.set import LOCAL_SUFFIXES, DataSource, read_set
from quantizers.calibration.source_faults import for_each_source
from quantizers.system.output_files import CALIBRATION, FACTS, HELD_OUT, LOCK, RECIPE
from quantizers.system.strict_yaml import dump, parse

from .read import facts_location, set_location
from .schema import Calibration, Recipe

# As huggingface_hub.utils.validate_repo_id has it, which takes long to import.
_HUB_ID = re.compile(r"(?!.*(?:--|\.\.))(?=.{3,96}\Z)\w(?:[\w.-]*\w)?/\w(?:[\w.-]*\w)?(?<!\.git)")
Pins = Mapping[str, list[Pin]]  # of each source of a set, by the file name of the set's copy
NO_PINS: Pins = {}
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)")


@dataclass(frozen=True)
class Resolved:
    """A portable recipe with everything that it names."""

    recipe: Recipe  # naming the copies
    hash: str  # see `settings_hash`
    published_hash: str  # of the portable recipe, which may have locks that this one has not
    sets: Mapping[str, str]  # text of each copied set and lock, and of the user's own facts if any, by file name
    data: Mapping[str, Path]  # path of each local data file on this machine, by its published name
    renamed: Mapping[str, Mapping[str, str]]  # published name of a set's local files, by its copy and their names in it

    def texts(self) -> dict[str, str]:
        """The files to write next to the checkpoint: text by name."""
        return {RECIPE: dump(self.recipe.settings()), **self.sets}

    def published(self, place: str, target: str = CALIBRATION) -> str:
        """A row's place in a set, such as `./texts.jsonl:12`, with the file's published name instead."""
        # Take the longest matching name: a place in a.jsonl starts with a.json too.
        renamed = self.renamed[target]
        original = max((name for name in renamed if place.startswith(name)), key=len, default="")
        return renamed[original] + place.removeprefix(original) if original else place


def is_hub_id(model: str) -> bool:
    """Whether a name has the form of a Hub id, owner/name."""
    return _HUB_ID.fullmatch(model) is not None


def source_name(model: str, beside: Path) -> str:
    """The published name of a source: a Hub id unchanged, or the name of a folder relative to `beside`.

    A snapshot folder in the Hub's cache gets the Hub id that it belongs to.
    """
    folder = beside / os.path.expanduser(model)
    if not folder.is_dir() and is_hub_id(model):
        return model
    # Use a link's own name: its target may be private.
    folder = Path(os.path.abspath(folder))
    cached = _SNAPSHOT.fullmatch(folder.parent.parent.name)
    if cached and folder.parent.name == "snapshots":
        return f"{cached[1]}/{cached[2]}"
    return folder.name


def resolve_recipe(recipe: Recipe, path: Path, pins: Pins = NO_PINS, commit: str | None = None) -> Resolved:
    """Make a recipe portable: read its sets, and hash the local files that they name.

    Args:
        path: the recipe's path; paths in the recipe are relative to its folder.
        pins: of the copies that have datasets of the Hub, what was read of them; each gets a lock.
        commit: of the source on the Hub, which takes the place of a branch; None for a folder.

    Raises:
        CalibrationError: a set is wrong, or one of its local files is missing.
    """
    given = recipe
    if commit:
        recipe = recipe.model_copy(update={"source": recipe.source.model_copy(update={"revision": commit})})
    data: dict[str, Path] = {}
    renamed: dict[str, dict[str, str]] = {CALIBRATION: {}, HELD_OUT: {}}

    def published_name(target: str, folder: Path, source: DataSource) -> str:
        file = local_file(source, folder)
        name = f"data-{file_hash(file).removeprefix('sha256:')[:16]}{file.suffix}"
        data[name], renamed[target][source.dataset] = file, name
        return name

    texts = _copies(recipe, path, published_name, pins)
    names = renamed[CALIBRATION]
    portable = _with_copies(recipe, path, lambda name: names.get(name, name))
    return Resolved(portable, settings_hash(given, path), settings_hash(recipe, path, pins), texts, data, renamed)


def settings_hash(recipe: Recipe, path: Path, pins: Pins = NO_PINS) -> str:
    """SHA-256, hexadecimal: equal for two recipes with the same meaning, wherever they and their data are.

    It covers the settings, the user's own facts, the sets and their locks, but not local data, which may be gone when
    a run has finished. Raises CalibrationError if a set or its lock is wrong.
    """
    return hashlib.sha256(json.dumps(meaning(recipe, path, pins), sort_keys=True).encode()).hexdigest()


def meaning(recipe: Recipe, path: Path, pins: Pins = NO_PINS) -> list[dict[str, Any]]:
    """Input of `settings_hash`: the portable recipe's settings, and the text of each file beside it, by name."""
    unnamed = _with_copies(recipe, path, lambda name: "data.jsonl" if name.endswith(LOCAL_SUFFIXES) else name)
    return [unnamed.settings(), _copies(recipe, path, lambda *_: "data.jsonl", pins)]


def _with_copies(recipe: Recipe, path: Path, published: Callable[[str], str]) -> Recipe:
    """The recipe with the published names of its source, of the copied sets, and of the sources that it leaves out."""
    names = {"model": source_name(recipe.source.model, path.parent), "facts": recipe.source.facts and FACTS}
    source = recipe.source.model_copy(update=names)
    changes: dict[str, Any] = {"source": source}
    if recipe.calibration is not None:
        without = tuple(map(published, recipe.calibration_without))
        changes["calibration"] = Calibration(set=CALIBRATION, tokens=recipe.calibration_tokens, without=without)
    if recipe.verify and recipe.verify.perplexity:
        perplexity = recipe.verify.perplexity.model_copy(update={"data": HELD_OUT})
        changes["verify"] = recipe.verify.model_copy(update={"perplexity": perplexity})
    return recipe.model_copy(update=changes)


def is_made_by(report: Mapping[str, Any], recipe: Recipe, path: Path) -> bool:
    """Whether a report's output was made by this recipe, or has it beside it."""
    settings, own = report.get("settings"), settings_hash(recipe, path)
    return isinstance(settings, dict) and own in (settings.get("hash"), settings.get("published_hash"))


def facts_copy(file: Path | None) -> dict[str, str]:
    """The text of facts.yaml for the user's own facts, by its name; empty if there are none."""
    return {} if file is None else {FACTS: dump(parse(file)[0], width=120, short_in_one_line=True)}


def _copies(
    recipe: Recipe, path: Path, published_name: Callable[[str, Path, DataSource], str], given: Pins
) -> dict[str, str]:
    """The texts of the files beside a portable recipe, by name: of its sets, their locks, and the user's own facts.

    `published_name` gives that of a local source's file, from the name of its set's copy and the set's folder.
    """
    perplexity, texts = recipe.verify.perplexity if recipe.verify else None, dict[str, str]()
    calibration = None if recipe.calibration is None else recipe.calibration_set
    for target, set_name in ((CALIBRATION, calibration), (HELD_OUT, perplexity and perplexity.data)):
        if set_name:
            file = set_location(set_name, path)
            texts |= _copied_set(file, target, partial(published_name, target, file.parent), given.get(target))
    return texts | facts_copy(facts_location(recipe, path))


def _copied_set(
    path: Path, target: str, published_name: Callable[[DataSource], str], given: list[Pin] | None
) -> dict[str, str]:
    """The text of a set's copy, and of its lock's copy if it has a lock or is given one, by file name."""
    calibration = read_set(path)

    def copied(index: int, source: DataSource) -> DataSource:
        if not source.is_local:
            return source
        uses_seed = source.samples != "all" or source.shape == "code-contests"
        order = calibration.order_of(index) if uses_seed else source.order
        return source.model_copy(update={"dataset": published_name(source), "order": order})

    sources = for_each_source(calibration, path, copied, 1)
    values = calibration.model_copy(update={"sources": tuple(sources)}).model_dump(mode="json", exclude_none=True)
    texts = {target: dump(values, width=120, short_in_one_line=True)}
    if pins := read_lock(path, calibration) or given:
        copies = [
            pin.model_copy(update={"dataset": source.dataset, "files": {source.dataset: pin.version}})
            if source.is_local
            else pin
            for pin, source in zip(pins, sources, strict=True)
        ]
        texts[Path(target).stem + LOCK] = lock_text(copies)
    return texts
