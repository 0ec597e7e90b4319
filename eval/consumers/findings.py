"""What the check found: mistakes with their consequences, and the schemes that each engine would use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from quantizers.system.text_table import plain

from .rules import KINDS

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One mistake.

    Attributes:
        severity: `error` if an engine stops, or computes with other weights than those stored.
        engine: the engines that it concerns.
        where: a tensor, a module or a key of config.json; the first of `count`.
        problem: what is wrong.
        consequence: what these engines then do.
        count: places with the same mistake.
    """

    severity: Severity
    engine: str
    where: str
    problem: str
    consequence: str
    count: int = 1

    def __str__(self) -> str:
        more = f" (and {self.count - 1:,} more)" if self.count > 1 else ""
        return f"{self.severity}: {self.where}{more}: {self.problem}; {self.engine}: {self.consequence}"


@dataclass(frozen=True)
class Consumers:
    """What `check` found.

    Attributes:
        schemes: text by engine and kind of module; the row STORED says how the tensors are stored.
        findings: mistakes, errors first.
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
            "findings": [dict(vars(finding)) for finding in self.findings],
            "tensor_parallel": {str(ranks): text for ranks, text in self.tensor_parallel.items()},
        }


class Findings:
    """Collects mistakes: counts equal ones, and joins engines with the same consequence."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Severity, str, str, str], tuple[str, int]] = {}

    def add(self, severity: Severity, engines: Iterable[str], where: str, problem: str, consequence: str) -> None:
        """Add one mistake, for several engines."""
        for engine in engines:
            first, count = self._seen.get((severity, engine, problem, consequence), (where, 0))
            self._seen[severity, engine, problem, consequence] = first, count + 1

    def all(self) -> list[Finding]:
        """Each mistake once, errors first."""
        joined: dict[tuple[Severity, str, str, str, int], list[str]] = {}
        for (severity, engine, problem, consequence), (where, count) in self._seen.items():
            joined.setdefault((severity, where, problem, consequence, count), []).append(engine)
        findings = [
            Finding(severity, ", ".join(engines), where, problem, consequence, count)
            for (severity, where, problem, consequence, count), engines in joined.items()
        ]
        return sorted(findings, key=lambda finding: finding.severity != "error")


def render(consumers: Consumers) -> str:
    """Plain text: a table of schemes, the mistakes, and a table of tensor parallelism."""
    rows = [(engine, *(kinds[kind] for kind in KINDS)) for engine, kinds in consumers.schemes.items()]
    lines = [plain(("", *KINDS), rows), ""]
    lines += [str(finding) for finding in consumers.findings] or ["every engine reads it as it is stored"]
    if consumers.tensor_parallel:
        lines += ["", plain(("tensor parallel", "vLLM"), list(consumers.tensor_parallel.items()))]
    return "\n".join(lines)
