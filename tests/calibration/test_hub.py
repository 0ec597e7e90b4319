"""Datasets of the Hub, read from a stand-in on the loopback interface through the real client library."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from errno import ENOSPC
from functools import partialmethod
from math import inf
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from calibration_tokenizer import write_tokenizer
from hub_stand_in import HubStandIn

from quantizers.calibration import load_set, lock
from quantizers.calibration.hub import Hub
from quantizers.calibration.render import quiet
from quantizers.calibration.samples import CalibrationData, language_counts
from quantizers.calibration.set import CalibrationSet, DataSource, read_set
from quantizers.system.errors import CalibrationError
from quantizers.system.shipped import shipped

SOFTWARE = shipped("calibration") / "software-engineer.yaml"
LARGE = "HuggingFaceH4/ultrachat_200k"
Load = Callable[..., CalibrationData]


@pytest.fixture
def load(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> Load:
    """`load(path, …)`: a set, with the rows that are kept in a folder of the test, or in `kept`."""

    def call(path: Path, model: str = tokenizer, kept: Path | None = None, **options: Any) -> CalibrationData:
        with monkeypatch.context() as patched:
            if kept:
                patched.setenv("XDG_CACHE_HOME", str(kept))
            return load_set.load_set(path, model, **options)

    return call


def refusal(load: Load, path: Path, **options: Any) -> list[str]:
    """The lines with which a set is refused."""
    with pytest.raises(CalibrationError) as failure:
        load(path, **options)
    return str(failure.value).splitlines()


def json_lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def rows(name: str, count: int = 12) -> bytes:
    return json_lines([{"text": f"{name}, row {number}"} for number in range(count)])


SMALL = """\
name: small
sequence_length: 64
sources:
  - {dataset: org/plain, columns: [text], shape: text, samples: 8, category: x}
  - {dataset: org/streamed, streaming: true, columns: [text], shape: text, samples: 8, category: x}
