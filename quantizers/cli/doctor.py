"""`quantize doctor`: parse, call, print, exit code."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from quantizers.system.formatting import text_table

from . import common
from .adapter import Call, command

if TYPE_CHECKING:
    from quantizers.commands.doctor import Diagnosis

FOUND = 56  # columns of a cell: with the other two it fits into 80


@command("quantizers.commands.doctor:doctor")
def doctor(call: Call) -> None:
    """Say what this machine can do, and what would stop a recipe here.

    Exit 3 if something would. Looks at versions, devices, the kernels compared with torch's operations, memory, disk,
    the Hub and its token (never printed), and servers; of a recipe, with the options that `run` would be given, at
    everything that would end it early. Takes seconds, with or without a network: nothing is downloaded, and nothing
    stays on the disk.

    Example: quantize doctor minimax-m2.1-fp8-int4
    """
    diagnosis: Diagnosis = call()
    common.emit(diagnosis.as_dict(), call.as_json, doctor_table(diagnosis), passed=diagnosis.passed)


def doctor_table(diagnosis: Diagnosis) -> str:
    """A row for each check, the remedies, and the verdict."""
    rows = list[tuple[str, str, str]]()
    for check in diagnosis.checks:
        first, *others = textwrap.wrap(check.found, FOUND, break_on_hyphens=False) or [""]
        rows += [(check.what, first, check.state), *(("", line, "") for line in others)]
    lines = [text_table(("what", "found", "state"), rows)]
    for state, title in (("stops", "what stops, and what to do:"), ("note", "notes:")):
        remedies = {f"  {check.what}: {check.remedy}": None for check in diagnosis.checks if check.state == state}
        lines += ["", title, *remedies] if remedies else []
    stops = sum(check.state == "stops" for check in diagnosis.checks)
    it = "this recipe" if diagnosis.recipe else "the program"
    verdict = f"{stops} thing{'s'[: stops != 1]} would stop {it} here" if stops else f"nothing would stop {it} here"
    return "\n".join([*lines, "", verdict + ("" if diagnosis.recipe else "; with a recipe, more is looked at")])
