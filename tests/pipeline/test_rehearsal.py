"""What would end a run after its last layer is known before its first, and names may change in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Finished
from pydantic import ValidationError
from runs import Small, assert_same, change, cut_in_layer, report_of

from quantizers.eval.coverage.figures import AllExpertPass
from quantizers.eval.report import plots
from quantizers.output.journal import work_folder
from quantizers.pipeline import pipeline, report
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare
from quantizers.serving import planned
from quantizers.system.errors import CheckpointError, InputError, OutputError

CPU = torch.device("cpu")


def test_what_servers_read_is_known_from_the_plan(finished: Finished) -> None:
    found = planned.planned_check(prepare(str(finished.recipe)))
    assert json.loads(json.dumps(found.as_dict())) == finished.report["consumers"]


def test_what_would_fail_at_the_end_is_refused_before_the_work(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that servers would misread; and a side file that cannot be copied."""
    options, real = Options(tmp_path / "output", CPU), planned.output_config

    def without_attention(*words: Any) -> dict[str, Any]:
        config = real(*words)
        del config["quantization_config"]["config_groups"]["attention_fp8_block"]
        return config

    with monkeypatch.context() as patched:
        patched.setattr(planned, "output_config", without_attention)
        with pytest.raises(
            CheckpointError, match=r"no output can be made that servers read: .*self_attn.*; give a source"
        ):
            run(small.job, options)
    with monkeypatch.context() as patched:
        patched.setattr(report, "side_files", lambda _: [tmp_path / "LICENSE"])
        with pytest.raises(InputError, match=r"LICENSE: cannot be read \(No such file .*\); it would be copied"):
            run(small.job, options)
    assert not (work_folder(options.output) / "run.json").exists(), "nothing has begun that other settings would end"


def test_a_report_that_does_not_fit_its_schema_is_not_made() -> None:
    """Where it is computed, and not when it is written: a key that lacks, one too many, and a value of another type."""
    coverage = {"min": 1, "tokens": 9}
    assert AllExpertPass.model_validate(coverage).as_dict() == coverage
    for wrong in ({"min": 1}, coverage | {"max": 2}, coverage | {"min": 1.5}):
        with pytest.raises(ValidationError):
            AllExpertPass(**wrong)


def test_what_is_gone_after_the_start_is_not_missed_at_the_end(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set, which is edited while the layers are made, and a library that draws no picture any more.

    Nor are values in a side file that no server would take.
    """
    copy, real = small.copied(tmp_path / "copy"), pipeline.quantize_layers
    sampling = {"temperature": "0.7", "top_k": None, "top_p": 0.9}
    (copy.model / "generation_config.json").write_text(json.dumps(sampling))

    def then_gone(*words: Any, **named: Any) -> Any:
        made = real(*words, **named)
        (copy.folder / "calibration.yaml").unlink()
        monkeypatch.setattr(plots, "draw", lambda _: ({}, ["the picture of coverage could not be drawn"]))
        return made

    monkeypatch.setattr(pipeline, "quantize_layers", then_gone)
    report = report_of(copy)
    assert report["serving"]["sampling"] == {"top_p": 0.9}
    assert report["calibration"] == small.report["calibration"]
    assert report["notes"] == [*small.report["notes"], "the picture of coverage could not be drawn"]
    assert not list(copy.output.glob("*.png"))
    card = (copy.output / "README.md").read_text()
    assert "- the picture of coverage could not be drawn\n" in card
    assert "![" not in card


@pytest.mark.slow
def test_categories_may_get_other_names_on_resume(small: Small, tmp_path: Path) -> None:
    """The same report as if they had always had them; but the texts stay together as they were."""
    copy = small.copied(tmp_path / "copy")

    def name(*names: str) -> None:
        for kind in ("calibration", "held-out"):
            path = copy.folder / f"{kind}.jsonl"
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            named = [row | {"kind": names[number % len(names)]} for number, row in enumerate(rows)]
            path.write_text("".join(json.dumps(row) + "\n" for row in named))

    for kind in ("calibration", "held-out"):
        change(copy.folder / f"{kind}.yaml", lambda body: body["sources"][0].update(category={"column": "kind"}))
    options = Options(copy.output, CPU)
    name("algebra", "prose")
    cut_in_layer(2, copy.job, options)
    name("one")
    with pytest.raises(OutputError, match="another calibration"):
        run(copy.job, options)
    name("sums $", "a letter")
    report = run(copy.job, options)
    assert set(report["calibration"]["categories"]) == set(report["categories"]) == {"sums $", "a letter"}
    run(copy.job, Options(tmp_path / "whole", CPU))
    assert_same(copy.output, tmp_path / "whole")
