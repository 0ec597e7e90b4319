"""A recipe as it travels with a finished checkpoint: nothing in it names a path of the machine it was made on.

    source       its Hub id, or the folder's own name
    sets         copied beside the recipe as calibration.yaml and held-out.yaml, each with its lock where there is one
    local data   named by their content, `data-<SHA-256>.jsonl`; copied with --with-data

The copies give the same samples as the originals: a local file's order, which follows from its name, is written
into the copy. Comments are left behind; they may name anything.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantizers.system.own_files import CALIBRATION, HELD_OUT, LOCK, RECIPE
from quantizers.system.strict_yaml import dump

from .schema import Recipe, set_location

if TYPE_CHECKING:
    from quantizers.calibration.set import CalibrationSet, DataSource

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)")


@dataclass(frozen=True)
class Resolved:
    """A recipe with all that it names.

    Attributes:
        recipe: with the names of the copies.
        hash: see `settings_hash`.
        sets: text of each copied set and lock, by file name.
        data: where each local data file lies here, by its published name.
        renamed: the published name of each local file of the calibration set, by what the set calls it.
    """

    recipe: Recipe
    hash: str
    sets: Mapping[str, str]
    data: Mapping[str, Path]
    renamed: Mapping[str, str]

    def texts(self) -> dict[str, str]:
        """The files to write beside the checkpoint, by name."""
        return {RECIPE: recipe_text(self.recipe.settings()), **self.sets}

    def published(self, place: str) -> str:
        """A row's place in the calibration set, such as `./texts.jsonl:12`, without the file's own name."""
        # The longest: a place in a.jsonl begins with a.json too.
        found = max((name for name in self.renamed if place.startswith(name)), key=len, default="")
        return self.renamed[found] + place.removeprefix(found) if found else place


def recipe_text(settings: Mapping[str, Any]) -> str:
    """recipe.yaml of a recipe's settings."""
    return dump(settings)


def is_hub_id(model: str) -> bool:
    """Whether a name is spelled as on the Hub, owner/name."""
    return _HUB_ID.fullmatch(model) is not None


def source_name(model: str, beside: Path) -> str:
    """What a source is called where it is published: a Hub id as it is, a folder by its own name.

    A snapshot in the Hub's cache is called by the id that it was loaded under.

    Args:
        model: a Hub id, or a folder.
        beside: the folder that a relative one starts from.
    """
    path = Path(os.path.expanduser(model))
    folder = path if path.is_absolute() else beside / path
    if not folder.is_dir() and is_hub_id(model):
        return model
    # A link is called by its own name: where it leads to may be nobody's business.
    folder = Path(os.path.abspath(folder))
    cached = _SNAPSHOT.fullmatch(folder.parent.parent.name)
    if cached and folder.parent.name == "snapshots":
        return f"{cached[1]}/{cached[2]}"
    return folder.name


def resolve_recipe(recipe: Recipe, path: Path) -> Resolved:
    """Read a recipe's sets, and hash the local files that they name.

    Args:
        path: of the recipe, from whose folder its paths start.

    Raises:
        CalibrationError: a set is wrong, or one of its local files is missing.
    """
    from quantizers.calibration.sources.lock import file_hash
    from quantizers.calibration.sources.rows import local_file, published_name

    sets: dict[str, str] = {}
    data: dict[str, Path] = {}
    renamed: dict[str, dict[str, str]] = {}

    for target, name in _named_sets(recipe):
        file, names = set_location(name, path), renamed.setdefault(target, {})

        def called(source: DataSource, folder: Path = file.parent, names: dict[str, str] = names) -> str:
            found = local_file(source, folder)
            name = published_name(file_hash(found).removeprefix("sha256:"), found.suffix)
            data[name], names[source.dataset] = found, name
            return name

        sets |= _copies(file, target, called)
    own = _with_copies(recipe, path)
    return Resolved(own, settings_hash(recipe, path), sets, data, renamed[CALIBRATION])


def settings_hash(recipe: Recipe, path: Path) -> str:
    """SHA-256, hexadecimal: equal for two recipes that mean the same, wherever they and their data lie.

    Over the settings, the sets and their locks; not over local data, which need not be there any more when a run
    has finished.

    Raises:
        CalibrationError: a set or its lock is wrong.
    """
    texts = {
        name: text
        for target, called in _named_sets(recipe)
        for name, text in _copies(set_location(called, path), target, lambda _: "data.jsonl").items()
    }
    settings = _with_copies(recipe, path).settings()
    return hashlib.sha256(json.dumps([settings, texts], sort_keys=True).encode()).hexdigest()


def _named_sets(recipe: Recipe) -> list[tuple[str, str]]:
    """What each set is called beside a checkpoint, and by the recipe."""
    asked = recipe.verify.perplexity if recipe.verify else None
    return [(CALIBRATION, recipe.calibration), *([(HELD_OUT, asked.data)] if asked else [])]


def _with_copies(recipe: Recipe, path: Path) -> Recipe:
    """The recipe with its source's name and the copies' names."""
    source = recipe.source.model_copy(update={"model": source_name(recipe.source.model, path.parent)})
    changes: dict[str, Any] = {"source": source, "calibration": CALIBRATION}
    if recipe.verify and recipe.verify.perplexity:
        asked = recipe.verify.perplexity.model_copy(update={"data": HELD_OUT})
        changes["verify"] = recipe.verify.model_copy(update={"perplexity": asked})
    return recipe.model_copy(update=changes)


def _copies(path: Path, target: str, called: Callable[[DataSource], str]) -> dict[str, str]:
    """The text of a set's copy, and of its lock's where there is one, by file name.

    Args:
        called: the published name of a local source's file.
    """
    from quantizers.calibration.set import read_set
    from quantizers.calibration.sources.lock import read_lock
    from quantizers.calibration.sources.parallel import for_each_source
    from quantizers.calibration.take import order_of

    calibration = read_set(path)

    def copied(index: int, source: DataSource) -> DataSource:
        if not source.is_local:
            return source
        drawn = source.samples != "all" or source.shape == "code-contests"
        order = order_of(calibration, index) if drawn else source.order
        return source.model_copy(update={"dataset": called(source), "order": order})

    sources = for_each_source(calibration, path, copied, 1)
    texts = {target: set_text(calibration.model_copy(update={"sources": tuple(sources)}))}
    pins = read_lock(path, calibration)
    if pins is not None:
        entries = []
        for pin, source in zip(pins, sources, strict=True):
            files = dict(zip([source.dataset], pin.files.values(), strict=True)) if source.is_local else pin.files
            entries.append(pin.model_dump() | {"dataset": source.dataset, "files": files})
        lock = {"format": 1, "sources": entries}
        texts[Path(target).stem + LOCK] = json.dumps(lock, indent=1, ensure_ascii=False) + "\n"
    return texts


def set_text(calibration: CalibrationSet) -> str:
    """A set as YAML, every key that means something given."""
    values = calibration.model_dump(mode="json", exclude_none=True)
    return dump(values, width=120, short_in_one_line=True)
