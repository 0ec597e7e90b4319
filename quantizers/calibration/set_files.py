"""Files of calibration sets: the shipped ones as a list and as copies, a new one for a file of texts, and a frozen one:
the rows that became a set's samples, as local files, and a set that makes the same samples of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from quantizers.system.errors import CalibrationError, InputError
from quantizers.system.files import nearest_existing, ready_folder, write_new
from quantizers.system.output_files import HELD_OUT
from quantizers.system.shipped import shipped
from quantizers.system.strict_yaml import dump

from .hub import Hub
from .local_rows import local_file, read_local
from .lock import lock_path
from .row_formats import Rejected, read_row
from .row_source import row_source
from .rows import Row, needed_columns, shuffled
from .set import LOCAL_SUFFIXES, CalibrationSet, DataSource, Shape, read_set, slug
from .source_faults import SourceError, for_each_source

if TYPE_CHECKING:
    from .samples import CalibrationData

# Names that columns usually have on the Hub, likelier ones first.
MESSAGES = ("messages", "conversations", "conversation")
ASKED = ("prompt", "instruction", "question", "query", "input", "problem")
ANSWERED = ("answer", "response", "output", "completion", "solution")
TEXT = ("text", "content", "story", "document", "body", "code")
CATEGORY = "category"

EXAMPLE = Path(__file__).with_name("example.jsonl")
LICENCES = "LICENCES.md"
LICENCES_TEXT = """\
# Where the rows of {name} come from

Each licence is the one that the set names, or the card of the data set at this commit. It binds whoever passes these
rows on.

