"""What the check found: mistakes with their consequences, and the schemes that each engine would use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from quantizers.system.formatting import places, text_table

from .rules import KINDS

Severity = Literal["error", "warning", "note"]
NONE = "-"  # in place of a scheme, for a kind of module that the model lacks
ORDER: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One mistake, or something that nobody has tried yet.

    Attributes:
        severity: `error` if an engine stops, or computes with other weights than those stored; `note` if nothing is
            wrong as far as is known.
        engine: the engines that it concerns.
        problem: what is wrong.
        consequence: what these engines then do.
        places: tensors, modules or keys of config.json that all have this mistake.
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
        """How many places there are."""
        return len(self.places)

    def __str__(self) -> str:
        times = f" ({self.count:,} times)" if self.count > 1 else ""
        where = places(self.places)
        return f"{self.severity}: {where}{times}: {self.problem}; {self.engine}: {self.consequence}"

    def as_dict(self) -> dict[str, Any]:
        """For report.json: without the list of places, which may be as long as the model has tensors."""
        kept = {key: value for key, value in vars(self).items() if key != "places"}
        return kept | {"where": self.where, "count": self.count}


@dataclass(frozen=True)
class Consumers:
    """What `check` found.

    Attributes:
        schemes: text by engine and kind of module; the row STORED says how the tensors are stored.
        findings: mistakes and notes, errors first.
        tensor_parallel: by number of ranks, `ok` or the reason why vLLM cannot divide the model among them.
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
    """Collects mistakes: keeps the places of equal ones, and joins engines with the same consequence."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Severity, str, str, str], list[str]] = {}

    def add(self, severity: Severity, engines: Iterable[str], where: str, problem: str, consequence: str) -> None:
        """Add one mistake, for several engines."""
        for engine in engines:
            self._seen.setdefault((severity, engine, problem, consequence), []).append(where)

    def all(self) -> list[Finding]:
        """Each mistake once, errors first and notes last."""
        joined: dict[tuple[Severity, str, str, tuple[str, ...]], list[str]] = {}
        for (severity, engine, problem, consequence), where in self._seen.items():
            joined.setdefault((severity, problem, consequence, tuple(where)), []).append(engine)
        findings = [
            Finding(severity, ", ".join(engines), problem, consequence, where)
            for (severity, problem, consequence, where), engines in joined.items()
        ]
        return sorted(findings, key=lambda finding: ORDER.index(finding.severity))


def render(consumers: Consumers) -> str:
    """Plain text: a table of schemes of those kinds that the model has, the mistakes, and one of tensor parallelism."""
    shown = [kind for kind in KINDS if any(kinds[kind] != NONE for kinds in consumers.schemes.values())]
    rows = [(engine, *(kinds[kind] for kind in shown)) for engine, kinds in consumers.schemes.items()]
    lines = [text_table(("", *shown), rows), ""]
    if all(finding.severity == "note" for finding in consumers.findings):
        lines.append("every engine reads it as it is stored")
    lines += [str(finding) for finding in consumers.findings]
    if consumers.tensor_parallel:
        lines += ["", text_table(("tensor parallel", "vLLM"), list(consumers.tensor_parallel.items()))]
    return "\n".join(lines)
