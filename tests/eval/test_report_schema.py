"""report.json has a schema: what a run writes validates.

The reports that other tests make are checked by a fixture in conftest.py; what `eval`, `coverage` and `verify` print,
in test_paired.py, test_coverage.py and test_damage.py.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema
import pytest
from command_schema import JSON_REPORTS
from conftest import REPOSITORY, Finished
from make_reference import part_tables
from pydantic import ValidationError

from quantizers.eval.report.schema import checked


def validate(report: dict[str, Any]) -> None:
    """By the JSON schema in docs/, as somebody without this program would."""
    text = (REPOSITORY / "docs/reference/schemas/report.schema.json").read_text(encoding="utf-8")
    jsonschema.Draft202012Validator(json.loads(text)).validate(report)


def test_a_finished_report_validates_and_comes_back_as_it_was(finished: Finished) -> None:
    report = json.loads((finished.folder / "report.json").read_text(encoding="utf-8"))
    validate(report)
    again = checked(report).as_dict()
    assert json.dumps(again, sort_keys=True) == json.dumps(report, sort_keys=True), "to the last digit and type"
    assert checked(report).seal == report["seal"]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("kl", "mean"), "0.1"),
        (("kl", "mode"), 0.1),
        (("layers", 0, "layer"), None),
        (("gates", 0, "passed"), 1),
        (("coverage", "per_layer", 0, "routed_tokens"), [1.5]),
        (("audit",), None),
    ],
)
def test_what_does_not_belong_is_refused_by_both(place: tuple[Any, ...], value: Any, finished: Finished) -> None:
    report = copy.deepcopy(finished.report)
    *parents, last = place
    inner: Any = report
    for step in parents:
        inner = inner[step]
    inner[last] = value
    with pytest.raises(ValidationError):
        checked(report)
    with pytest.raises(jsonschema.ValidationError):
        validate(report)


def test_every_key_has_a_description() -> None:
    rows = [line for line in part_tables(JSON_REPORTS).splitlines() if line.startswith("| `")]
    assert len(rows) > 200
    assert not [row for row in rows if row.endswith("|  |")]
