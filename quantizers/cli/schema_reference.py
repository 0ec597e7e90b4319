"""What is made from the schemas: tables of keys in docs/calibration.md, recipe.md and report.md, and JSON schemas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter

from eval.report.command_schema import JSON_REPORTS
from eval.report.schema import RunReport, StitchReport
from quantizers.calibration.set import CalibrationSet
from quantizers.recipe.schema import Recipe
from quantizers.system.schema_docs import json_schema, key_table, part_tables

BEGIN, END = "<!-- {}: made by python -m quantizers.cli.reference -->\n", "<!-- end of {} -->\n"


def recipe_schema() -> str:
    """The JSON schema of recipes."""
    return json_schema(Recipe, "Recipe of quantize")


def set_schema() -> str:
    """The JSON schema of calibration sets."""
    return json_schema(CalibrationSet, "Calibration set of quantize")


def report_schema() -> str:
    """The JSON schema of report.json, of a run or a stitch."""
    return json_schema(TypeAdapter(RunReport | StitchReport), "report.json of quantize")


# For each page, the generated text between the markers of a section.
SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "calibration.md": {"keys": lambda: key_table(CalibrationSet)},
    "recipe.md": {"keys": lambda: key_table(Recipe)},
    "report.md": {"keys": lambda: part_tables(JSON_REPORTS)},
}
SCHEMAS: dict[str, Callable[[], str]] = {
    "recipe.schema.json": recipe_schema,
    "calibration-set.schema.json": set_schema,
    "report.schema.json": report_schema,
}


def pages(docs: Path) -> dict[Path, str]:
    """The text that each page with made sections, and each JSON schema, should have.

    Raises:
        ValueError: a page lacks the markers of a section.
    """
    made = {docs / "schemas" / name: text() for name, text in SCHEMAS.items()}
    for name, sections in SECTIONS.items():
        text = (docs / name).read_text(encoding="utf-8")
        for section, write in sections.items():
            begin, end = BEGIN.format(section), END.format(section)
            before, found, rest = text.partition(begin)
            _, closed, after = rest.partition(end)
            if not found or not closed:
                raise ValueError(f"{docs / name}: has no section {section}; write its two markers")
            text = f"{before}{begin}\n{write()}\n{end}{after}"
        made[docs / name] = text
    return made
