"""Results of compared sets: their schema, their tables and their pictures."""

from __future__ import annotations

import json
from typing import Any

import pytest
from matplotlib.colors import to_hex
from pydantic import ValidationError
from set_results import compared, explained

from quantizers.eval.report.plots import png
from quantizers.sets.figures import percent
from quantizers.sets.plots import EFFECTS, UNTOLD, sets_figure, sources_figure
from quantizers.sets.schema import SetComparison, SourceEffects
from quantizers.sets.tables import ROWS, sets_table, sources_table

TOO_FEW = {"interval": None, "p": 1.0, "adjusted": 1.0, "verdict": "too few texts"}
LONG = "a calibration set whose name is as long as sixty letters are"


def test_results_have_their_schema() -> None:
    for schema, found in ((SetComparison, compared()), (SourceEffects, explained())):
        again = json.loads(json.dumps(found))
        assert schema.model_validate(again).as_dict() == found
        with pytest.raises(ValidationError):
            schema.model_validate(again | {"draws": "3"})


def test_what_would_have_been_seen_is_so_by_the_test_that_was_made() -> None:
    """Of three pairs that are tested together less than of one alone, by Holm's first step: a third of the error."""
    two, three = (compared(labels)["pairs"][0] for labels in (("old", "new"), ("old", "new", "third")))
    assert (two["change"], two["p"]) == (three["change"], three["p"])
    assert three["detectable"] > 1.2 * two["detectable"]
    assert f"; {percent(two['detectable'])} would have been seen" in two["words"]


def line_of(text: str, first: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"{first}  "))


def test_the_table_of_sets_says_what_differs() -> None:
    found = compared(("old", "new", LONG)) | {"error": 0.025}
    text = sets_table(found)
    assert text.startswith("\n".join(pair["words"] for pair in found["pairs"]))
    assert text.endswith(found["notes"][0])
    assert all(part in line_of(text, "old") for part in ("290–310", "119,800–120,000", "93.00%"))
    pair = found["pairs"][0]
    few = sum(row["verdict"] == "too few texts" for row in pair["fields"])
    more = len(pair["fields"]) - few - ROWS
    counts = f"({more} more with --json, {few} with too few texts)" if more > 0 else f"({few} with too few texts)"
    rows = text[text.index(f"new against old, by field {counts}") :].split("\n\n")[1].splitlines()
    assert "97.5 % interval (unadjusted)  p (Holm)  verdict" in rows[0]
    assert len(rows) == 3 + min(ROWS, len(pair["fields"]) - few)
    assert [row.split("  ")[0] for row in rows[2:4]] == ["all texts", "code/rust"], "first what is significant"
    assert rows[3].endswith("worse")
    routing = pair["routing"]
    assert f"newly covered by new: {len(routing['won'])}; no longer covered: {len(routing['lost'])} (of 32" in text
    top = routing["languages"][0]
    assert f"alone: {top['category']} +{top['won']} −{top['lost']}, " in text
    assert "with --json: 1\n" in text
    assert f"{LONG} against old" in text


def test_the_table_of_sources_says_which_help_and_which_hurt() -> None:
    found = explained()
    found["sources"][1] |= TOO_FEW
    text = sources_table(found)
    assert text.startswith(f"rust code {found['sources'][0]['words']}\nproofs {found['sources'][2]['words']}\n\n")
    assert "119,800–120,000" in line_of(text, "rust code")
    assert line_of(text, "german chat").count("too few texts") == 2
    found["sources"] = found["sources"][1:2]
    assert sources_table(found).startswith("The effect of no source of old can be told from chance.")


def marks(axes: Any) -> dict[float, tuple[str, bool]]:
    """Colour of each point of a forest plot by its row, and whether it is filled."""
    points = [line for line in axes.lines if line.get_marker() in ("o", "x")]
    return {
        float(line.get_ydata()[0]): (line.get_color(), to_hex(line.get_markerfacecolor()) != "#ffffff")
        for line in points
    }


@pytest.mark.slow
def test_the_picture_of_sets_fills_what_is_significant() -> None:
    found = compared()
    found["pairs"][0]["fields"][0] |= TOO_FEW
    figure = sets_figure(found)
    assert png(figure) == png(sets_figure(found)), "the same result gives the same bytes"
    _, fields, errors, heat = figure.axes[:4]
    names = [label.get_text() for label in fields.get_yticklabels()]
    told = {row["name"] for row in found["pairs"][0]["fields"] if row["verdict"] in ("better", "worse")}
    assert {names[round(y)] for y, (_, full) in marks(fields).items() if full} == told == {"code/rust"}
    assert found["pairs"][0]["fields"][0]["name"] in names, "a family is there even so"
    assert "agents/shell" not in names, "a category with too few texts is not"
    assert len(errors.lines) == 2
    assert heat.images[0].get_array().shape == (4, 8)


def test_the_picture_of_sources_has_their_verdicts() -> None:
    found = explained()
    found["sources"][1] |= TOO_FEW
    figure = sources_figure(found)
    assert png(figure) == png(sources_figure(found))
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rust code", "german chat", "proofs"]
    assert list(marks(axes).values()) == [(EFFECTS["helps"], True), (UNTOLD, False), (EFFECTS["hurts"], True)]


@pytest.mark.slow
def test_many_sets_and_sources_are_drawn() -> None:
    """Nothing fails with 40 layers, a set of one draw, names of 60 letters and 80 sources."""
    found = compared([f"{LONG} {n}" for n in range(3)], layers=40, experts=64)
    found["sets"][0]["kl"] = {"mean": 0.04, "interval": None, "per_draw": [0.04]}
    assert png(sets_figure(found)).startswith(b"\x89PNG")
    many = sources_figure(explained([f"{LONG} {n}" for n in range(60)]))
    assert png(many).startswith(b"\x89PNG")
    assert many.axes[0].get_title("left").endswith("10 with smaller changes are left out")
