"""Schema of a calibration set. Imports nothing heavy, so that a wrong set is refused in well under a second."""

from __future__ import annotations

import hashlib
import random
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from quantizers.system.errors import CalibrationError
from quantizers.system.schema import Strict, Wrong, load
from quantizers.system.strict_yaml import parse

LOCAL_SUFFIXES = (".jsonl", ".json", ".parquet")
OTHER = (".csv", ".tsv", ".ndjson", ".txt", ".gz", ".zst")  # of files that are no id on the Hub either
Kind = Literal["programming", "spoken"]
KINDS: tuple[Kind, ...] = ("programming", "spoken")
Family = Literal["code", "spoken"]
FAMILIES: dict[str, Kind] = {"code": "programming", "spoken": "spoken"}  # the first part of a category: code/rust
Shape = Literal["text", "prompt-answer", "chat", "sharegpt", "code-contests"]

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_KIND_OF: dict[str, Kind] = {"programming_language": "programming", "spoken_language": "spoken"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# The smallest and largest number of columns that a shape reads.
_COLUMNS: dict[str, tuple[int, int]] = {
    "text": (1, 1),  # the text
    "prompt-answer": (2, 2),  # question, answer
    "chat": (1, 2),  # messages; tools
    "sharegpt": (1, 2),  # conversations; tools
    "code-contests": (1, 1),  # the task's name; description and solutions are read as well
}
_CODES = """\
Arabic ar, Bengali bn, Chinese zh, Czech cs, Dutch nl, English en, French fr, German de, Greek el, Hebrew he, Hindi hi,
Hungarian hu, Indonesian id, Italian it, Japanese ja, Korean ko, Persian fa, Polish pl, Portuguese pt, Romanian ro,
Russian ru, Spanish es, Swedish sv, Thai th, Turkish tr, Ukrainian uk, Urdu ur, Vietnamese vi"""
CODES: dict[str, str] = dict(pair.split() for pair in _CODES.split(","))  # ISO 639-1, by a language's everyday name


def slug(name: str) -> str:
    """A language's name as the second part of a category: `cpp` for `C++`, `bash-shell` for `Bash/Shell`."""
    words = name.lower().replace("++", "pp").replace("#", "sharp")
    return re.sub(r"[^\w]+", "-", words).strip("-")


def seeded(text: str) -> random.Random:
    """A random generator that depends only on the text: the same in every process and on every machine."""
    return random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))


def placeholders(template: str) -> list[Kind]:
    """The kinds of language for which a prompt or category has a placeholder, in the order of `KINDS`.

    Raises ValueError if a word in braces is not one of the two placeholders.
    """
    names = set(_PLACEHOLDER.findall(template))
    if unknown := sorted(names - set(_KIND_OF)):
        known = " and ".join(f"{{{name}}}" for name in _KIND_OF)
        raise Wrong(f"unknown placeholder {{{unknown[0]}}}", f"there are {known}")
    return [kind for kind in KINDS if kind in {_KIND_OF[name] for name in names}]


def fill(template: str, languages: dict[Kind, str]) -> str:
    """Replace `{programming_language}` and `{spoken_language}` with languages."""
    return _PLACEHOLDER.sub(lambda match: languages[_KIND_OF[match[1]]], template)


