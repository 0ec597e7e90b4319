"""Where a command cannot write: each file or folder that is given, both streams, and pictures, which decide nothing."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
from commands import Command, quantize
from conftest import Finished
from safetensors import SafetensorError
from set_results import compared, explained

from quantizers.commands import evaluate
from quantizers.eval.coverage.routing import Routed
from quantizers.eval.coverage.summary import report
from quantizers.eval.fidelity.figures import Fidelity
from quantizers.eval.report import pages, plots
from quantizers.pipeline.report_files import parsed, write_report
from quantizers.recipe.schema import CoverageGate
from quantizers.sets import compare, coverage
from quantizers.system import files
from quantizers.system.errors import QuantizeError

RECIPE = "tiny-minimax-m2-fp8-int4"
SETS = ("--calibration", "embedded", "--calibration", "held-out")
# Commands with an output, which `{}` is.
OUTPUTS = [
    *[(*words, option, "{}") for words in (("compare", RECIPE, *SETS), ("calibration", "why", "embedded"))
      for option in ("--picture", "--work")],
    *[("coverage", RECIPE, option, "{}") for option in ("--picture", "--work")],
    ("coverage", RECIPE, "--saliency", "--output", "{}"),
    *[("eval", "MODEL", "OUTPUT", "--data", "held-out", option, "{}") for option in ("--picture", "--work")],
    ("imatrix", RECIPE, "--output", "{}"),
    ("imatrix", RECIPE, "--output", "i.gguf", "--work", "{}"),
    ("serve-check", "OUTPUT", "--data", "held-out", "--server", "http://127.0.0.1:9", "--output", "{}"),
    ("report", "OUTPUT", "--output", "{}"),
    ("recipes", "copy", RECIPE, "{}"),
    ("new", "MODEL", "{}"),
    ("calibration", "copy", "embedded", "{}"),
    ("calibration", "new", "{}"),
    ("calibration", "freeze", "embedded", "{}"),
    ("calibration", "lock", "SET"),
    ("run", RECIPE, "--output", "{}"),
    ("stitch", "--source", "MODEL", "--experts", "OUTPUT", "--output", "{}"),
]  # fmt: skip
PLACES = {"file": "a file", "full": "No space left on device", "read-only": "Read-only file system"}
CASES = [  # a lock lies beside its set, and so below no file
    (words, place) for words in OUTPUTS for place in PLACES if (words[-1], place) != ("SET", "file")
]


@contextlib.contextmanager
def failing(number: int, folder: Path) -> Iterator[None]:
    """Every file that is opened for writing below a folder fails, as on a full or a read-only disk."""
    real, made = io.open, os.open

    def opened(file: Any, mode: str = "r", *words: Any, **named: Any) -> Any:
        if isinstance(file, str | os.PathLike) and set(mode) & set("wax+") and Path(file).is_relative_to(folder):
            raise OSError(number, os.strerror(number))
        return real(file, mode, *words, **named)

    def opened_by_number(path: Any, flags: int, *words: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and Path(os.fsdecode(path)).is_relative_to(folder):
            raise OSError(number, os.strerror(number))
        return made(path, flags, *words, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("io.open", opened)
        patched.setattr("builtins.open", opened)
        patched.setattr("os.open", opened_by_number)
        yield


@pytest.mark.parametrize(("words", "place"), CASES)
def test_an_output_that_cannot_be_written_is_one_line_before_the_work(
    words: tuple[str, ...], place: str, finished: Finished, tmp_path: Path, command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It names the file or a folder of it, and ends with a remedy. On a full disk the same command may do later."""
    monkeypatch.chdir(tmp_path)
    bad = tmp_path / "bad"
    set_file = bad / "set.yaml"
    if place == "file":
        bad.write_text("")
    else:
        bad.mkdir()
        set_file.write_text(
            "name: a\nsequence_length: 9\n"
            "sources: [{dataset: ./x.jsonl, columns: [text], shape: text, samples: all, category: a}]\n"
        )
    given = {"MODEL": finished.source, "OUTPUT": finished.folder, "SET": set_file}
    ending = ".png" if words[-2] == "--picture" else ".yaml"
    asked = [given.get(word, word.format(bad / f"out{ending}")) for word in words]
    numbers = {"full": errno.ENOSPC, "read-only": errno.EROFS}
    with failing(numbers[place], bad) if place in numbers else contextlib.nullcontext():
        code = command(*asked)
    assert code == (1 if place == "full" else 2), command.err
    *_, line = command.err.splitlines()
    assert re.fullmatch(
        rf"quantize: .*{bad}\b.*; (choose another|make room|give another|a file lies|give a new).*", line
    )
    assert PLACES[place] in line or place == "file"
    assert "streaming" not in command.err
    assert command.out == ""