"""


@pytest.fixture
def small(tmp_path: Path, hub: HubStandIn) -> Path:
    """A set of two datasets in four files each, which the stand-in serves."""
    files = {f"train-{number}.jsonl": rows(f"file {number}") for number in range(4)}
    hub.datasets = {"org/plain": files, "org/streamed": dict(files)}
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.mark.slow
def test_the_whole_software_engineer_set_is_read_once_and_with_few_requests(
    hub: HubStandIn, load: Load, tmp_path: Path
) -> None:
    calibration = read_set(SOFTWARE)
    on_hub = [source for source in calibration.sources if not source.is_local]
    hub.datasets = hub_datasets(calibration, LARGE)
    loaded = load(SOFTWARE)
    assert len(loaded.samples) == 590
    counts = language_counts(calibration, loaded.samples)
    assert (min(counts["programming"].values()), min(counts["spoken"].values())) == (3, 4)
    large = {path: raw for path, raw in hub.datasets[LARGE].items() if path.endswith(".jsonl")}
    assert 0 < sum(hub.sent.get(f"{LARGE}/{path}", 0) for path in large) < sum(map(len, large.values())) / 4
    api = [asked for asked in hub.asked if "/api/datasets" in asked]
    assert len(api) == len(on_hub)
    assert len(hub.asked) < 6 * len(on_hub)
    hub.asked.clear()
    other = str(write_tokenizer(tmp_path / "other", "{% for m in messages %}{{ m.content }}|{% endfor %}"))
    assert load(SOFTWARE).digest == loaded.digest != load(SOFTWARE, other).digest
    assert len([asked for asked in hub.asked if "/api/datasets" in asked]) == 2 * len(on_hub)  # the commit of each, now
    hub.dead = set(hub.datasets)
    again = load(SOFTWARE)
    assert again.digest == loaded.digest
    assert again.notes[0] == f"from rows that were kept; {len(on_hub)} sources could not be reached"
    (refused,) = refusal(load, SOFTWARE, kept=tmp_path / "none")
    assert refused.startswith(f"{SOFTWARE}:")
    assert f" and {len(on_hub) - 5} more: cannot be reached (RemoteProtocolError: " in refused


def test_order_of_files_workers_and_kept_rows_make_no_difference(small: Path, hub: HubStandIn, load: Load) -> None:
    one = load(small, workers=1)
    hub.backwards = True
    other = load(small, workers=4, kept=small.parent / "other")
    assert one.digest == load(small).digest == other.digest
    assert one.rows == other.rows
    streamed = {sample.place.rpartition(":")[0] for sample in one.samples if "streamed" in sample.place}
    assert len(streamed) > 1  # four blocks of rows that lie in several files


def test_a_moved_revision_is_loaded_anew_unless_a_lock_holds_it(small: Path, hub: HubStandIn, load: Load) -> None:
    before = load(small)
    hub.datasets["org/plain"] = {"train.jsonl": rows("changed")}
    after = load(small)
    written, _ = lock.lock_set(small)
    locked = load(small)
    assert (after.notes, locked.notes) == ((), ("versions are those of the set's lock",))
    assert before.digest != after.digest == locked.digest
    assert locked.versions == (hub.commit("org/plain"), before.versions[1])
    pins = json.loads(written.read_text())["sources"]
    assert [pin["commit"] for pin in pins] == list(locked.versions)
    assert [len(pin["rows"]) for pin in pins] == [8, 8]
    hub.asked.clear()
    assert load(small).digest == locked.digest
    assert not hub.asked
    hub.datasets["org/streamed"] = {"train.jsonl": rows("changed")}
    (line,) = refusal(load, small, kept=small.parent / "other")
    assert f"org/streamed: no revision {before.versions[1]}; correct the source's revision, or lock" in line


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.slow
def test_another_draw_takes_other_rows_of_the_same_version(
    locked: bool, small: Path, hub: HubStandIn, load: Load
) -> None:
    """Those of the set with another seed, also where a lock names the rows of the first draw."""
    if locked:
        lock.lock_set(small)
    first, other = load(small), load(small, draw=3)
    assert first.versions == other.versions
    assert first.digest != other.digest == load(small, draw=3, kept=small.parent / "none").digest
    assert {sample.place for sample in first.samples} != {sample.place for sample in other.samples}
    small.write_text(small.read_text() + f"seed: {read_set(small).seed + 3}\n")
    lock.lock_path(small).unlink(missing_ok=True)
    assert load(small).digest == other.digest
    assert load(small, draw=3, tokens=40).digest != load(small, tokens=40).digest


def test_another_row_than_the_locks_is_refused_by_name(
    small: Path, hub: HubStandIn, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock.lock_set(small)
    place = next(iter(json.loads(lock.lock_path(small).read_text())["sources"][0]["rows"]))
    file, _, number = place.removeprefix("org/plain/").rpartition(":")
    lines = hub.datasets["org/plain"][file].splitlines(keepends=True)
    lines[int(number) - 1] = b'{"text": "another row"}\n'
    monkeypatch.setattr(hub, "commit", lambda *_: load_commit)
    load_commit = json.loads(lock.lock_path(small).read_text())["sources"][0]["commit"]
    hub.datasets["org/plain"][file] = b"".join(lines)
    (line,) = refusal(load, small, kept=small.parent / "other")
    assert line.startswith(f"{small}:4: {place}: this row of the lock has changed; restore the data, or lock")
    lock.lock_path(small).write_text(lock.lock_path(small).read_text().replace(place, f"{place}0"))
    assert "was changed by hand" in refusal(load, small)[0]


@pytest.mark.parametrize("stage", ["changed", "deleted", "gated", "failing", "limited"])
@pytest.mark.slow
def test_a_run_goes_on_from_the_sets_that_it_has_loaded(stage: str, small: Path, hub: HubStandIn, load: Load) -> None:
    run = small.parent / "run"
    before = load(small, run=run)
    hub.asked.clear()
    if stage == "changed":
        hub.datasets["org/plain"] = {"train.jsonl": rows("changed")}
    elif stage == "deleted":
        hub.datasets.clear()
    elif stage == "limited":
        hub.limited["/"] = inf
    else:
        getattr(hub, stage).update(hub.datasets)
    assert load(small, run=run, kept=small.parent / "none").digest == before.digest
    assert not hub.asked
    (file,) = run.iterdir()
    file.write_bytes(file.read_bytes()[:-9])  # a damaged one is not trusted
    if stage == "changed":
        assert load(small, run=run).digest != before.digest
        assert json.loads(file.read_bytes())["name"] == "small"


def test_what_was_read_of_other_sources_is_kept_when_one_fails(small: Path, hub: HubStandIn, load: Load) -> None:
    streamed = hub.datasets["org/streamed"].pop("train-0.jsonl")
    hub.datasets["org/streamed"]["train-0.jsonl"] = streamed.replace(b"}", b"", 1)
    small.write_text(SMALL.replace("samples: 8, category: x}\n", "samples: 30, category: x}\n"))
    (line,) = refusal(load, small, workers=1)
    assert ":5: org/streamed/train-0.jsonl:2: not valid JSON" in line
    assert line.endswith("; tell its maker, or leave it out: --without ID, or remove it from the set")
    hub.datasets["org/streamed"]["train-0.jsonl"] = streamed
    hub.asked.clear()
    assert len(load(small).samples) == 60
    assert not [asked for asked in hub.asked if "org/plain/resolve" in asked]


SOURCE = "columns: [text], shape: text, samples: 1, category: x}\n"
NO_SUCH = (
    "no such dataset on the Hub; correct the id, or `hf auth login` if it is private; "
    "or leave it out: --without ID, or remove it from the set"
)


@pytest.mark.parametrize(
    ("how", "reason"), [("dead", "cannot be reached ("), ("failing", "the Hub has an error of its own (503)")]
)
def test_unreachable_sources_are_one_line_that_hides_no_other_fault(
    how: str, reason: str, small: Path, hub: HubStandIn, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Hub does not answer about some sources, or with a server's error."""
    starts = ("dataset: org/none", "dataset: missing.jsonl", "dataset: org/third, revision: v9")
    small.write_text(SMALL + "".join(f"  - {{{start}, {SOURCE}" for start in starts))
    hub.datasets["org/third"] = {}
    getattr(hub, how).update(("org/plain", "org/streamed"))
    unreachable, *others = refusal(load, small)
    assert unreachable.startswith(f"{small}:4: org/plain, org/streamed (line 5): {reason}")
    assert "org/plain: the Hub " in capsys.readouterr().err
    assert others == [
        f"{small}:6: org/none: {NO_SUCH}",
        f"{small}:7: {small.parent}/missing.jsonl: cannot be read (No such file or directory); give an existing file",
        f"{small}:8: org/third: no revision v9; correct the source's revision, or lock the set again",
    ]


