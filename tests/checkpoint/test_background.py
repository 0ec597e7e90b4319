"""Reading ahead and writing behind: what they promise about time, memory and errors."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from quantizers.checkpoint import background
from quantizers.checkpoint.background import BLOCK, in_background, read_ahead
from quantizers.checkpoint.safetensors_header import TensorInfo


def tensor(file: Path, start: int, size: int) -> TensorInfo:
    return TensorInfo("t", "U8", (size,), file, start, start + size)


def rchar() -> int:
    """Bytes that this process has read so far."""
    fields = Path("/proc/self/io").read_text().split()
    return int(fields[fields.index("rchar:") + 1])


def test_the_block_and_the_background_work_at_the_same_time() -> None:
    """Each waits for the other: one after the other they would wait for ever."""
    inside, behind = Event(), Event()

    def work() -> int:
        behind.set()
        assert inside.wait(60)
        return 7

    with in_background(work) as result:
        assert behind.wait(60)
        inside.set()
        assert result() == 7


def test_an_error_of_the_background_comes_back() -> None:
    def fail() -> None:
        raise OSError("no room")

    with in_background(fail) as result, pytest.raises(OSError, match="no room"):
        result()


def test_a_write_is_waited_for_when_the_block_is_left_by_an_error(tmp_path: Path) -> None:
    def slow() -> None:
        time.sleep(0.2)
        (tmp_path / "written").touch()

    with pytest.raises(KeyError), in_background(slow):
        raise KeyError
    assert (tmp_path / "written").exists()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Set when the thread that reads ahead has come to its end."""
    done, real = Event(), background._read

    def all_of_it(*arguments: Any) -> None:
        real(*arguments)
        done.set()

    monkeypatch.setattr(background, "_read", all_of_it)
    return done


def test_reading_ahead_reads_each_byte_once(tmp_path: Path, read: Event) -> None:
    file, size = tmp_path / "shard", 3 * BLOCK + 5
    file.write_bytes(b"x" * size)
    before = rchar()
    with read_ahead([tensor(file, BLOCK, 2 * BLOCK + 5), tensor(file, 0, BLOCK), tensor(file, 7, 0)]):
        assert read.wait(60)
    assert size <= rchar() - before < size + BLOCK


def test_reading_ahead_stops_with_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file of 50 MB that is read in steps of a byte, most is unread when a block without work ends."""
    monkeypatch.setattr(background, "BLOCK", 1)
    file, size = tmp_path / "shard", 50_000_000
    with file.open("wb") as stream:
        stream.truncate(size)
    before = rchar()
    with read_ahead([tensor(file, 0, size)]):
        pass
    assert rchar() - before < size / 2


def test_what_cannot_be_read_ahead_is_left_to_who_needs_it(tmp_path: Path, read: Event) -> None:
    """A file that is gone, or shorter than its header says, ends the reading and nothing else."""
    (tmp_path / "short").write_bytes(b"x")
    with read_ahead([tensor(tmp_path / "gone", 0, 9), tensor(tmp_path / "short", 0, 9)]):
        assert read.wait(60)
