"""The journal's entry of a finished layer: what it keeps of the solution and of the shard, and what is shown of it."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizers.eval.fidelity.figures import LayerFigures
from quantizers.eval.report import schema
from quantizers.output import journal
from quantizers.output.journal import Shard, ShardDigest
from quantizers.recipe.schema import Stop
from quantizers.solve.result import LayerResult
from quantizers.stitch.audit.layer import LayerAudit
from quantizers.system.errors import Stopped
from quantizers.system.files import write_json
from quantizers.system.keys import key, maybe

Written = tuple[ShardDigest, LayerAudit]


class LayerEntry(schema.Layer):
    """A layer of report.json, and what the rest of the report is made of."""

    shard: str = key("Name of its file")
    digest: ShardDigest = key("The file as it was written")
    audit: dict[str, Any] = key("Its comparison with the source, see `LayerAudit`")
    source: str = key("SHA-256 over the source's tensors, hexadecimal")
    routed: list[list[int]] = key("Tokens routed to each expert, a row for each category; no row without experts")
    held_out: LayerFigures | None = maybe("Figures on the held-out texts")
    peak_memory_bytes: int = key("Peak memory of the process up to then", "bytes")

    @property
    def file(self) -> Shard:
        """Its shard."""
        return Shard(self.shard, self.digest)

    def shown(self) -> schema.Layer:
        """The part of it that report.json has of each layer."""
        return schema.Layer(
            **{name: value for name, value in self.given().items() if name in schema.Layer.model_fields}
        )

    def write(self, work: Path) -> None:
        """Write it into the work folder: from then on the layer is done."""
        write_json(journal.layer_file(work, self.layer), self.as_dict())


class ConvertedPart(schema.ConvertedLayer):
    """The journal's entry of a layer, or of another part of the source, that is converted and written."""

    shard: str = key("Name of its file")
    digest: ShardDigest = key("The file as it was written")
    audit: dict[str, Any] = key("What was compared when it was written, see `LayerAudit`")
    peak_memory_bytes: int = key("Peak memory of the process up to then", "bytes")

    @property
    def file(self) -> Shard:
        """Its shard."""
        return Shard(self.shard, self.digest)

    def shown(self) -> schema.ConvertedLayer:
        """The part of it that report.json has of each layer."""
        return schema.ConvertedLayer(
            **{name: value for name, value in self.given().items() if name in schema.ConvertedLayer.model_fields}
        )


def read_entries(work: Path, layers: int) -> list[LayerEntry]:
    """The entries of all layers done so far, in order."""
    return list(map(LayerEntry.model_validate, journal.done_layers(work, layers)))


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer that is quantized, and whose shard may not be on disk yet.

    Attributes:
        source: SHA-256 over the source's tensors.
        seconds: by phase; counting goes on until the shard is written.
        proof: see `schema.Layer`.
        solution: fields of the entry on search and rounding, see `of_solution`.
        routed, held_out: see `LayerEntry`.
    """

    number: int
    shard: str
    source: str
    seconds: dict[str, float]
    proof: float | None
    solution: dict[str, Any]
    routed: list[list[int]]
    held_out: LayerFigures | None

    def entry(self, written: Written, peak_memory: int) -> LayerEntry:
        """The entry once the shard is on disk; `closeness` is that of the experts' matrices to the source's."""
        assert self.proof is not None, "a layer is proven when its module is first made"
        digest, audit = written
        known = {expert: error for expert, error in enumerate(audit.by_expert) if error is not None}
        closeness = None
        if known:
            worst = max(known, key=known.__getitem__)
            closeness = schema.Closeness(
                median=statistics.median(known.values()), worst=known[worst], worst_expert=worst
            )
        return LayerEntry(
            layer=self.number,
            shard=self.shard,
            source=self.source,
            seconds=self.seconds,
            proof=self.proof,
            **self.solution,
            routed=self.routed,
            held_out=self.held_out,
            digest=digest,
            audit=audit.as_dict(),
            closeness=closeness,
            peak_memory_bytes=peak_memory,
        )


def of_solution(solved: LayerResult | None) -> dict[str, Any]:
    """Fields of the entry on the solution of a layer; `solved` is None if it has no experts."""
    if solved is None:
        return {"error": {}, "fallbacks": [], "leaning": None}
    return {
        # JSON has no infinity. An infinite error means that an expert's weights or inputs overflow.
        "error": {name: value if math.isfinite(value) else None for name, value in solved.error.items()},
        "fallbacks": _by_expert(solved.fallbacks),
        "leaning": solved.under_routed,
    }


def _by_expert(lines: Sequence[str]) -> list[str]:
    """Sort lines by expert number, so that the report does not depend on how many experts were solved at a time."""
    numbers = {line: re.match(r"expert (\d+)", line) for line in lines}
    return sorted(lines, key=lambda line: int(match[1]) if (match := numbers[line]) else -1)


def layer_note(entry: LayerEntry) -> str:
    """Format the note that is shown when a layer is done."""
    notes = [f"{sum(entry.seconds.values()):.1f} s"]
    if entry.routed:
        rounding = getattr(entry.error, "down_rounding", None) or 0.0
        notes.append(f"rounding {rounding:.4f}")
    if entry.closeness:
        notes.append(f"experts within {entry.closeness.worst:.1%}")
    if figures := entry.held_out:
        notes.append(f"hidden error {figures.hidden_error:.4f}")
        if figures.agreement is not None:
            notes.append(f"router agreement {figures.agreement:.2%}")
    return ", ".join(notes)


def refuse_layer(entry: LayerEntry, stop: Stop | None) -> None:
    """Stop after a layer whose figures are beyond what the recipe allows."""
    figures = entry.held_out
    if stop is None or not figures:
        return
    error, agreement = figures.hidden_error, figures.agreement
    if stop.max_hidden_error is not None and not error <= stop.max_hidden_error:
        problem = f"hidden error {error:.4g} > {stop.max_hidden_error:g} (verify.stop.max_hidden_error)"
    elif stop.min_router_agreement is not None and agreement is not None and not agreement >= stop.min_router_agreement:
        problem = f"router agreement {agreement:.4g} < {stop.min_router_agreement:g} (verify.stop.min_router_agreement)"
    else:
        return
    raise Stopped(
        "", f"stopped after layer {entry.layer}: {problem}", "give the same command with --ignore-stop to continue"
    )