def test_faults_of_all_sources_are_reported_together(small: Path, hub: HubStandIn, load: Load) -> None:
    extra = (f"  - {{dataset: org/plain, {key}, {SOURCE}" for key in ("revision: main", "split: test", "subset: other"))
    small.write_text(SMALL.replace("[text]", "[txt]") + "".join(extra) + f"  - {{dataset: org/closed, {SOURCE}")
    hub.datasets["org/closed"] = {"train.jsonl": rows("closed")}
    hub.gated.add("org/closed")
    hub.asked.clear()
    assert refusal(load, small) == [
        f"{small}:4: org/plain, org/streamed (line 5): no column 'txt' (it has text); "
        "correct the source's columns or category",
        f"{small}:7: org/plain: no split 'test'; it has train; correct the source's subset, split or revision",
        f"{small}:8: org/plain: no configuration 'other'; it has default; "
        "correct the source's subset, split or revision",
        f"{small}:9: org/closed: gated; accept its terms on the Hub, then `hf auth login`; "
        "or leave it out: --without ID, or remove it from the set",
    ]
    assert sum(hub.sent.values()) <= 5 * len(
        hub.datasets["org/plain"]["train-0.jsonl"]
    )  # one file each time, not all of four


@pytest.mark.slow
def test_a_rate_limit_is_said_waited_for_and_given_up_by_name(
    small: Path, hub: HubStandIn, load: Load, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.limited["/datasets/org/plain/resolve"] = 1
    loaded = load(small)
    assert "org/plain: the Hub answers 429; asking again in 2 s, given up after 10 min" in capsys.readouterr().err
    hub.limited["/api/datasets/org/streamed"] = inf
    monkeypatch.setattr(load_set, "Hub", lambda: Hub(give_up=3.0))
    again = load(small)  # its rows were kept
    assert again.digest == loaded.digest
    assert again.notes == ("from rows that were kept; 1 sources could not be reached",)
    (line,) = refusal(load, small, kept=small.parent / "other")
    assert line.startswith(f"{small}:5: org/streamed: the Hub asks to wait too often (429); give the command again")


def test_renamed_and_cut_off_datasets_are_read(small: Path, hub: HubStandIn, load: Load) -> None:
    before = load(small)
    hub.datasets["org/moved"] = hub.datasets.pop("org/plain")
    hub.renamed["org/plain"] = "org/moved"
    hub.cut["org/moved/train-0.jsonl"] = [40]
    assert load(small, kept=small.parent / "other").digest == before.digest


GONE = SMALL.replace("samples: 8, category: x}\n", "samples: 8, required: false, category: x}\n", 1)


def test_a_source_that_is_not_required_is_replaced_and_named(small: Path, hub: HubStandIn, load: Load) -> None:
    whole = load(small)
    del hub.datasets["org/plain"]
    small.write_text(GONE)
    left = load(small)
    chosen = load(small, without=["org/plain"])
    reason = "without org/plain ({}): 8 samples are replaced by 8 of the same category"
    assert left.notes == (reason.format("no such dataset on the Hub"),)
    assert chosen.notes == (reason.format("--without"),)
    assert left.digest == chosen.digest
    assert {sample.source for sample in left.samples} == {"org/streamed"}
    assert [s.place for s in left.samples[:8]] == [s.place for s in whole.samples[8:]]
    assert len({sample.place for sample in left.samples}) == 16
    assert left.versions[0] == ""
    assert list(left.rows[1]) == [sample.place for sample in left.samples]
    small.write_text(GONE.replace("category: x", "category: y", 1))
    other = load(small)
    assert other.notes == ("without org/plain (no such dataset on the Hub): 8 samples are replaced by 8 of embedded",)
    assert [sample.source for sample in other.samples[8:11]] == [
        f"./embedded/{n}.jsonl" for n in ("code", "spoken", "chat")
    ]
    (line,) = refusal(load, small, without=["org/plian"])
    assert line == f"{small}: has no source org/plian (did you mean org/plain?); correct --without"


def test_fewer_rows_than_asked_for_are_taken_and_said(small: Path, hub: HubStandIn, load: Load) -> None:
    hub.datasets["org/plain"] = {"train.jsonl": rows("few", 5)}
    data = load(small)
    assert len(data.samples) == 13
    assert data.notes == ("org/plain: 5 of the 8 samples; it has only 5 rows",)


def test_what_is_not_read_and_not_kept_is_said(
    small: Path, hub: HubStandIn, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.datasets["org/plain"] |= {"train-9.csv": b"text\nno\n", "train-8.csv": b"text\nno\n"}
    (small.parent / "file").touch()
    unread = "org/plain: not read are 2 files in another format, such as train-8.csv"
    unkept = (
        "rows of the Hub cannot be kept, and will be asked for again; set XDG_CACHE_HOME to a writable folder with room"
    )
    assert load(small, kept=small.parent / "file" / "rows").notes == (unread, unkept)
    with monkeypatch.context() as filled:
        filled.setattr(Path, "open", partialmethod(_full, Path.open))
        full = load(small, kept=small.parent / "full")
    assert full.notes == (unread, unkept)
    assert not list((small.parent / "full").rglob("*.jsonl"))
    assert load(small, kept=small.parent / "full").digest == full.digest


def _full(path: Path, real: Callable[..., Any], mode: str = "r", **options: Any) -> Any:
    """`Path.open` where the disk is full: a file to append to takes half of a line."""
    stream = real(path, mode, **options)
    if mode == "a":
        with stream:
            stream.write('{"block": 0, "ro')
        raise OSError(ENOSPC, "No space left on device", str(path))
    return stream


ROWS = [{"text": f"text {number}", "other": None if number < 3 else {"a": [number]}} for number in range(9)]
MIXED = [{"text": "one", "x": []}, {"text": "two", "x": "s"}, {"text": "three", "y": {"z": None}, "x": 4}]


def test_a_column_that_is_empty_in_the_first_rows_is_no_missing_one(small: Path, hub: HubStandIn, load: Load) -> None:
    talk = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This."}]
    sparse = [{"messages": talk} | ({"tools": "[]"} if number > 6 else {}) for number in range(9)]
    null = [row | {"tools": row.get("tools")} for row in sparse]
    small.write_text(SMALL.replace("columns: [text], shape: text", "columns: [messages, tools], shape: chat"))
    hub.datasets = {"org/plain": {"a.jsonl": json_lines(sparse)}, "org/streamed": {"a.parquet": _parquet(null)}}
    assert len(load(small).samples) == 16
    small.write_text(small.read_text().replace("tools", "tolls"))
    (line,) = refusal(load, small)
    assert "org/plain, org/streamed (line 5): no column 'tolls' (it has messages, tools)" in line


def test_rows_of_another_revision_do_not_stand_in(small: Path, hub: HubStandIn, load: Load) -> None:
    load(small)
    hub.dead = {"org/plain", "org/streamed"}
    assert load(small).notes[0].startswith("from rows that were kept")
    small.write_text(SMALL.replace("org/plain,", "org/plain, revision: v1,"))
    (line,) = refusal(load, small)
    assert line.startswith(f"{small}:4: org/plain: cannot be reached")


def test_a_lock_is_kept_by_sources_that_are_not_required_too(small: Path, hub: HubStandIn, load: Load) -> None:
    small.write_text(GONE)
    before = load(small, run=small.parent / "run")
    lock.lock_set(small)
    assert load(small, run=small.parent / "run").lock
    del hub.datasets["org/plain"]
    assert load(small).digest == before.digest
    (line,) = refusal(load, small, kept=small.parent / "other")
    assert line.startswith(f"{small}:4: org/plain: no such dataset on the Hub")


def test_a_lock_without_a_source_gives_what_a_run_without_it_reads(small: Path, hub: HubStandIn, load: Load) -> None:
    """Whether it was left out by name, or is not required and could not be read."""
    small.write_text(GONE)
    before = load(small, without=["org/plain"])
    with pytest.raises(CalibrationError, match=r"has no source org/plian \(did you mean org/plain\?\)"):
        lock.lock_set(small, without=["org/plian"])
    assert lock.lock_set(small, without=["org/plain"])[1] == {"org/plain": "--without"}
    held = load(small)
    del hub.datasets["org/plain"]
    assert lock.lock_set(small)[1] == {"org/plain": "no such dataset on the Hub"}
    assert before.digest == held.digest == load(small).digest
    hub.dead = {"org/plain"}
    with pytest.raises(CalibrationError, match="org/plain: cannot be reached"):
        lock.lock_set(small)
    hub.dead = set()
    small.write_text(SMALL)
    with pytest.raises(CalibrationError, match="org/plain: no such dataset on the Hub"):
        lock.lock_set(small)
    lock.lock_set(small, without=["org/plain"])
    (line,) = refusal(load, small)
    assert line.endswith(
        "org/plain: left out when the set was locked; lock it again, or leave it out with --without org/plain"
    )
    assert load(small, without=["org/plain"]).digest == before.digest


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", b"no gzip at all"),
        ("a.jsonl.gz", gzip.compress(rows("cut", 9_999))[:-2_000]),
        ("a.jsonl.zst", b"no zstd at all"),
        ("a.csv", b'text\n"a quote that does not end\nmore\nlines\n'),
    ],
)
def test_a_damaged_file_is_named(name: str, content: bytes, small: Path, hub: HubStandIn, load: Load) -> None:
    hub.datasets["org/plain"] = {name: content}
    small.write_text(SMALL.replace("samples: 8", "samples: all", 1))
    (line,) = refusal(load, small)
    assert line.startswith(f"{small}:4: org/plain/{name}: cannot be read")
    hub.datasets["org/plain"] = {"a.jsonl": json.dumps({"text": "some text"}).encode("utf-16")}
    (line,) = refusal(load, small)
    assert line.startswith(f"{small}:4: org/plain/a.jsonl:1: not UTF-8; tell its maker, or leave it out: --without ID")


