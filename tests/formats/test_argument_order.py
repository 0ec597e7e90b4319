"""A source and a candidate in the wrong order: one line with the right one, and nothing is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from awq_gptq import Kind
from commands import quantize

from quantizers.checkpoint.reader import Checkpoint
from quantizers.formats.argument_order import made, refuse_swapped_arguments

INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}},
}
FP8 = tiny.config()["quantization_config"]
QUANTIZED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "4 bits": (INT4, {}, "its config.json says quantization_config.config_groups.g.weights.num_bits is 4"),
    "GPTQ in 8 bits": (Kind("gptq", bits=8).section(), {}, "its config.json says quant_method: gptq"),
    "this program's": (FP8, {"seal": "x", "settings": {}}, "its report.json says that this program made it"),
}
NOT_QUANTIZED: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "FP8": (FP8, {}),
    "BF16": (None, {}),
    "FP8 with a report of another program": (FP8, {"accuracy": 1}),
}


def written(folder: Path, section: dict[str, Any] | None, report: dict[str, Any]) -> Checkpoint:
    tiny.make(folder, quantization_config=section)
    if report:
        (folder / "report.json").write_text(json.dumps(report))
    return Checkpoint(folder, str(folder), json.loads((folder / "config.json").read_text()), {})


@pytest.mark.parametrize("name", QUANTIZED)
def test_swapped_arguments_are_refused_by_every_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section, report, sign = QUANTIZED[name]
    quantized, source = tmp_path / "quantized", tmp_path / "source"
    written(quantized, section, report)
    written(source, FP8, {})
    for words, remedy in (
        (("eval", quantized, source, "--data", "held-out"), f"give {source} first, and {quantized} after it"),
        (("verify", source, "--source", quantized), f"quantize verify {quantized} --source {source}"),
        (("stitch", "--source", quantized, "--experts", source, "--output", tmp_path / "out"),
         f"--source {source} --experts {quantized}"),
    ):  # fmt: skip
        assert quantize(monkeypatch, *words, "--device", "cpu") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{quantized}: is given as the source, but {sign}, and {source} shows no such sign; they are " in line
        assert line.endswith(f"wrong way round: {remedy}")
    assert not (tmp_path / "out").exists()


def test_only_the_clear_case_is_refused(tmp_path: Path) -> None:
    quantized = [written(tmp_path / name, *QUANTIZED[name][:2]) for name in QUANTIZED]
    plain = [written(tmp_path / name, *NOT_QUANTIZED[name]) for name in NOT_QUANTIZED]
    assert all(made(one) for one in quantized)
    assert not any(made(one) for one in plain)
    for candidate in (*quantized, *plain):
        for source in plain:
            refuse_swapped_arguments(source, candidate, "")
    for candidate in quantized:
        for source in quantized:
            refuse_swapped_arguments(source, candidate, "")