class Languages(Strict):
    """The languages that prompts assign to samples and the report counts, by their everyday names."""

    programming: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Their categories are `code/rust`, `code/cpp` and so on. Rows of a column's category that names another language
    are left out; an empty list leaves none out."""
    spoken: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """The same for spoken languages: `spoken/hindi`."""
    required: bool = False
    """Whether a run refuses a set with no text in a language of the lists. A prompt that names one is no text in it."""

    @field_validator("programming", "spoken")
    @classmethod
    def _distinct(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        seen: dict[str, str] = {}
        for name in names:
            if not slug(name):
                raise ValueError(f"{name!r} is not the name of a language")
            if slug(name) in seen:
                raise Wrong(f"{name} and {seen[slug(name)]} are one language", "keep one")
            seen[slug(name)] = name
        return names

    def of(self, kind: Kind) -> tuple[str, ...]:
        """The list of one kind."""
        return self.programming if kind == "programming" else self.spoken

    def claimed_by(self, category: str) -> tuple[Kind | None, str | None]:
        """The kind of language that a category claims, and the listed language that it names, if any.

        `code/C++` claims C++, `code/rust/async` its second part; `math` claims none.
        """
        family, _, rest = category.partition("/")
        kind = FAMILIES.get(family.strip().lower())
        slugs = {slug(rest), slug(rest.partition("/")[0])} - {""}
        if not (kind and slugs):
            return None, None
        return kind, next((name for name in self.of(kind) if slug(name) in slugs), None)

    def unlisted_kind(self, category: str) -> Kind | None:
        """The kind whose list lacks the language that a category claims; an empty list lacks nothing."""
        kind, named = self.claimed_by(category)
        return kind if kind and self.of(kind) and not named else None


class FromColumn(Strict):
    """The category is read from a column of each row."""

    column: Annotated[str, Field(min_length=1)]
    """The column's name."""
    under: Family | None = None
    """For a column of languages: under `spoken`, `Hindi` is the category `spoken/hindi`."""

    def of(self, values: dict[str, Any]) -> str | None:
        """The category of a row; None if the column has no whole number and no printable text."""
        value = values.get(self.column)
        value = str(value) if type(value) is int else value  # of a class, as data sets for classifiers have them
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            return None
        return f"{self.under}/{slug(value)}" if self.under else value


class DataSource(Strict):
    """One source. A local file is one whose name ends in .jsonl, .json or .parquet."""

    dataset: Annotated[str, Field(min_length=1)]
    """A Hub id, or a file in .jsonl, .json or .parquet, relative to the set."""
    subset: str | None = None
    """Of a Hub data set: its configuration."""
    split: Annotated[str, Field(min_length=1)] = "train"
    """Of a Hub data set."""
    revision: str | None = None
    """Of a Hub data set: a branch, tag or commit; its newest by default. A lock pins all of them."""
    streaming: bool = False
    """Read a Hub data set only as far as needed. A local file is always read whole."""
    columns: Annotated[tuple[str, ...], Field(strict=False)]
    """The columns that the shape reads, in its order."""
    shape: Shape
    """How a row becomes a sample, see [shapes](#shapes)."""
    samples: Annotated[int, Field(ge=1, le=10_000_000)] | Literal["all"]
    """Number of samples, in an order that the seed decides, or `all` in the file's order. With a number, an unusable
    row is counted and the next one used; with `all` it is an error."""
    sequence_length: Annotated[int, Field(ge=2)] | None = None
    """Overrides the set's; a larger one makes [long texts](#samples-and-their-lengths)."""
    category: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)] | FromColumn
    """Category of the samples in every table: `math`, `code/rust`, `code/{programming_language}`, or
    `{column: NAME}` to read it from each row."""
    prompt: str | None = None
    """An instruction put before the text. `{programming_language}` and `{spoken_language}` in it assign a language
    to each sample in turn."""
    required: bool = True
    """Whether the set cannot be loaded without this source. If `false` and it cannot be read, samples of the same
    category take its place, or else texts of the set `embedded`, and report and card say so."""
    licence: Annotated[str, Field(min_length=1)] | None = None
    """Of the texts, by the Hub's identifier: `apache-2.0`, `cc-by-nc-4.0`."""
    order: Annotated[str, Field(min_length=1)] | None = None
    """Seed of the order of a local file's rows. Default: the file's name, so a renamed copy needs it to keep its
    samples."""

    @property
    def is_local(self) -> bool:
        """Whether `dataset` is a file, not a Hub id."""
        return self.dataset.endswith(LOCAL_SUFFIXES)

    @property
    def assigns(self) -> list[Kind]:
        """The kinds of language that are assigned to this source's samples: the placeholders of prompt and category."""
        return placeholders((self.prompt or "") + self.fixed_category)

    @property
    def fixed_category(self) -> str:
        """The category of all samples, with its placeholders; empty if each row has its own."""
        return self.category if isinstance(self.category, str) else ""

    @field_validator("dataset")
    @classmethod
    def _file_or_id(cls, dataset: str) -> str:
        if not dataset.endswith(LOCAL_SUFFIXES) and (dataset.endswith(OTHER) or not _HUB_ID.fullmatch(dataset)):
            raise Wrong(f"neither a Hub id nor a file in {', '.join(LOCAL_SUFFIXES)}", "correct or convert it")
        return dataset

    @field_validator("prompt", "category")
    @classmethod
    def _known_placeholders(cls, value: Any) -> Any:
        if isinstance(value, str):
            placeholders(value)
        return value

    @model_validator(mode="after")
    def _fits(self) -> DataSource:
        least, most = _COLUMNS[self.shape]
        if not least <= len(self.columns) <= most:
            allowed = str(least) if least == most else f"{least} or {most}"
            raise ValueError(f"the shape {self.shape} reads {allowed} columns, not {len(self.columns)}")
        if self.is_local and (self.subset or self.revision):
            raise Wrong("subset and revision are for Hub datasets", "a local file has neither")
        if self.order and not self.is_local:
            raise Wrong("order is for local files", "the order of a Hub dataset follows from its name")
        if self.is_local and self.split != "train":
            raise Wrong("a local file is one split, train", f"it has no {self.split}")
        if self.assigns and self.samples == "all":
            raise ValueError("a source that assigns languages needs a number of samples, not all")
        return self


