"""Data sets on the Hub: what a repository holds, which files are a split's, and their bytes by ranges, patiently."""

from __future__ import annotations

import io
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from posixpath import normpath
from threading import Event
from typing import Any, TypeVar

from fsspec.utils import glob_translate
from pydantic import BaseModel, ValidationError

from quantizers.system import hub_client
from quantizers.system.hub_client import kind_of, status_of

from .source_faults import SourceError, Unreachable

TIMEOUT = 20.0  # seconds to wait for an answer, or for the next bytes of one
PAUSES = (0.5, 1.0, 2.0)  # seconds before a request is made again whose connection broke, or that a server's error met
GIVE_UP = 600.0  # seconds after which a request that is told to wait is given up
NO_NETWORK = "check the network, or take the shipped set embedded, which needs none (--calibration embedded)"

# What is read, by suffix: of equally many files, those of the first suffix are the data.
FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".ndjson": "json"}
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}  # after the suffix of a text; what pyarrow calls them
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

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Repository:
    """A data set at one commit."""

    dataset: str
    commit: str  # of the revision that was asked for
    files: tuple[str, ...]  # the paths of all of them
    card: Mapping[str, Any]  # the front matter of its README

    @property
    def licence(self) -> str:
        """The licence that its card names, by the Hub's identifier; empty if it names none."""
        licence = self.card.get("license_name") or self.card.get("license") or ""
        return ", ".join(map(str, licence)) if isinstance(licence, list) else str(licence)


@dataclass
class Hub:
    """The Hub during the loading of one set. Use as a context manager: leaving it ends what still waits."""

    give_up: float = GIVE_UP
    unreachable: str = ""  # why no request is made, and each raises Unreachable; empty if they are made
    stopped: Event = field(default_factory=Event)  # set when nothing may be waited for any more

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()

    def look_up(self, dataset: str, revision: str | None = None) -> Repository:
        """The repository of a data set as it is now, with one request.

        Raises Unreachable if the Hub cannot be reached or does not answer in time, SourceError if it has no such data
        set or revision.
        """
        from huggingface_hub import HfApi

        api = HfApi()
        info = self._ask(dataset, revision, lambda: api.dataset_info(dataset, revision=revision, timeout=TIMEOUT))
        card = info.card_data.to_dict() if info.card_data else {}
        return Repository(dataset, str(info.sha), tuple(file.rfilename for file in info.siblings or ()), card)

    def read_range(self, repository: Repository, path: str, first: int, size: int) -> tuple[bytes, int]:
        """At most `size` bytes of a file from byte `first` on, and the file's size. Raises what `look_up` raises."""
        from huggingface_hub import hf_raise_for_status

        dataset, commit = repository.dataset, repository.commit

        def request() -> tuple[bytes, int]:
            end = first + size
            answer = hub_client.range_answer(dataset, path, commit, first, end, timeout=TIMEOUT, dataset=True)
            if answer.status_code == 416:  # the file ends before
                return b"", int(answer.headers.get("Content-Range", "*/0").rpartition("/")[2])
            hf_raise_for_status(answer)
            if answer.status_code == 206:
                return answer.content, int(answer.headers["Content-Range"].rpartition("/")[2])
            return answer.content[first:end], len(answer.content)  # ranges are not served

        return self._ask(dataset, commit, request)

    def _ask(self, dataset: str, revision: str | None, request: Callable[[], Answer]) -> Answer:
        """The answer of a request, made again after broken connections, errors of servers, and 429."""
        if self.unreachable:
            raise Unreachable(dataset, f"cannot be reached ({self.unreachable})", NO_NETWORK)
        begun, tries = time.monotonic(), 0

        def pause_after(failure: Exception) -> tuple[float, str] | None:
            nonlocal tries
            kind, why = kind_of(failure), f"answers {status_of(failure)}"
            if kind == "limited":
                seconds = hub_client.seconds_asked_for(failure)
                last = f"given up after {self.give_up / 60:.0f} min"
            elif kind in ("cut", "server's error") and tries < len(PAUSES):
                seconds = PAUSES[tries]
                tries += 1
                last = f"{tries} of {len(PAUSES)} times"
                why = f"does not answer ({type(failure).__name__})" if kind == "cut" else why
            else:
                return None
            if time.monotonic() - begun + seconds > self.give_up:
                return None
            return seconds, f"calibration: {dataset}: the Hub {why}; asking again in {seconds:.0f} s, {last}"

        try:
            return hub_client.persist(request, pause_after, self.stopped)
        except Exception as failure:
            raise _explanation(failure, dataset, revision) from failure