@pytest.mark.parametrize("name", ["p", "p.jpg", "p.png.gz"])
def test_a_picture_that_cannot_be_drawn_is_refused(name: str, command: Command) -> None:
    assert command("coverage", "no recipe", "--picture", name) == 2
    assert command.err == (
        f"quantize: --picture {name}: is no kind of picture that is drawn; end it in .png, .pdf or .svg\n"
    )


def test_a_picture_that_is_asked_for_needs_matplotlib(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command("eval", "a", "b", "--data", "held-out", "--picture", "p.png") == 2
    assert "--picture p.png: matplotlib is not installed; `pip install" in command.err


@pytest.mark.parametrize(("ending", "head"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_a_picture_has_the_form_of_its_ending_and_the_same_bytes_again(
    ending: str, head: bytes, tmp_path: Path
) -> None:
    from matplotlib.figure import Figure

    def figure() -> Any:
        made = Figure()
        made.subplots().fill_between([0, 1], [1, 2])
        return made

    first, second = (tmp_path / f"{name}.{ending}" for name in "ab")
    assert plots.saved(figure, first) == f"picture: {first}"
    plots.saved(figure, second)
    assert first.read_bytes().startswith(head)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("words", "picture"),
    [
        (("compare", RECIPE, *SETS), "compare.png"),
        (("calibration", "why", "embedded"), "why.png"),
        (("eval", "a", "b", "--data", "held-out"), "fidelity.png"),
        (("coverage", RECIPE), "coverage.png"),
    ],
)
def test_a_picture_that_fails_after_the_work_is_a_note(
    words: tuple[str, ...], picture: str, finished: Finished, tmp_path: Path, command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The result is printed, and the exit code is its own: that of `coverage` is a gate's."""
    monkeypatch.chdir(tmp_path)
    figures = {key: finished.report[key] for key in Fidelity.model_fields if key in finished.report}
    evaluation = evaluate.Evaluation("a", (evaluate.Fidelity("b", figures),))
    monkeypatch.setattr(compare, "compare", lambda *_, **__: compare.SetComparison(compared()))
    monkeypatch.setattr(compare, "why", lambda *_, **__: compare.SetComparison(explained()))
    monkeypatch.setattr(evaluate, "evaluate", lambda *_, **__: evaluation)
    counts = np.array([[[4, 5]]])
    routed = Routed(("a",), np.array([9]), (0,), counts, 0 * counts, 0 * counts)
    counted = coverage.Coverage(report(routed, CoverageGate(min_routed_tokens=9), model="m", name="s").as_dict())
    monkeypatch.setattr(coverage, "coverage", lambda *_, **__: counted)
    Path(picture).mkdir()  # a folder has its name
    faults = {"compare.png": ("png", _zero), "why.png": ("atomic", _no_room)}
    if picture in faults:
        monkeypatch.setattr(plots, *faults[picture])
    code = command(*words)
    assert code == (3 if words[0] == "coverage" else 0), command.err
    assert len(command.out.splitlines()) > 5
    reason = {"compare.png": "division by zero", "why.png": f"{picture}: cannot be written (No space left on device)"}
    assert f"no picture: {reason.get(picture, f'{picture}: cannot be written (Is a directory)')}" in command.err


def _no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _zero(*_: object) -> None:
    raise ZeroDivisionError("division by zero")


def test_a_page_or_picture_that_fails_at_the_end_of_a_run_is_a_note(
    finished: Finished, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is written, does not list it, and the output is verified as any other."""
    folder = tmp_path / "output"
    shutil.copytree(finished.folder, folder)
    for name in ("report.html", "coverage.png"):
        (folder / name).unlink()
    (folder / "coverage.png.tmp").mkdir()  # so that it cannot be written
    monkeypatch.setattr(pages, "html_report", _zero)
    texts = {name: (folder / name).read_text() for name in ("recipe.yaml", "calibration.yaml", "held-out.yaml")}
    write_report(folder, parsed(finished.report, folder / "report.json"), texts)
    (folder / "coverage.png.tmp").rmdir()
    written = json.loads((folder / "report.json").read_text())
    picture, page = written["notes"][-2:]
    assert page == "report.html could not be made (ZeroDivisionError: division by zero)"
    assert picture.startswith("the picture of coverage is not there: coverage.png: cannot be written (Is a directory)")
    assert not {"report.html", "coverage.png"} & {*written["files"], *written["sha256"]}
    assert command("verify", folder, "--source", finished.source) == 0


# The two streams -------------------------------------------------------------------------------------------------

PRINTING = [
    (), ("--version",), ("run", "--help"), ("plan", "RECIPE"), ("plan", "RECIPE", "--json"), ("doctor", "RECIPE"),
    ("recipes",), ("recipes", "show", RECIPE), ("recipes", "schema"), ("recipes", "copy", RECIPE, "Größe.yaml"),
    ("new", "MODEL", "模型.yaml"), ("report", "OUTPUT"), ("verify", "OUTPUT"), ("calibration", "schema"),
    ("publish", "OUTPUT", "--repo", "a/b", "--dry-run"), ("calibration", "new", "é.yaml"),
]  # fmt: skip


@pytest.fixture
def opened() -> Iterator[Callable[..., TextIO]]:
    """`open`, of files that are closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *words, **named: stack.enter_context(open(*words, **named))


@pytest.fixture
def places(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Paths with letters that neither ASCII nor Latin-1 has, by the word that stands for each."""
    monkeypatch.chdir(tmp_path)
    named = {"MODEL": tmp_path / "Größe 模型", "OUTPUT": tmp_path / "Ausgabe – 模型"}
    named["MODEL"].symlink_to(finished.source)
    shutil.copytree(finished.folder, named["OUTPUT"])
    recipe = tmp_path / "Größe 模型.yaml"
    recipe.write_text(finished.recipe.read_text().replace(str(finished.source), str(named["MODEL"])))
    for file in (finished.calibration, finished.held_out):
        shutil.copy(file, tmp_path)
    return named | {"RECIPE": recipe}


@pytest.mark.parametrize(
    ("words", "encoding"), [*((words, "ascii") for words in PRINTING), (("plan", "RECIPE"), "latin-1")]
)
def test_letters_that_a_terminal_lacks_are_escaped(
    words: tuple[str, ...],
    encoding: str,
    places: dict[str, Path],
    opened: Callable[..., TextIO],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed = [Path(f"{name}.txt").absolute() for name in ("out", "err")]
    for path in printed:
        monkeypatch.setattr(f"sys.std{path.stem}", opened(path, "w", encoding=encoding))
    code = quantize(monkeypatch, *(places.get(word, word) for word in words))
    sys.stderr.flush()
    out, err = (path.read_bytes().decode("utf-8" if "--help" in words else encoding) for path in printed)
    assert code in ((0, 3) if words[:1] in (("doctor",), ("publish",)) else (0,)), (
        err
    )  # what they find is no fault here
    assert out
    if "模型.yaml" in words:
        assert "wrote \\u6a21\\u578b.yaml" in out
    assert "Error" not in err


@pytest.mark.parametrize(
    "words",
    [(), ("--version",), ("run", "--help"), ("plan", "RECIPE", "--json"), ("recipes", "schema"), ("report", "OUTPUT")],
)
def test_standard_output_on_a_full_disk_is_one_line(
    words: tuple[str, ...],
    places: dict[str, Path],
    opened: Callable[..., TextIO],
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdout", opened("/dev/full", "w"))
    assert command(*(places.get(word, word) for word in words)) == 1
    assert command.err.splitlines()[-1] == (
        "quantize: standard output (/dev/full): cannot be written (No space left on device); "
        "make room or check the disk, then give the same command again"
    )


def test_a_reader_that_has_gone_has_what_it_wanted(
    opened: Callable[..., TextIO], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`quantize plan … | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr("sys.stdout", opened(writing, "w"))
    assert command("recipes", "schema") == 0
    assert command.err == ""


def test_closed_standard_output_is_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert command("recipes") == 2
    assert command.err == (
        "quantize: standard output: is closed, so the result would be lost; send it somewhere: > result.txt\n"
    )


def test_names_that_are_no_utf_8_are_refused(command: Command) -> None:
    name = os.fsdecode(b"mod\xe9l")
    assert command("plan", name) == 2
    assert command.err == ("quantize: mod\\udce9l: has letters that are no UTF-8, which libraries refuse; rename it\n")


def test_a_current_folder_that_was_removed(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert command("recipes") == 2
    assert command.err == "quantize: the current folder: was removed; `cd` to one that is there\n"


def test_files_are_found_where_names_are_ascii(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A C locale without UTF-8 mode, in which Python would say that there is no such folder."""
    monkeypatch.chdir(tmp_path)
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    data = Path("Größe.jsonl")
    data.write_text('{"text": "a"}\n')
    asked = [sys.executable, "-m", "quantizers", "calibration", "new", "é.yaml", "--data", data]
    done = subprocess.run(asked, env=os.environ | locale, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(rb"wrote \xe9.yaml")
    assert "Größe.jsonl" in Path("é.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("stream", [None, "/dev/full"])
def test_notes_that_cannot_be_written_end_nothing(
    stream: str | None, places: dict[str, Path], opened: Callable[..., TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress and notes on a closed standard error, or in a log on a full disk."""
    monkeypatch.setattr("sys.stderr", stream and opened(stream, "w"))
    assert quantize(monkeypatch, "verify", places["OUTPUT"]) == 0


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x/y"), "x/y: cannot be read or written (No space left on "
         "device); make room or check the disk, then give the same command again"),
        (OSError(errno.EROFS, "Read-only file system", "x"), "x: cannot be read or written (Read-only file system); "
         "choose another folder, or allow it"),
        (OSError(errno.EFBIG, "File too large", "x"), "x: cannot be read or written (File too large); raise "
         "`ulimit -f`, or take a disk for larger files, then give the same command again"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "TMPDIR: No usable "
         "temporary directory found in ['/tmp']; set it to a folder with room"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "ConnectionRefusedError: [Errno 111] "
         "Connection refused (a traceback with --debug)"),
    ],
)  # fmt: skip
def test_an_error_of_a_disk_that_no_writer_named(
    failure: OSError, line: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise failure

    monkeypatch.setattr("quantizers.recipe.catalogue.rows", fail)
    assert command("recipes") == (2 if failure.errno == errno.EROFS else 1)
    assert command.err == f"quantize: {line}\n"


def test_a_library_that_hides_the_number_of_an_error() -> None:
    failure = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert str(files.disk_error(failure, "x")).startswith("x: cannot be written (No space left on device); make room")


def test_what_is_cut_off_is_removed_and_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"No space left.*{tmp_path}/a'") as failed, files.atomic(tmp_path / "a"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert failed.value.filename == str(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    files.write_text("x", Path(os.devnull))
    assert Path(os.devnull).is_char_device()
    with pytest.raises(QuantizeError, match=r"/dev/full: cannot be written \(No space"):
        files.write_text("x", Path("/dev/full"))
