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
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from .recipe import Recipe, set_location

if TYPE_CHECKING:
    from .calibration.set import CalibrationSet

RECIPE, CALIBRATION, HELD_OUT = "recipe.yaml", "calibration.yaml", "held-out.yaml"
LOCK = ".lock.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)")


@dataclass(frozen=True)
class Resolved:
    """A recipe with all that it names.

    Attributes:
        recipe: with the names of the copies.
        sets: text of each copied set and lock, by file name.
        data: where each local data file lies here, by its published name.
        renamed: the published name of each local data file, by what a set called it.
    """

    recipe: Recipe
    sets: Mapping[str, str]
    data: Mapping[str, Path]
    renamed: Mapping[str, str]

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the settings and the sets: equal for two recipes that mean the same, wherever they lie."""
        digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.sets.items()}
        return hashlib.sha256(json.dumps([self.recipe.settings(), digests], sort_keys=True).encode()).hexdigest()

    def texts(self) -> dict[str, str]:
        """The files to write beside the checkpoint, by name."""
        return {RECIPE: recipe_text(self.recipe.settings()), **self.sets}

    def published(self, place: str) -> str:
        """A row's place, such as `./texts.jsonl:12`, without the file's own name."""
        for name, other in self.renamed.items():
            if place.startswith(name):
                return other + place.removeprefix(name)
        return place


def recipe_text(settings: Mapping[str, Any]) -> str:
    """recipe.yaml of a recipe's settings."""
    return yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)


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
    folder = folder.resolve()
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
    sets: dict[str, str] = {}
    data: dict[str, Path] = {}
    renamed: dict[str, str] = {}
    asked = recipe.verify.perplexity if recipe.verify else None
    for name, target in ((recipe.calibration, CALIBRATION), (asked and asked.data, HELD_OUT)):
        if name:
            _add_set(set_location(name, path), target, sets, data, renamed)
    source = recipe.source.model_copy(update={"model": source_name(recipe.source.model, path.parent)})
    changes: dict[str, Any] = {"source": source, "calibration": CALIBRATION}
    if recipe.verify and asked:
        own = recipe.verify.model_copy(update={"perplexity": asked.model_copy(update={"data": HELD_OUT})})
        changes["verify"] = own
    return Resolved(recipe.model_copy(update=changes), sets, data, renamed)


def _add_set(path: Path, target: str, sets: dict[str, str], data: dict[str, Path], renamed: dict[str, str]) -> None:
    from .calibration.lock import read_lock
    from .calibration.parallel import for_each_source
    from .calibration.set import DataSource, read_set
    from .calibration.sources import local_file, published_name
    from .calibration.take import order_of

    calibration = read_set(path)

    def copied(index: int, source: DataSource) -> DataSource:
        if not source.is_local:
            return source
        file = local_file(source, path.parent)
        with file.open("rb") as stream:
            name = published_name(hashlib.file_digest(stream, "sha256").hexdigest(), file.suffix)
        data[name], renamed[source.dataset] = file, name
        ordered = source.samples != "all" or source.shape == "code-contests"
        return source.model_copy(
            update={"dataset": name, "order": order_of(calibration, index) if ordered else source.order}
        )

    sources = for_each_source(calibration, path, copied, 1)
    own = calibration.model_copy(update={"sources": tuple(sources)})
    sets[target] = set_text(own)
    pins = read_lock(path, calibration)
    if pins is not None:
        entries = []
        for pin, before, after in zip(pins, calibration.sources, sources, strict=True):
            files = {after.dataset if name == before.dataset else name: found for name, found in pin.files.items()}
            entries.append(pin.model_dump() | {"dataset": after.dataset, "files": files})
        lock = {"format": 1, "sources": entries}
        sets[Path(target).stem + LOCK] = json.dumps(lock, indent=1, ensure_ascii=False) + "\n"


def set_text(calibration: CalibrationSet) -> str:
    """A set as YAML, every key that means something given."""
    values = calibration.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
