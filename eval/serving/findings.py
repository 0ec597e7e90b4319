"""Findings of the serving check: mistakes with their consequences, and the schemes that each engine would use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from quantizers.system.formatting import places, text_table

from .engines import KINDS

Severity = Literal["error", "warning", "note"]
NONE = "-"  # for a kind of module that the model lacks
ORDER: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """A mistake, or something untested.

    Attributes:
        severity: `error` if an engine refuses the checkpoint, or computes with other weights than those stored;
            `note` if nothing is known to be wrong.
        engine: the affected engines.
        problem: the mistake.
        consequence: the engines' reaction.
        places: the tensors, modules or keys of config.json that have it.
    """

    severity: Severity
    engine: str
    problem: str
    consequence: str
    places: tuple[str, ...]

    @property
    def where(self) -> str:
        """The first of the places."""
        return self.places[0]

    @property
    def count(self) -> int:
        """The number of places."""
        return len(self.places)

    def __str__(self) -> str:
        times = f" ({self.count:,} times)" if self.count > 1 else ""
        return f"{self.severity}: {places(self.places)}{times}: {self.problem}; {self.engine}: {self.consequence}"

    def as_dict(self) -> dict[str, Any]:
        """For report.json: without the places, which may be as many as the model's tensors."""
        return {key: value for key, value in vars(self).items() if key != "places"} | {
            "where": self.where,
            "count": self.count,
        }


@dataclass(frozen=True)
class Consumers:
    """The result of `check`; `consumers` in report.json.

    Attributes:
        schemes: text by engine and kind of module; the row STORED is how the tensors are stored.
        findings: errors first.
        tensor_parallel: by number of ranks, `ok` or the reason why vLLM cannot split the model among them.
    """

    schemes: dict[str, dict[str, str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    tensor_parallel: dict[int, str] = field(default_factory=dict)

    @property
    def errors(self) -> list[Finding]:
        """The findings that make `quantize verify` fail."""
        return [finding for finding in self.findings if finding.severity == "error"]

    def as_dict(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "schemes": self.schemes,
            "findings": [finding.as_dict() for finding in self.findings],
            "tensor_parallel": {str(ranks): text for ranks, text in self.tensor_parallel.items()},
        }


class Findings:
    """Collects findings: gathers the places of equal ones, and joins engines with the same consequence."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Severity, str, str, str], list[str]] = {}

    def add(self, severity: Severity, engines: Iterable[str], where: str, problem: str, consequence: str) -> None:
        """Add a mistake for several engines."""
        for engine in engines:
            self._seen.setdefault((severity, engine, problem, consequence), []).append(where)

    def all(self) -> list[Finding]:
        """Each finding once, errors first and notes last."""
        joined: dict[tuple[Severity, str, str, tuple[str, ...]], list[str]] = {}
        for (severity, engine, problem, consequence), where in self._seen.items():
            joined.setdefault((severity, problem, consequence, tuple(where)), []).append(engine)
        findings = [
            Finding(severity, ", ".join(engines), problem, consequence, where)
            for (severity, problem, consequence, where), engines in joined.items()
        ]
        return sorted(findings, key=lambda finding: ORDER.index(finding.severity))


def render(consumers: Consumers) -> str:
    """Plain text: a table of schemes, the findings, and a table of tensor parallelism."""
    shown = [kind for kind in KINDS if any(kinds[kind] != NONE for kinds in consumers.schemes.values())]
    rows = [(engine, *(kinds[kind] for kind in shown)) for engine, kinds in consumers.schemes.items()]
    lines = [text_table(("", *shown), rows), ""]
    if all(finding.severity == "note" for finding in consumers.findings):
        lines.append("every engine reads it as it is stored")
    lines += [str(finding) for finding in consumers.findings]
    if consumers.tensor_parallel:
        lines += ["", text_table(("tensor parallel", "vLLM"), list(consumers.tensor_parallel.items()))]
    return "\n".join(lines)
