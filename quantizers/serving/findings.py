"""Findings of the serving check, and its result as table, text and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quantizers.system.formatting import places, text_table

from .engines import KINDS
from .kernels import UNQUANTIZED

Severity = Literal["error", "warning"]
Remark = tuple[Severity, Sequence[str], str, str, str]  # with engines, place, problem and consequence
NONE = "-"  # for a kind of module that the model lacks


@dataclass(frozen=True)
class Finding:
    """Problem that an engine has with the output as it is stored.

    It is an `error` if an engine would compute with other weights than those stored, if one refuses what could be
    written so that it takes it, or if no server has a kernel for it. It is a `warning` if other servers have one: then
    this is what was asked for. `engine` names all affected engines, and `places` the tensors, modules or keys of
    config.json that have it.
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
    def sentence(self) -> str:
        """Places, problem, engine and consequence."""
        times = f" ({len(self.places):,} times)" if len(self.places) > 1 else ""
        return f"{places(self.places)}{times}: {self.problem}; {self.engine}: {self.consequence}"

    def __str__(self) -> str:
        return f"{self.severity}: {self.sentence}"

    def as_dict(self) -> dict[str, Any]:
        """For report.json: without the places, which may be as many as the model's tensors."""
        values = {key: value for key, value in vars(self).items() if key != "places"}
        return values | {"where": self.where, "count": len(self.places)}


def findings_of(remarks: Iterable[Remark]) -> list[Finding]:
    """Errors first; the places of equal remarks are together, and the engines with the same consequence."""
    seen: dict[tuple[Severity, str, str, str], list[str]] = {}
    for severity, names, where, problem, consequence in remarks:
        for engine in names:
            seen.setdefault((severity, engine, problem, consequence), []).append(where)
    joined: dict[tuple[Severity, str, str, tuple[str, ...]], list[str]] = {}
    for (severity, engine, problem, consequence), affected in seen.items():
        joined.setdefault((severity, problem, consequence, tuple(affected)), []).append(engine)
    findings = [Finding(key[0], ", ".join(names), *key[1:]) for key, names in joined.items()]
    return sorted(findings, key=lambda finding: finding.severity != "error")


@dataclass(frozen=True)
class ServingCheck:
    """The result of `check`; `consumers` in report.json.

    Attributes:
        schemes: text by engine and kind of module; the row STORED is how the tensors are stored.
        findings: errors first.
        tensor_parallel: by number of ranks, `ok` or the reason why vLLM cannot split the model among them.
        ktransformers: of `for_ktransformers`; None if SGLang, inside which it runs, does not know the family.
        kernels: by server on a kind of card, and kind of module, the kernel that it chooses, or why it refuses it.
    """

    schemes: dict[str, dict[str, str]]
    findings: list[Finding]
    tensor_parallel: dict[int, str] = field(default_factory=dict)
    ktransformers: str | None = None
    kernels: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def counted(self) -> str:
        """Meaning of the number of errors, for the gate `consumers`."""
        return "ways in which vLLM, SGLang or transformers would misread it"

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
            "kernels": self.kernels,
        } | ({"ktransformers": self.ktransformers} if self.ktransformers else {})

    def as_text(self) -> str:
        """For people, see `render`."""
        return render(self)


def render(result: ServingCheck) -> str:
    """Plain text: a table of schemes, the findings, and a table of tensor parallelism."""
    shown = [kind for kind in KINDS if any(kinds[kind] != NONE for kinds in result.schemes.values())]
    rows = [(engine, *(kinds[kind] for kind in shown)) for engine, kinds in result.schemes.items()]
    lines = [text_table(("", *shown), rows), ""]
    lines += [str(finding) for finding in result.findings] or ["every engine reads it as it is stored"]
    if result.kernels:
        quantized = [kind for kind in shown if any(kinds[kind] != UNQUANTIZED for kinds in result.kernels.values())]
        rows = [(on, *(kinds[kind].partition(":")[0] for kind in quantized)) for on, kinds in result.kernels.items()]
        lines += ["", text_table(("kernels", *quantized), rows)]
        refused = {(kind, why): on for on, kinds in result.kernels.items() for kind, why in kinds.items() if ":" in why}
        lines += [f"{on}, {kind}: {why}" for (kind, why), on in refused.items()]
    if result.ktransformers:
        lines += ["", f"KTransformers with experts in RAM, by its source: {result.ktransformers}"]
    if result.tensor_parallel:
        lines += ["", text_table(("tensor parallel", "vLLM"), list(result.tensor_parallel.items()))]
    return "\n".join(lines)
