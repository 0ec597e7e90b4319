"""Results of compared sets: their schema, their tables and their pictures."""

from __future__ import annotations

import json
from typing import Any

import pytest
from matplotlib.colors import to_hex
from pydantic import ValidationError
from set_results import set_comparison, source_effects

from eval.report.plots import SERIES, png
from eval.report.set_comparison import SetComparison, SourceEffects
from eval.report.set_figures import EFFECTS, FIELDS, sets_figure, sources_figure
from eval.report.set_tables import ROWS, sets_table, sources_table

LONG = "a calibration set whose name is as long as sixty letters are"


def test_results_have_their_schema() -> None:
    for schema, found in ((SetComparison, set_comparison()), (SourceEffects, source_effects())):
        again = json.loads(json.dumps(found))
        assert schema.model_validate(again).as_dict() == found
        with pytest.raises(ValidationError):
            schema.model_validate(again | {"draws": "3"})


def line_of(text: str, first: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"{first} "))


def test_the_table_of_sets_says_what_differs() -> None:
    found = set_comparison(("old", "new", LONG))
    text = sets_table(found)
    assert text.startswith("\n".join(pair["words"] for pair in found["pairs"]))
    assert text.endswith(found["notes"][0])
    assert all(part in line_of(text, "old") for part in ("290–310", "119,800–120,000", "[92.07%, 93.93%]"))
    pair = found["pairs"][0]
    start = text.index("new against old, by field (1 more with --json, 1 with too few texts)")
    rows = text[start:].split("\n\n")[1].splitlines()[2:]
    assert len(rows) == 1 + ROWS
    assert [row.split("  ")[0] for row in rows[:2]] == ["all texts", "code/rust"], "first what is significant"
    assert "worse" in rows[1]
    routing = pair["routing"]
    assert f"newly covered by new: {len(routing['won'])}; no longer covered: {len(routing['lost'])} (of 32" in text
    top = routing["languages"][0]
    assert f"alone: {top['category']} +{top['won']} −{top['lost']}, " in text
    assert "with --json: 1\n" in text
    assert f"{LONG} against old" in text


def test_the_table_of_sources_says_which_help_and_which_hurt() -> None:
    found = source_effects()
    text = sources_table(found)
    assert text.startswith("rust code: helps\nproofs: hurts\n\n")
    assert "3,900–4,100" in line_of(text, "rust code")
    assert "too few texts" in line_of(text, "poems")
    found["sources"] = found["sources"][1:2]
    assert sources_table(found).startswith("The effect of no source of old can be told from chance.")


def marks(axes: Any) -> dict[float, list[tuple[str, bool]]]:
    """Colour of each point of a forest plot by its row, and whether it is filled."""
    points = [line for line in axes.lines if line.get_marker() in ("o", "x")]
    return {
        round(float(line.get_ydata()[0]), 2): [(line.get_color(), to_hex(line.get_markerfacecolor()) != "#ffffff")]
        for line in points
    }


def test_the_picture_of_sets_fills_what_is_significant() -> None:
    found = set_comparison()
    row = found["pairs"][0]["fields"][0]
    row |= {"interval": None, "p": None, "adjusted": None, "verdict": "too few texts"}
    figure = sets_figure(found)
    assert png(figure) == png(sets_figure(found)), "the same result gives the same bytes"
    _, fields, errors, heat = figure.axes[:4]
    names = [label.get_text() for label in fields.get_yticklabels()]
    assert len(names) == 1 + min(FIELDS, sum(row["interval"] is not None for row in found["pairs"][0]["fields"]) + 1)
    filled = [names[round(y)] for y, [(_, full)] in marks(fields).items() if full]
    assert filled == ["all texts", "code/rust"]
    assert fields.lines[-1].get_xdata() == [0, 0]
    assert len(errors.lines) == 2
    assert heat.images[0].get_array().shape == (4, 8)


def test_the_picture_of_sources_has_their_verdicts() -> None:
    found = source_effects()
    figure = sources_figure(found)
    assert png(figure) == png(sources_figure(found))
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rust code", "german chat", "proofs", "poems"]
    colours = [EFFECTS[row["verdict"]] for row in found["sources"]]
    filled = [row["verdict"] in ("helps", "hurts") for row in found["sources"]]
    assert [mark for (mark,) in marks(axes).values()] == list(zip(colours, filled, strict=True))
    assert {EFFECTS["helps"], EFFECTS["hurts"]} <= set(SERIES)


def test_many_sets_and_sources_are_drawn() -> None:
    """Nothing fails with 40 layers, a set of one draw, four names of 60 letters and 80 sources."""
    found = set_comparison([f"{LONG} {n}" for n in range(4)], layers=40, experts=64)
    found["sets"][0]["kl"] = {"mean": 0.04, "interval": None, "per_draw": [0.04]}
    assert png(sets_figure(found)).startswith(b"\x89PNG")
    many = sources_figure(source_effects([f"{LONG} {n}" for n in range(80)]))
    assert png(many).startswith(b"\x89PNG")
    assert many.axes[0].get_title("left").endswith("30 with smaller changes are left out")