def test_a_source_that_cannot_give_more_is_no_substitute(small: Path, hub: HubStandIn, load: Load) -> None:
    hub.datasets["org/streamed"] = {"train.jsonl": rows("enough", 32) + b"{\n" * 40}
    (note,) = load(small, without=["org/plain"]).notes
    assert note == "without org/plain (--without): 8 samples are replaced by 8 of the same category"
    small.write_text(SMALL.replace("samples: 8", "samples: 80", 1))
    (note,) = load(small, without=["org/plain"]).notes
    assert note == "without org/plain (--without): 80 samples are replaced by 80 of embedded"


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "count"),
    [
        ("mixed.jsonl", json_lines(MIXED), 3),
        ("late.jsonl", json_lines(ROWS), 9),
        ("lines.jsonl.gz", gzip.compress(json_lines(ROWS)), 9),
        ("lines.jsonl.zst", pyarrow.compress(json_lines(ROWS), codec="zstd", asbytes=True), 9),
        ("list.json", json.dumps(MIXED, indent=1).encode(), 3),
        ("table.parquet", _parquet([{"text": row["text"]} for row in ROWS]), 9),
        ("long.json", json.dumps([{"text": "x" * 9_000}] * 30, indent=1).encode(), 30),
        ("bytes.parquet", _parquet([{"text": row["text"].encode()} for row in ROWS]), 9),
        ("table.csv", b'text,other\n"line\nand ""line""",1\nx y,' + b"x" * 200_000 + b"\n", 2),
    ],
)
def test_types_of_columns_that_nobody_reads_do_not_matter_and_requests_are_few(
    name: str, content: bytes, count: int, small: Path, hub: HubStandIn, load: Load
) -> None:
    hub.datasets["org/plain"] = {name: content}
    small.write_text(SMALL.replace("samples: 8", "samples: all", 1).rpartition("  - ")[0])
    assert len(load(small).samples) == count
    assert len([asked for asked in hub.asked if name in asked]) <= 6


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.slow
def test_a_first_look_at_a_list_does_not_read_it_all(
    indent: int | None, small: Path, hub: HubStandIn, load: Load
) -> None:
    long = [{"text": f"{number} " + "ä" * 100_000} for number in range(32)]
    content = json.dumps(long, indent=indent, ensure_ascii=False).encode()
    hub.datasets["org/plain"] = {"a.json": content}
    data = load(small)
    assert {int(sample.text.split()[0]) for sample in data.samples[:8]} < set(range(32))
    assert hub.sent["org/plain/a.json"] < 1.4 * len(content)


