"""What --json prints after an error: the same as the lines on standard error, taken apart."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from commands import Command, quantize
from conftest import REPOSITORY, Finished

from quantizers.cli import main as cli
from quantizers.distributed.process_group import ProcessGroup
from quantizers.system.errors import InputError, Interrupted, QuantizeError

SCHEMA = REPOSITORY / "docs" / "reference" / "schemas" / "error.schema.json"


def errors_of(printed: str) -> list[dict[str, Any]]:
    """The errors in what --json printed, which the schema allows."""
    answer = json.loads(printed)
    jsonschema.validate(answer, json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert len(answer.get("errors", [0, 0])) > 1  # a single one is under "error"
    return list(answer.get("errors") or [answer["error"]])


def lines_of(errors: list[dict[str, Any]]) -> str:
    """What stands on standard error for the same."""
    lines = [f"{error['place']}: {error['problem']}" if error["place"] else error["problem"] for error in errors]
    lines = [
        f"{line}; {error['remedy']}" if error["remedy"] else line for line, error in zip(lines, errors, strict=True)
    ]
    return "".join(f"quantize: {line}\n" for line in lines)


def test_every_mistake_of_a_recipe(finished: Finished, tmp_path: Path, command: Command) -> None:
    recipe = yaml.safe_load(finished.recipe.read_text()) | {
        "calibration": "embeded",
        "experts": {"bits": 7},
        "extra": 1,
    }
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    assert command("plan", path, "--json") == 2
    errors = errors_of(command.out)
    assert command.err == lines_of(errors)
    bits, extra = errors
    lines = path.read_text().splitlines()
    assert bits["place"] == f"{path}:{lines.index('  bits: 7') + 1}: experts.bits"
    assert extra == {
        "code": 2,
        "place": f"{path}:{lines.index('extra: 1') + 1}: extra",
        "problem": "unknown key",
        "remedy": "remove it",
    }


def test_a_file_that_is_not_there(tmp_path: Path, command: Command) -> None:
    name = f"{tmp_path}/nothing.yaml"
    assert command("plan", name, "--json") == 2
    (error,) = errors_of(command.out)
    assert (error["place"], error["problem"], error["code"]) == (name, "no such recipe", 2)
    assert command.err == lines_of([error])


def test_a_disk_that_fails(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("quantizers.stitch.write.shard.save_file", full)
    assert command("run", finished.recipe, "--output", tmp_path / "output", "--device", "cpu", "--json") == 1
    (error,) = errors_of(command.out)
    assert error["code"] == 1
    assert error["place"].startswith(str(tmp_path / "output"))
    assert error["problem"] == "cannot be written (No space left on device)"
    assert error["remedy"] == "make room or check the disk, then give the same command again"
    assert command.err.endswith(lines_of([error]))


@pytest.mark.parametrize("words", [("plan", "--nonsense", "--json"), ("plan", "--json"), ("nonsense", "--json")])
def test_an_option_or_a_command_that_does_not_exist(words: tuple[str, ...], command: Command) -> None:
    assert command(*words) == 2
    (error,) = errors_of(command.out)
    assert error["code"] == 2
    assert command.err == lines_of([error])


@pytest.mark.parametrize("debug", [False, True])
def test_a_mistake_of_the_program(debug: bool, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("quantizers.recipe.catalogue.rows", fail)
    assert command("recipes", "list", "--json", *["--debug"] * debug) == 1
    (error,) = errors_of(command.out)
    problem = f"RuntimeError: first line{'' if debug else ' (a traceback with --debug)'}"
    assert error == {"code": 1, "place": "", "problem": problem, "remedy": ""}
    if debug:
        assert command.err.startswith("Traceback")
        assert "quantize: " not in command.err
    else:
        assert command.err == lines_of([error])


def test_without_json_nothing_is_on_standard_output(command: Command) -> None:
    assert command("plan", "nothing.yaml") == 2
    assert command.out == ""


def test_on_a_full_disk_the_exit_code_stays(tmp_path: Path) -> None:
    """Standard output lies on it, too."""
    with open("/dev/full", "w") as disk:
        asked = [sys.executable, "-m", "quantizers", "plan", "nothing.yaml", "--json"]
        ended = subprocess.run(asked, stdout=disk, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("quantize: nothing.yaml: no such recipe; ")


class Several(ProcessGroup):
    """One of two processes, of which the other failed first, here or on another machine."""

    world_size = 2

    def __init__(self, rank: int, *, prints: bool) -> None:
        self.rank, self._prints = rank, prints

    def first_failure(self, error: QuantizeError) -> tuple[QuantizeError, bool]:
        return InputError("--option 1", "is wrong", "correct it"), self._prints


@pytest.mark.parametrize("prints", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_prints_the_first_failure(
    rank: int, prints: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("sys.argv", ["quantize", "run", "recipe.yaml", "--json"])
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit) as ended:
        cli._end(Several(rank, prints=prints), Interrupted("", "stopped", "again", 15))
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    expected = {"code": 2, "place": "--option 1", "problem": "is wrong", "remedy": "correct it"}
    assert err == (lines_of([expected]) if prints else "")
    assert (errors_of(out) if out else None) == ([expected] if rank == 0 else None)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_command_for_one_process(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before the processes know each other."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank)):
        monkeypatch.setenv(name, str(value))
    assert quantize(monkeypatch, "doctor", "--json") == 2
    out, err = capsys.readouterr()
    if rank:
        assert (out, err) == ("", "")
    else:
        (error,) = errors_of(out)
        assert error["remedy"] == "start this by itself"
        assert err == lines_of([error])