| file | rows | from | version | licence |
|---|---:|---|---|---|
{rows}"""
# Keys of a source that reads a file, whatever the data set on the Hub was that its rows are from.
OF_A_FILE = {"subset": None, "revision": None, "split": "train", "streaming": False, "required": True}


def rows() -> list[dict[str, str]]:
    """One row for every shipped set, sorted by name: name, samples, where its sources are, and what it holds."""
    return [_row(path) for path in sorted(shipped("calibration").glob("*.yaml"))]


def _row(path: Path) -> dict[str, str]:
    sources = read_set(path).sources
    local = sum(source.is_local for source in sources)
    places = {"local": local, "on the Hub": len(sources) - local}
    counts = [
        len(read_local(local_file(source, path.parent), source.dataset)) if source.samples == "all" else source.samples
        for source in sources
    ]
    return {
        "name": path.stem,
        "samples": f"{sum(counts):,}",
        "sources": ", ".join(f"{count} {where}" for where, count in places.items() if count),
        "about": path.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip(" ."),
    }


def copy_set(name: str, folder: Path) -> list[Path]:
    """Copy a shipped set with its data and lock, and the held-out set that a check compares it with, with its data.

    The files keep their places relative to each other, and so the samples: the order of a local file's rows depends on
    its name in the set. Returns the copies, the set itself first. Raises CalibrationError if no shipped set has this
    name, and what `write_new` raises.
    """
    path = shipped("calibration") / f"{name.removesuffix('.yaml')}.yaml"
    if Path(name).name != name or not path.is_file():
        raise CalibrationError(name, "no such set", "`quantize calibration list` lists them")
    wanted = list[Path]()
    for set_file in filter(Path.is_file, (path, path.parent / HELD_OUT)):
        data = (source.dataset for source in read_set(set_file).sources if source.is_local)
        wanted += [set_file, *filter(Path.is_file, [lock_path(set_file)])]
        wanted += [Path(os.path.normpath(path.parent / name)) for name in data]
    contents = {folder / file.relative_to(path.parent): file.read_bytes() for file in wanted}
    write_new(contents)
    return list(contents)


def new_set(path: Path, data: Path | None) -> tuple[dict[Path, bytes], list[str]]:
    """A set for the texts of a file, or for three example rows that are written beside it.

    Returns bytes by path, the set first; and what the user should know, one line each. Raises CalibrationError if the
    file cannot be read, or no shape fits its rows, and InputError for a suffix that its kind of file does not have.
    """
    if path.suffix in LOCAL_SUFFIXES:
        raise InputError(path, "is the name of a data file", "name the set such as mine.yaml, and give texts by --data")
    contents: dict[Path, bytes] = {}
    if data is None:
        data = path.with_suffix(".jsonl")
        contents[data], rows = EXAMPLE.read_bytes(), read_local(EXAMPLE, str(data))
        notes = [f"replace the rows of {data} with your own"]
    else:
        if data.suffix not in LOCAL_SUFFIXES:
            raise InputError(data, f"not a file in {', '.join(LOCAL_SUFFIXES)}", "convert it to one")
        try:
            rows, notes = read_local(data, str(data)), []
        except SourceError as failure:
            raise CalibrationError(failure.subject, failure.reason, failure.remedy) from None
    source, unusable = _readable(rows, data)
    if unusable:
        notes.append(f"{len(unusable)} of {len(rows)} rows cannot be used as {source.shape}; the first: {unusable[0]}")
    return {path: _text(path, data, source, len(unusable), rows).encode(), **contents}, notes


def _readable(rows: Sequence[Row], data: Path) -> tuple[DataSource, list[str]]:
    """The shape and columns that read most rows, the first of equal ones; place and reason of each row left over."""
    present = list(dict.fromkeys(column for row in rows for column in row.values))
    tried = [(source, _unusable(rows, source)) for source in _candidates(present, rows[0].values)]
    best = min(tried, key=lambda attempt: len(attempt[1]), default=None)
    if best is None or len(best[1]) == len(rows):
        raise CalibrationError(
            data,
            f"no shape fits its columns ({', '.join(present)})",
            "name them as in docs/reference/calibration.md, Shapes",
        )
    return best


def _candidates(present: Sequence[str], first: dict[str, Any]) -> Iterator[DataSource]:
    def source(shape: Shape, *columns: str) -> DataSource:
        return DataSource(dataset="a.jsonl", columns=columns, shape=shape, samples=1, category="x")

    if {"name", "description", "solutions"} <= set(present):
        yield source("code-contests", "name")
    tools = ("tools",) if "tools" in present else ()
    for column in (name for name in MESSAGES if name in present):
        yield source("chat", column, *tools)
        yield source("sharegpt", column, *tools)
    for asked in (name for name in ASKED if name in present):
        for answered in (name for name in ANSWERED if name in present):
            yield source("prompt-answer", asked, answered)
    texts = [name for name in present if isinstance(first.get(name), str) and name != CATEGORY]
    for column in [*(name for name in TEXT if name in present), *(texts if len(texts) == 1 else [])]:
        yield source("text", column)


def _unusable(rows: Sequence[Row], source: DataSource) -> list[str]:
    unusable = []
    for row in rows:
        try:
            read_row(row.values, source, "0")
        except Rejected as reason:
            unusable.append(f"{row.place}: {reason}")
    return unusable


def _text(path: Path, data: Path, source: DataSource, unusable: int, rows: Sequence[Row]) -> str:
    categories = [row.values.get(CATEGORY) for row in rows]
    named = all(isinstance(category, str) and category.strip() for category in categories)
    relative = os.path.relpath(data.absolute(), path.absolute().parent)
    return f"""\
# A calibration set. `quantize calibration schema` prints all keys; docs/reference/calibration.md explains them.
{_line("name", path.stem)}
sequence_length: 2048            # tokens at which a text is cut
seed: 42                         # decides which rows a number of samples takes
# languages: {{programming: [Rust, C++], spoken: [Hindi], required: true}}
sources:
  - {_line("dataset", relative if relative.startswith("..") else f"./{relative}")}
    {_line("columns", list(source.columns))}
    shape: {source.shape}
    samples: {len(rows) - unusable if unusable else "all"}                 # all, or how many
    {_line("category", {"column": CATEGORY} if named else slug(data.stem) or "text")}
  # - dataset: HuggingFaceH4/no_robots     # a data set on the Hub
  #   columns: [messages]
  #   shape: chat                  # text | prompt-answer | chat | sharegpt | code-contests
  #   samples: 12
  #   category: chat