@pytest.mark.slow
def test_of_parquet_only_the_columns_that_are_read_come_over_the_network(
    small: Path, hub: HubStandIn, load: Load
) -> None:
    noise = [{"text": f"row {n}"} | {f"column {c}": f"{n * c}" * 5_000 for c in range(9)} for n in range(400)]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(noise), buffer, compression=None, use_dictionary=False)
    hub.datasets["org/plain"] = {"train.parquet": buffer.getvalue()}
    load(small)
    assert hub.sent["org/plain/train.parquet"] < len(buffer.getvalue()) / 20


def test_quiet_restores_what_was_shown() -> None:
    from huggingface_hub import utils

    bars = utils.are_progress_bars_disabled()
    with quiet():
        assert utils.are_progress_bars_disabled()
    assert utils.are_progress_bars_disabled() == bars


SPARE = 14  # rows more than a set asks for
PADDING = 100_000  # characters in each row of the one dataset that is too large to be read whole

Row = dict[str, Any]


def hub_datasets(calibration: CalibrationSet, large: str) -> dict[str, dict[str, bytes]]:
    """Repositories for every Hub source of a set: files by path, by id.

    Streamed datasets lie in two JSON lines files, others in one Parquet file; a README names subsets
    and splits, as it does on the Hub.

    Args:
        large: a streamed dataset that gets files of many megabytes, so that reading it whole shows.
    """
    repositories: dict[str, dict[str, bytes]] = {}
    configurations: dict[str, dict[str, dict[str, str]]] = {}
    for source in calibration.sources:
        if source.is_local:
            continue
        assert isinstance(source.samples, int)
        files = repositories.setdefault(source.dataset, {})
        subset = source.subset or "default"
        folder = f"{subset}/{source.split}"
        rows = list(_rows(source, source.samples + SPARE, PADDING if source.dataset == large else 0))
        if source.streaming:
            splits = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
            if source.dataset == large:
                splits = [splits[0] * 16, splits[1] * 16]
            for number, part in enumerate(splits):
                files[f"{folder}/part-{number}.jsonl"] = "".join(json.dumps(row) + "\n" for row in part).encode()
        else:
            buffer = io.BytesIO()
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
            files[f"{folder}/part-0.parquet"] = buffer.getvalue()
        pattern = f"{folder}/*.{'jsonl' if source.streaming else 'parquet'}"
        configurations.setdefault(source.dataset, {}).setdefault(subset, {})[source.split] = pattern
    for repository, subsets in configurations.items():
        repositories[repository]["README.md"] = _readme(subsets).encode()
    return repositories


