"""Take from one source the number of samples that the set asks for.

Rows are tried in the source's order. One that cannot be used is counted by its reason, and the next
takes its place. Languages are dealt by the sample's position among all samples of the set that are
dealt one, round after round in an order that the seed decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quantizers.calibration.sources.read import read_rows
from quantizers.calibration.sources.rows import Row, SourceError

from .data import Dropped, Sample
from .set import FAMILY, KINDS, CalibrationSet, DataSource, FromColumn, Kind, fill, seeded, slug
from .shapes import Rejected, instruct, read_row
from .tokens import Renderer

# A source is given up after so many rows for each sample, so that a template that refuses
# everything does not read a streamed dataset to its end.
PATIENCE = 50
PATIENCE_AT_LEAST = 1000


def order_of(calibration: CalibrationSet, index: int) -> str:
    """What decides the order in which the rows of source number `index` are tried.

    It depends on the source and not on its neighbours, so that a set can be edited around it. A local file that
    gives `order` has said it itself: then the file's name means nothing.
    """
    sources = calibration.sources
    if sources[index].order:
        return str(sources[index].order)
    key = (sources[index].dataset, sources[index].subset, sources[index].split)
    earlier = sum((other.dataset, other.subset, other.split) == key for other in sources[:index])
    text = ":".join(map(str, (calibration.seed, *key, earlier)))
    return hashlib.sha256(text.encode()).hexdigest()[:16] if sources[index].is_local else text


@dataclass(frozen=True)
class Taken:
    """The samples of one source, and the rows passed over."""

    samples: list[Sample]
    dropped: list[Dropped]


@dataclass(frozen=True)
class Taker:
    """What all sources of a set have in common while samples are taken.

    Attributes:
        folder: where paths of local files start.
        renderer: turns content into token ids.
        accepted: called with the dataset's name for every sample taken.
    """

    calibration: CalibrationSet
    folder: Path
    renderer: Renderer
    accepted: Callable[[str], None]

    def take(self, index: int, revision: str) -> Taken:
        """The samples of source number `index`.

        Args:
            revision: the commit of a Hub dataset; a local file has none.

        Raises:
            SourceError: it cannot be read, or has too few usable rows.
        """
        source = self.calibration.sources[index]
        if not self.renderer.has_template and (source.shape != "text" or source.prompt):
            reason = "the tokenizer has no chat template to render it with"
            raise SourceError(source.dataset, reason, "take the tokenizer of a chat model")
        seed, deal = order_of(self.calibration, index), self._dealer(index)
        wanted = source.samples
        patience = float("inf") if wanted == "all" else max(PATIENCE_AT_LEAST, PATIENCE * wanted)
        samples: list[Sample] = []
        rejected: dict[str, list[str]] = {}  # reason -> places
        read = 0
        for row in read_rows(source, self.folder, revision, seed):
            if len(samples) == wanted or read == patience:
                break
            read += 1
            try:
                samples.append(self._sample(row, source, deal(len(samples)), seed))
            except Rejected as failure:
                rejected.setdefault(str(failure), []).append(row.place)
            else:
                self.accepted(source.dataset)
        dropped = [Dropped(source.dataset, why, len(at), at[0]) for why, at in sorted(rejected.items())]
        if len(samples) < (read if wanted == "all" else wanted):
            raise _shortfall(source, len(samples), read, dropped)
        return Taken(samples, dropped)

    def _sample(self, row: Row, source: DataSource, dealt: dict[Kind, str], seed: str) -> Sample:
        content = read_row(row.values, source, seed)
        if source.prompt:
            content = instruct(content, fill(source.prompt, dealt))
        category = _category(source, row, dealt)
        tokens = self.renderer.tokens(content)
        length = self.calibration.length_of(source)
        return Sample(
            tokens=tokens[:length],
            category=category,
            source=source.dataset,
            truncated=max(0, len(tokens) - length),
            long=self.calibration.is_long(source),
            languages=(*dealt.values(), *self._named_by(category, dealt)),
            dealt=bool(dealt),
            place=row.place,
            text=content.text,
        )

    def _dealer(self, index: int) -> Callable[[int], dict[Kind, str]]:
        """From a sample's position in the source to the languages dealt to it."""
        first = list(self.calibration.first_slots())[index]
        orders = {kind: list(self.calibration.languages.of(kind)) for kind in self.calibration.sources[index].deals}
        for kind, names in orders.items():
            seeded(f"{self.calibration.seed}:{kind}").shuffle(names)
        return lambda position: {kind: names[(first[kind] + position) % len(names)] for kind, names in orders.items()}

    def _named_by(self, category: str, dealt: dict[Kind, str]) -> list[str]:
        return [
            name
            for kind in KINDS
            for name in self.calibration.languages.of(kind)
            if category == f"{FAMILY[kind]}/{slug(name)}" and name not in dealt.values()
        ]


def _category(source: DataSource, row: Row, dealt: dict[Kind, str]) -> str:
    if isinstance(source.category, FromColumn):
        category = row.values.get(source.category.column)
        if not isinstance(category, str) or not category.strip() or not category.isprintable():
            raise Rejected(f"no category in column {source.category.column}")
        return category
    return fill(source.category, {kind: slug(name) for kind, name in dealt.items()})


def _shortfall(source: DataSource, taken: int, read: int, dropped: list[Dropped]) -> SourceError:
    asked = f"all {read}" if source.samples == "all" else f"the {source.samples}"
    reasons = ", ".join(f"{item.reason} ({item.count}, first at {item.first})" for item in dropped)
    reason = f"{taken} of {asked} samples; {reasons or f'it has only {read} rows'}"
    remedy = f"correct the rows, or ask for at most {taken}" if taken else "correct the rows, columns or shape"
    return SourceError(source.dataset, reason, remedy)