"""


def _line(key: str, value: Any) -> str:
    """A key and its value in one line of YAML."""
    return dump({key: value}, width=10_000, short_in_one_line=not isinstance(value, str)).rstrip("\n")


def freeze_set(path: Path, folder: Path, *, workers: int = 8, **tokenizer: Any) -> dict[str, Any]:
    """Write the rows of a set to `folder/data`, the set that reads them, and where they come from with their licences.

    The frozen set needs neither the Hub nor what the data sets hold by then: with the same tokenizer it makes the same
    samples.

    `tokenizer` has the arguments of `load_set` that name it: its chat template decides which rows are usable. Returns
    the `set`, all `files`, with it as the first; the number of `rows`; the `digest` that both sets have; and the data
    sets whose licence forbids commercial use, `non_commercial`. Raises CalibrationError if the set is wrong or a source
    cannot be read, and what `write_new` raises.
    """
    from .load_set import load_set
    from .samples import is_non_commercial

    options: dict[str, Any] = {"workers": workers, "require_languages": False, **tokenizer}
    calibration = read_set(path)
    ready_folder(nearest_existing(folder))  # a set that cannot be read leaves nothing
    data = load_set(path, **options)
    for source, version in zip(calibration.sources, data.versions, strict=True):
        if not version:
            raise CalibrationError(path, f"{source.dataset} could not be read", "remove it to freeze the others")
    texts = dict[str, str]()
    sources = list[DataSource]()
    origins = ""
    restricted = list[str]()
    for index, chosen in enumerate(_chosen_rows(calibration, path, data, workers)):
        source = calibration.sources[index]
        version = data.versions[index]
        licence = data.licences[index]
        if not chosen:
            continue
        name = PurePosixPath(source.dataset)
        seed = calibration.order_of(index)
        where = f"`{source.dataset}`"
        file = f"data/{index + 1:02}-{name.stem if source.is_local else name.name}.jsonl"
        # In the order of which the seed makes that of the samples.
        places = shuffled(list(range(len(chosen))), source, seed)
        in_file = sorted(zip(places, chosen, strict=True), key=itemgetter(0))
        texts[file] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for _, row in in_file)
        # Each source keeps its number of samples, on which the assigned languages depend.
        reads = {"dataset": f"./{file}", "licence": licence or None, "order": seed}
        sources.append(source.model_copy(update=OF_A_FILE | reads))
        if not source.is_local:
            where = f"[{source.dataset}](https://huggingface.co/datasets/{source.dataset}/tree/{version})"
        note = ", **not for commercial use**" if is_non_commercial(licence) else ""
        restricted += [source.dataset] * bool(note)
        origins += f"| {file} | {len(chosen)} | {where} | {version} | {licence or 'none named'}{note} |\n"
    frozen = calibration.model_copy(update={"sources": tuple(sources)}).model_dump(mode="json", exclude_none=True)
    about = f"# The rows of {calibration.name}, by `quantize calibration freeze`. Their licences: {LICENCES}\n"
    written = {f"{path.stem}.yaml": about + dump(frozen, width=120, short_in_one_line=True), **texts}
    written[LICENCES] = LICENCES_TEXT.format(name=calibration.name, rows=origins)
    files = [folder / name for name in written]
    write_new(
        {file: text.encode("utf-8", "backslashreplace") for file, text in zip(files, written.values(), strict=True)}
    )
    if (digest := load_set(files[0], **options).digest) != data.digest:
        raise CalibrationError(files[0], f"its samples are not those of {path}", "report it with both sets")
    about_files = {"set": str(files[0]), "files": list(map(str, files)), "rows": len(data.samples)}
    return about_files | {"digest": digest, "non_commercial": restricted}


def _chosen_rows(
    calibration: CalibrationSet, path: Path, data: CalibrationData, workers: int
) -> Iterator[list[dict[str, Any]]]:
    """The needed columns of the rows of each source that became samples, in the samples' order."""
    left = list(reversed(data.samples))

    def tried(index: int, source: DataSource) -> Iterable[Row]:
        rows = row_source(source, path.parent, calibration.order_of(index), hub).rows(data.versions[index])
        return list(rows if source.is_local else islice(rows, len(data.rows[index])))

    with Hub() as hub:
        every = for_each_source(calibration, path, tried, workers)
    for source, rows in zip(calibration.sources, every, strict=True):
        columns, chosen = needed_columns(source), list[dict[str, Any]]()
        for row in rows:
            here = (source.dataset, row.place)
            if left and (left[-1].source, left[-1].place) == here and len(chosen) != source.samples:
                left.pop()
                chosen.append({name: row.values[name] for name in columns if name in row.values})
        yield chosen