def _readme(subsets: dict[str, dict[str, str]]) -> str:
    lines = ["---", "configs:"]
    for subset, splits in subsets.items():
        lines += [f"- config_name: {subset}", "  data_files:"]
        for split, pattern in splits.items():
            lines += [f"  - split: {split}", f'    path: "{pattern}"']
    return "\n".join([*lines, "---", ""])


def _rows(source: DataSource, count: int, padding: int) -> Iterator[Row]:
    for number in range(count):
        text = f"{source.dataset} {source.split}, number {number}. " + f"word{number} " * 20 + "x" * padding
        yield _row(source, text, number) | {"unused": number, "language": ("Hindi", "Turkish")[number % 2]}


def _row(source: DataSource, text: str, number: int) -> Row:
    first = source.columns[0]
    if source.shape == "text":
        return {first: text}
    if source.shape == "prompt-answer":
        asked = [{"role": "user", "content": text}] if "Llama-Nemotron" in source.dataset else text
        return {first: asked, source.columns[1]: f"<think>\nEasy.\n</think>\nThe answer to {text}"}
    if source.shape == "code-contests":
        solutions = {"language": [2, 3], "solution": ["int main() {}", f"print({number})"]}
        return {first: f"{number}_A. Task", "description": text, "solutions": solutions}
    roles, texts = ("user", "assistant"), (text, f"Answer {number}.")
    if source.shape == "chat":
        return {first: [{"role": role, "content": said} for role, said in zip(roles, texts, strict=True)]}
    if source.category == "tool-use" or len(source.columns) == 2:
        return {first: _tool_dialogue(text, number)} | dict.fromkeys(source.columns[1:], "[]")
    names = ("human", "gpt") if number % 2 else roles
    return {first: [{"from": name, "value": said} for name, said in zip(names, texts, strict=True)]}


def _tool_dialogue(text: str, number: int) -> list[dict[str, str]]:
    """As Hermes writes them; every tenth has a tool turn without a call, which templates refuse."""
    call = json.dumps({"name": "look_up", "arguments": {"number": number}})
    asked = "" if number % 10 == 9 else f"<tool_call>\n{call}\n</tool_call>"
    return [
        {"from": "system", "value": "You may call <tools>[...]</tools>."},
        {"from": "human", "value": text},
        {"from": "gpt", "value": f"<think>\nI look it up.\n</think>\nA moment.{asked}"},
        {"from": "tool", "value": f"<tool_response>\n{number}\n</tool_response>"},
        {"from": "gpt", "value": f"It is {number}."},
    ]