class CalibrationSet(Strict):
    """One calibration set file."""

    name: Annotated[str, Field(min_length=1)]
    """Name in reports and model cards."""
    sequence_length: Annotated[int, Field(ge=2)]
    """Tokens at which a sample is truncated."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Decides which rows are sampled, and which language is assigned to which sample."""
    languages: Languages = Languages()
    """The languages that prompts assign and reports count, by their everyday names."""
    sources: Annotated[tuple[DataSource, ...], Field(strict=False, min_length=1)]
    """At least one source of texts."""

    @model_validator(mode="after")
    def _languages_to_assign(self) -> CalibrationSet:
        for source in self.sources:
            for kind in source.assigns:
                if not self.languages.of(kind):
                    raise Wrong(
                        f"{source.dataset} assigns {kind} languages, but languages.{kind} is empty", "list them"
                    )
        return self

    def length_of(self, source: DataSource) -> int:
        """The number of tokens at which a source's samples are truncated."""
        return self.sequence_length if source.sequence_length is None else source.sequence_length

    @property
    def lengths(self) -> tuple[int, ...]:
        """All token limits at which samples are truncated, ascending; the last bounds the longest sequence."""
        return tuple(sorted({self.length_of(source) for source in self.sources}))

    def order_of(self, index: int) -> str:
        """The seed of the order in which the rows of source number `index` are tried.

        It depends on the source and not on its neighbours, so editing the rest of a set does not change it. If a local
        file gives `order`, that is the seed, and the file's name does not matter.
        """
        source = self.sources[index]
        if source.order:
            return source.order
        key = (source.dataset, source.subset, source.split)
        repeats = sum((other.dataset, other.subset, other.split) == key for other in self.sources[:index])
        text = ":".join(map(str, (self.seed, *key, repeats)))
        return hashlib.sha256(text.encode()).hexdigest()[:16] if source.is_local else text

    def drawn_again(self, draw: int) -> CalibrationSet:
        """The set with its seed increased by `draw`: other rows of its sources, and other languages assigned to them.

        What `samples: all` takes stays as it is.
        """
        if not draw:
            return self
        sources = tuple(
            source.model_copy(update={"order": f"{source.order}:{draw}"}) if source.order else source
            for source in self.sources
        )
        return self.model_copy(update={"seed": self.seed + draw, "sources": sources})


def read_set(path: Path) -> CalibrationSet:
    """Read and check a calibration set. Raises CalibrationError, one line `file:line: key: what is wrong (remedy)`."""
    calibration = load(path, CalibrationSet, CalibrationError)
    for index, source in enumerate(calibration.sources):
        category = source.fixed_category  # the rows of a column's are left out instead
        if not placeholders(category) and (kind := calibration.languages.unlisted_kind(category)):
            line = parse(path, CalibrationError)[1]["sources", index, "category"]
            raise CalibrationError(
                f"{path}:{line}: sources[{index}].category",
                f"{category} names a language that languages.{kind} does not list",
                f"list it, remove the source, or give a category outside of {category.partition('/')[0]}/",
            )
    return calibration
