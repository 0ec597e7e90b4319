"""The files of one split of a data set on the Hub, from the list of the repository's files and its card.

The rules are those of `datasets`, which needs a request for each of its patterns to apply them: the card's `configs`
(https://huggingface.co/docs/hub/datasets-manual-configuration), or the names of folders and files
(https://huggingface.co/docs/hub/datasets-file-names-and-splits).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any

from fsspec.utils import glob_translate
from pydantic import BaseModel, ValidationError

# What is read, by suffix: of equally many files, those of the first suffix are the data.
FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".ndjson": "json"}
COMPRESSED = (".gz", ".zst")  # after the suffix of a text
NOT_DATA = {"README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SEP = "[-._ 0-9]"
_FOLDERS = ("**/{0}/**", f"**/{{0}}{_SEP}*/**", f"**/*{_SEP}{{0}}/**", f"**/*{_SEP}{{0}}{_SEP}*/**")
_NAMES = (f"**/{{0}}{_SEP}*", f"**/*{_SEP}{{0}}{_SEP}*")
CONVERSION = "refs/convert/parquet"  # the Hub's own, which has a folder for each split of each configuration
_CONVERTED = re.compile(r"([^/]+)/(?:partial-)?([^/]+)/[0-9]+\.parquet")
_NUMBERED = "-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9]*.*"


class _Files(BaseModel):
    split: str
    path: str | list[str]


class _Configuration(BaseModel, coerce_numbers_to_str=True):
    config_name: str = "default"
    default: bool = False
    data_dir: str | None = None
    data_files: str | list[str] | list[_Files] | None = None


def data_files(
    listing: Sequence[str], card: Mapping[str, Any], subset: str | None, split: str, revision: str | None = None
) -> tuple[list[str], list[str]]:
    """The paths of a split's files, in the order in which `datasets` reads them; and of its files in a rarer format,
    which it does not read.

    Args:
        listing: the paths of all files of the repository.
        card: the front matter of its README.
        subset: a configuration's name; None for the default one.
        revision: that the files are of, as it was asked for.

    Raises:
        ValueError: there is no such configuration, split or file, or none in a form that can be read; one line.
    """
    configs, converted = card.get("configs") or [], _converted(listing)
    if revision == CONVERSION or (not configs and subset in converted):  # or a commit of it
        configs = list(converted.values())
    configuration = _configuration(configs, subset)
    prefix = f"{normpath(configuration.data_dir)}/" if configuration.data_dir else ""
    paths = sorted(path.removeprefix(prefix) for path in listing if path.startswith(prefix))
    data = [path for path in _matching(paths, "**") if data_suffix(path)]
    named = configuration.data_files
    splits = _by_name(data) if named is None else _by_card(named)
    if named is None and not data:
        raise _unreadable(paths)
    if split not in splits:
        raise ValueError(f"no split {split!r}; it has {', '.join(splits)}")
    found = dict[str, None]()
    for pattern in splits[split]:
        matching = _matching(data if named is None else paths, pattern)
        found |= dict.fromkeys(matching)
        if not matching and not set(pattern) & set("*?["):
            raise ValueError(f"no file {prefix}{pattern}, which its card names for the split {split}")
    if not found:
        raise ValueError(f"no file {prefix}{f' or {prefix}'.join(splits[split])}, as its card has the split {split}")
    counts = Counter(map(data_suffix, found))
    if not any(counts[suffix] for suffix in FORMATS):
        raise _unreadable(found)
    form = FORMATS[max(FORMATS, key=lambda suffix: counts[suffix])]
    files: tuple[list[str], list[str]] = ([], [])
    for path in found:
        if suffix := data_suffix(path):
            files[FORMATS[suffix] != form].append(prefix + path)
    return files


def data_suffix(path: str) -> str | None:
    """The suffix of `FORMATS` that a file has, such as `.jsonl` for `train.jsonl.gz`; None for another file."""
    file = PurePosixPath(path)
    suffix = PurePosixPath(file.stem).suffix if file.suffix in COMPRESSED else file.suffix
    return suffix if suffix in FORMATS and not (suffix == ".parquet" and file.suffix in COMPRESSED) else None


def _converted(listing: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The configurations of the Hub's own conversion by name, as a card would have them."""
    configs = dict[str, dict[str, Any]]()
    for path in listing:
        if found := _CONVERTED.fullmatch(path):
            one = configs.setdefault(found[1], {"config_name": found[1], "data_files": []})
            one["data_files"].append({"split": found[2], "path": path})
    return configs


def _configuration(configs: Sequence[Any], subset: str | None) -> _Configuration:
    try:
        configurations = [_Configuration.model_validate(item) for item in configs]
    except ValidationError as failure:
        problem = failure.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise ValueError(f"a configuration of its card is wrong ({place}: {problem['msg']})") from None
    configurations = configurations or [_Configuration()]
    names = ", ".join(one.config_name for one in configurations)
    if subset is not None:
        chosen = [one for one in configurations if one.config_name == subset]
        problem_or_none = f"no configuration {subset!r}; it has {names}"
    else:
        chosen = [one for one in configurations if one.default]
        chosen = chosen or [one for one in configurations if one.config_name == "default"] or configurations
        problem_or_none = f"several configurations and no default; give one as the subset: {names}"
    if len(chosen) != 1:
        raise ValueError(problem_or_none)
    return chosen[0]


def _by_card(files: str | Sequence[str | _Files]) -> dict[str, list[str]]:
    """The patterns of each split that a card names."""
    splits = dict[str, list[str]]()
    for item in [files] if isinstance(files, str) else files:
        split, path = ("train", item) if isinstance(item, str) else (item.split, item.path)
        splits.setdefault(split, []).extend([normpath(path)] if isinstance(path, str) else map(normpath, path))
    return splits


def _by_name(data: Sequence[str]) -> dict[str, list[str]]:
    """The patterns of each split that the names of folders and files tell; otherwise all is `train`."""
    if numbered := _matching(data, f"data/*{_NUMBERED}"):
        names = dict.fromkeys(re.split(r"-\d{5}-of-\d{5}", path.removeprefix("data/"))[0] for path in numbered)
        return {name: [f"data/{name}{_NUMBERED}"] for name in names}
    for forms in _FOLDERS, _NAMES:
        patterns = {name: [form.format(word) for word in words for form in forms] for name, words in SPLITS.items()}
        if found := {name: each for name, each in patterns.items() if any(_matching(data, one) for one in each)}:
            return found
    return {"train": ["**"]}


def _matching(paths: Iterable[str], pattern: str) -> list[str]:
    """The paths that a glob pattern matches; hidden ones and `__folders__` only if the pattern names such."""
    expression, ignored = re.compile(glob_translate(pattern)), NOT_DATA - {PurePosixPath(pattern).name}
    return [
        path
        for path in paths
        if expression.match(path) and PurePosixPath(path).name not in ignored and _hidden(path) == _hidden(pattern)
    ]


def _hidden(path: str) -> tuple[int, int]:
    *folders, name = path.split("/")
    hidden = sum(part.startswith(".") and part.strip(".") != "" for part in [*folders, name])
    return hidden, sum(part.startswith("__") for part in folders)


def _unreadable(paths: Iterable[str]) -> ValueError:
    kinds = Counter(PurePosixPath(path).suffix for path in _matching(paths, "**")).most_common(3)
    has = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in kinds) or "none"
    return ValueError(
        f"no data files in a form that can be read ({has}); try revision: {CONVERSION}, the Hub's own conversion"
    )
