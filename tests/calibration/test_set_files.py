"""The shipped sets as a list and as copies, and new sets for files of texts."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from commands import Command

from quantizers.calibration.load_set import load_set
from quantizers.calibration.lock import lock_path, lock_set
from quantizers.calibration.samples import CalibrationData
from quantizers.calibration.set_files import copy_set, new_set, rows
from quantizers.sets.check import check_set
from quantizers.system.errors import CalibrationError, InputError, OutputError
from quantizers.system.files import write_new
from quantizers.system.shipped import shipped

SETS = shipped("calibration")


@pytest.fixture(scope="module")
def embedded(tokenizer: str) -> CalibrationData:
    return load_set(SETS / "embedded.yaml", tokenizer)


def test_the_list_says_what_the_sets_hold(embedded: CalibrationData, command: Command) -> None:
    assert command("calibration", "list", "--json") == 0
    listed = {row["name"]: row for row in json.loads(command.out)["sets"]}
    assert set(listed) == {path.stem for path in SETS.glob("*.yaml")}
    engineer = listed["software-engineer"]
    assert (engineer["samples"], engineer["sources"]) == ("590", "2 local, 53 on the Hub")
    assert (listed["embedded"]["samples"], listed["embedded"]["sources"]) == (str(len(embedded.samples)), "3 local")
    assert all(row["about"] for row in rows())
    for words in ((), ("list",)):
        assert command("calibration", *words) == 0
        assert listed["embedded"]["about"] in command.out


@pytest.mark.slow
def test_a_copy_gives_the_same_samples_and_knows_its_held_out_set(
    tmp_path: Path, embedded: CalibrationData, command: Command, tokenizer: str
) -> None:
    folder = tmp_path / "deep" / "down"
    assert command("calibration", "copy", "embedded", folder) == 0
    assert command.out.splitlines() == [
        f"wrote {folder}/embedded.yaml, and 8 files that go with it",
        f"next: quantize calibration {folder}/embedded.yaml",
    ]
    report = check_set(folder / "embedded.yaml", tokenizer)
    assert report["summary"]["digest"] == embedded.digest
    assert report["held_out"] == str(folder / "held-out.yaml")
    assert not report["findings"]


def test_a_number_of_samples_gives_the_same_ones_in_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    """The order of a local file's rows depends on its name in the set; a lock travels too."""
    home = tmp_path / "calibration"
    (home / "data").mkdir(parents=True)
    (home / "data" / "a.jsonl").write_text("\n".join(json.dumps({"text": f"text {n}"}) for n in range(50)))
    source = {"dataset": "./data/a.jsonl", "columns": ["text"], "shape": "text", "samples": 9, "category": "x"}
    (home / "own.yaml").write_text(json.dumps({"name": "own", "sequence_length": 64, "sources": [source]}))
    lock_set(home / "own.yaml")
    monkeypatch.setattr("quantizers.calibration.set_files.shipped", lambda _: home)
    copies = copy_set("own", tmp_path / "copy")
    assert copies == [tmp_path / "copy" / name for name in ("own.yaml", "own.lock.json", "data/a.jsonl")]
    copied, original = (load_set(path, tokenizer) for path in (copies[0], home / "own.yaml"))
    assert copied.digest == original.digest
    assert copied.lock
    assert lock_path(copies[0]).read_bytes() == lock_path(home / "own.yaml").read_bytes()


def test_a_copy_overwrites_nothing(tmp_path: Path) -> None:
    copies = copy_set("embedded", tmp_path)
    assert copy_set("embedded", tmp_path) == copies, "the same files may be there already"
    assert tmp_path / "held-out.yaml" in copy_set("software-engineer", tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "held-out.yaml").write_text("mine")
    with pytest.raises(OutputError, match=r"held-out\.yaml: exists; give another name or folder"):
        copy_set("embedded", other)
    assert [path.name for path in other.iterdir()] == ["held-out.yaml"]
    assert (other / "held-out.yaml").read_text() == "mine"


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot be written \(.*\); a file lies in a folder's place: give another"):
        write_new({tmp_path / "a": b"1", tmp_path / "file" / "b": b"2"})
    assert not (tmp_path / "a").exists()


def test_a_new_set_passes_as_it_is_written(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "mine.yaml"
    assert command("calibration", "new", path) == 0
    said = command.out.splitlines()
    assert said == [
        f"wrote {path} and {tmp_path}/mine.jsonl",
        f"replace the rows of {tmp_path}/mine.jsonl with your own",
        f"next: quantize calibration {path}",
    ]
    assert command("calibration", path, "--json") == 0
    report = json.loads(command.out)
    assert report["verdict"] == "fine: nothing contradicts the set"
    assert report["summary"]["categories"] == {"code/python": 1, "math": 1, "advice": 1}
    (tmp_path / "mine.jsonl").write_text("my own")
    assert command("calibration", "new", path) == OutputError.exit_code
    assert "mine.jsonl: exists; give another name" in command.err
    assert (tmp_path / "mine.jsonl").read_text() == "my own"


@pytest.mark.parametrize("name", ["code", "spoken", "chat"])
def test_a_new_set_for_the_shipped_data_reads_it_as_the_shipped_set_does(
    name: str, tmp_path: Path, tokenizer: str, embedded: CalibrationData
) -> None:
    data = tmp_path / f"{name}.jsonl"
    data.write_bytes((SETS / "embedded" / f"{name}.jsonl").read_bytes())
    path = tmp_path / "sets" / "new.yaml"
    contents, notes = new_set(path, data)
    write_new(contents)
    assert notes == []
    ours = load_set(path, tokenizer)
    theirs = [s for s in embedded.samples if s.source.endswith(f"/{name}.jsonl")]
    assert [(s.text, s.category) for s in ours.samples] == [(s.text, s.category) for s in theirs]


def test_rows_that_cannot_be_used_are_said_and_the_set_loads_without_them(tmp_path: Path, tokenizer: str) -> None:
    data, after_9999 = tmp_path / "a.parquet", pyarrow.array([10**15] * 9, pyarrow.timestamp("ms"))
    prose = [f"text {n}" if n % 3 else "" for n in range(9)]
    pyarrow.parquet.write_table(pyarrow.table({"prose": prose, "id": range(9), "when": after_9999}), data)
    path = tmp_path / "new.yaml"
    contents, notes = new_set(path, data)
    assert notes == [f"3 of 9 rows cannot be used as text; the first: {data} row 1: an empty text in prose"]
    write_new(contents)
    assert len(load_set(path, tokenizer).samples) == 6


@pytest.mark.parametrize(
    ("file", "data", "content", "message"),
    [
        ("a.jsonl", None, "", "is the name of a data file; name the set such as mine.yaml"),
        ("a.yaml", "b.csv", "x", "not a file in .jsonl, .json, .parquet; convert it to one"),
        ("a.yaml", "b.jsonl", None, "cannot be read (No such file or directory); give an existing file"),
        ("a.yaml", "b.jsonl", "", "no rows; add some"),
        ("a.yaml", "b.jsonl", '{"id": 1, "n": 2}', "no shape fits its columns (id, n); name them as in docs/"),
    ],
)
def test_what_no_set_can_be_made_for(
    file: str, data: str | None, content: str | None, message: str, tmp_path: Path
) -> None:
    if data and content is not None:
        (tmp_path / data).write_text(content)
    with pytest.raises((InputError, CalibrationError)) as refused:
        new_set(tmp_path / file, tmp_path / data if data else None)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