class RemoteFile(io.RawIOBase):
    """A file of a repository: readable and seekable, without a buffer; each read is one request, see `read_range`."""

    def __init__(self, hub: Hub, repository: Repository, path: str) -> None:
        self._hub = hub
        self._repository = repository
        self._path = path
        self._position, self._size = 0, -1  # -1: not known yet

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END and self._size < 0:
            self._fetch(0, 1)
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        content = self._next(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def readall(self) -> bytes:
        """The rest, in large pieces: the inherited method asks for 8 KiB at a time."""
        return b"".join(iter(lambda: self._next(hub_client.PIECE), b""))

    def _next(self, size: int) -> bytes:
        """At most `size` of the next bytes; none at the end."""
        content = b"" if 0 <= self._size <= self._position else self._fetch(self._position, size)
        self._position += len(content)
        return content

    def _fetch(self, first: int, size: int) -> bytes:
        content, self._size = self._hub.read_range(self._repository, self._path, first, size)
        return content


def _explanation(failure: Exception, dataset: str, revision: str | None) -> SourceError:
    """A failed request as a SourceError with a reason and a remedy."""
    without = "leave it out: --without ID, or remove it from the set"
    kind, status = kind_of(failure), status_of(failure)
    if kind == "gated":
        return SourceError(dataset, "gated", f"accept its terms on the Hub, then `hf auth login`; or {without}")
    if kind == "no revision":
        return SourceError(dataset, f"no revision {revision}", "correct the source's revision, or lock the set again")
    if kind == "no repository":
        remedy = f"correct the id, or `hf auth login` if it is private; or {without}"
        return SourceError(dataset, "no such dataset on the Hub", remedy)
    if kind in ("limited", "server's error"):
        why = "asks to wait too often" if kind == "limited" else "has an error of its own"
        return Unreachable(dataset, f"the Hub {why} ({status})", f"give the command again later; or {without}")
    text = " ".join(f"{type(failure).__name__}: {failure}".split())
    text = re.sub(r"\s*\(Request ID: [^)]*\)| at 0x[0-9a-f]+", "", text)  # which differ each time
    shown = text if len(text) <= 160 else text[:157] + "..."
    if kind in ("cut", "not reached", "offline"):
        why = "HF_HUB_OFFLINE is set" if kind == "offline" else shown
        return Unreachable(dataset, f"cannot be reached ({why})", NO_NETWORK)
    return SourceError(dataset, f"cannot be read ({shown})", f"try again; or {without}")


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

    The rules are those of `datasets`, which needs a request for each of its patterns to apply them: the card's
    `configs` (https://huggingface.co/docs/hub/datasets-manual-configuration), or the names of folders and files
    (https://huggingface.co/docs/hub/datasets-file-names-and-splits).

    `listing` has the paths of all files of the repository, at the revision that was asked for; `subset` is None for the
    default configuration. Raises ValueError, in one line, if there is no such configuration, split or file, or none in
    a form that can be read.
    """
    configs, converted = card.get("configs") or [], _converted(listing)
    if revision == CONVERSION or (not configs and subset in converted):  # or a commit of it
        configs = list(converted.values())
    configuration = _configuration(configs, subset)
    prefix = f"{normpath(configuration.data_dir)}/" if configuration.data_dir else ""
    paths = sorted(path.removeprefix(prefix) for path in listing if path.startswith(prefix))
    if configuration.data_files is not None:
        splits = _by_card(configuration.data_files)
    else:
        every, paths = paths, [path for path in _matching(paths, "**") if data_suffix(path)]
        if not paths:
            raise _unreadable(every)
        splits = _by_name(paths)
    if split not in splits:
        raise ValueError(f"no split {split!r}; it has {', '.join(splits)}")
    matched = dict[str, None]()
    for pattern in splits[split]:
        matching = _matching(paths, pattern)
        matched |= dict.fromkeys(matching)
        if not matching and not set(pattern) & set("*?["):
            raise ValueError(f"no file {prefix}{pattern}, which its card names for the split {split}")
    if not matched:
        raise ValueError(f"no file {prefix}{f' or {prefix}'.join(splits[split])}, as its card has the split {split}")
    formats = {path: FORMATS[suffix] for path in matched if (suffix := data_suffix(path))}
    if not formats:
        raise _unreadable(matched)
    counts = Counter(map(data_suffix, formats))
    form = FORMATS[max(FORMATS, key=lambda suffix: counts[suffix])]
    read = [prefix + path for path, other in formats.items() if other == form]
    return read, [prefix + path for path, other in formats.items() if other != form]


def data_suffix(path: str) -> str | None:
    """The suffix of `FORMATS` that a file has, such as `.jsonl` for `train.jsonl.gz`; None for another file."""
    file = PurePosixPath(path)
    suffix = PurePosixPath(file.stem).suffix if file.suffix in COMPRESSED else file.suffix
    return suffix if suffix in FORMATS and not (suffix == ".parquet" and file.suffix in COMPRESSED) else None


def _converted(listing: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The configurations of the Hub's own conversion by name, as a card would have them."""
    configs = dict[str, dict[str, Any]]()
    for path in listing:
        if match := _CONVERTED.fullmatch(path):
            config = configs.setdefault(match[1], {"config_name": match[1], "data_files": []})
            config["data_files"].append({"split": match[2], "path": path})
    return configs


def _configuration(configs: Sequence[Any], subset: str | None) -> _Configuration:
    try:
        configurations = [_Configuration.model_validate(config) for config in configs]
    except ValidationError as failure:
        problem = failure.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise ValueError(f"a configuration of its card is wrong ({place}: {problem['msg']})") from None
    configurations = configurations or [_Configuration()]
    names = ", ".join(configuration.config_name for configuration in configurations)
    chosen = [
        configuration
        for configuration in configurations
        if (configuration.default if subset is None else configuration.config_name == subset)
    ]
    if subset is None and not chosen:
        chosen = [
            configuration for configuration in configurations if configuration.config_name == "default"
        ] or configurations
    if len(chosen) != 1:
        several = f"several configurations and no default; give one as the subset: {names}"
        raise ValueError(several if subset is None else f"no configuration {subset!r}; it has {names}")
    return chosen[0]


def _by_card(files: str | Sequence[str | _Files]) -> dict[str, list[str]]:
    """The patterns of each split that a card names."""
    splits = dict[str, list[str]]()
    for entry in [files] if isinstance(files, str) else files:
        split, path = ("train", entry) if isinstance(entry, str) else (entry.split, entry.path)
        splits.setdefault(split, []).extend([normpath(path)] if isinstance(path, str) else map(normpath, path))
    return splits


def _by_name(data: Sequence[str]) -> dict[str, list[str]]:
    """The patterns of each split that the names of folders and files tell; otherwise all is `train`."""
    if numbered := _matching(data, f"data/*{_NUMBERED}"):
        names = dict.fromkeys(re.split(r"-\d{5}-of-\d{5}", path.removeprefix("data/"))[0] for path in numbered)
        return {name: [f"data/{name}{_NUMBERED}"] for name in names}
    for forms in _FOLDERS, _NAMES:
        patterns = {split: [form.format(word) for word in words for form in forms] for split, words in SPLITS.items()}
        present = {split: globs for split, globs in patterns.items() if any(_matching(data, glob) for glob in globs)}
        if present:
            return present
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
    hidden = sum(step.startswith(".") and step.strip(".") != "" for step in [*folders, name])
    return hidden, sum(folder.startswith("__") for folder in folders)


def _unreadable(paths: Iterable[str]) -> ValueError:
    kinds = Counter(PurePosixPath(path).suffix for path in _matching(paths, "**")).most_common(3)
    has = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in kinds) or "none"
    return ValueError(
        f"no data files in a form that can be read ({has}); try revision: {CONVERSION}, the Hub's own conversion"
    )
