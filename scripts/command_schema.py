"""The schema of what commands print with --json, with parts of that of report.json."""

from __future__ import annotations

from typing import Any, Literal

from quantizers.eval.coverage.figures import CoverageReport, Drawn
from quantizers.eval.fidelity.figures import EvalReport
from quantizers.eval.report.schema import (
    AuditFigures,
    ConversionReport,
    Engines,
    MeasuredRunReport,
    RunReport,
    StitchReport,
)
from quantizers.serving.schema import ServeCheckReport
from quantizers.sets.schema import SetComparison, SourceEffects
from quantizers.system.keys import Part, key, maybe


class VerifyReport(AuditFigures):
    """What `quantize verify --json` prints."""

    notes: list[str] = key("What is not a fault but worth knowing")
    consumers: Engines | None = maybe("Serving engines; absent if the folder could not be opened")
    vllm: dict[str, Any] | None = maybe("vLLM's own answers; with --with-vllm only")


class ImatrixReport(Part):
    """What `quantize imatrix --json` prints."""

    output: str = key("The file")
    model: str = key("As it was given")
    set: str = key("Name of the set")
    tokens: int = key("Tokens of the set", "tokens")
    of: Literal["both", "routed", "all"] = key("Which of them go into the sums of an expert's matrices")
    architecture: str = key("llama.cpp's name of the model's architecture")
    matrices: int = key("Matrices in the file", "matrices")
    without_tokens: dict[str, list[int]] = key("By matrix: experts without a token")
    left_out: dict[str, int] = key("By matrix: rows that are not finite and left out", "rows")
    unnamed: list[str] = key("Published names of matrices that are left out: without a name in llama.cpp, or unused")
    not_computed: list[int] = key("Layers that predict further tokens, which have no data")
    drawn: Drawn | None = maybe("What was drawn; absent where the whole set is used")


class DoctorCheck(Part):
    """One thing that `quantize doctor` looked at."""

    what: str = key("Its name")
    found: str = key("What was found")
    state: Literal["ok", "note", "stops"] = key("Whether it would end a run (`stops`), or is worth knowing (`note`)")
    remedy: str | None = maybe("What to do; absent if the state is ok")


class DoctorReport(Part):
    """What `quantize doctor --json` prints."""

    recipe: str | None = key("The recipe as it was given; None without one")
    output: str = key("The folder that a run would write")
    passed: bool = key("Whether nothing would stop the recipe, or without one the program")
    checks: list[DoctorCheck] = key("All checks: of the machine, the Hub, servers, and the recipe")


class ErrorParts(Part):
    """An error; its texts may be empty, but for the problem."""

    code: int = key("The command's exit code")
    place: str = key("File and line, key, option or tensor")
    problem: str = key("What is wrong there")
    remedy: str = key("What to do about it")


class OneError(Part):
    """What a command prints with --json after an error."""

    error: ErrorParts = key("What is wrong")


class SeveralErrors(Part):
    """The same after several mistakes that were found together."""

    errors: list[ErrorParts] = key("What is wrong, in the order of the lines on standard error")


PRINTED: dict[str, type[Part]] = {  # by the command that prints it; run and stitch print report.json
    "eval": EvalReport,
    "verify": VerifyReport,
    "doctor": DoctorReport,
    "coverage": CoverageReport,
    "imatrix": ImatrixReport,
    "serve-check": ServeCheckReport,
    "compare": SetComparison,
    "calibration why": SourceEffects,
}
JSON_REPORTS: tuple[type[Part], ...] = (RunReport, MeasuredRunReport, ConversionReport, StitchReport, *PRINTED.values())
