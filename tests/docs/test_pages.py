"""Every command of every page is run, or says why it is not; and a page that does not keep to this is noticed."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_once import made_once
from page_session import Sessions
from pages import REPOSITORY, Page, pages, read_page

import quantizers

PAGES = {str(path.relative_to(REPOSITORY)): read_page(path) for path in pages()}


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sessions]:
    with Sessions(tmp_path_factory.mktemp("sessions")) as started:
        yield started


@pytest.fixture(scope="module")
def with_tiny(sessions: Sessions, tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    """Where a page finds a finished out/tiny, too."""
    sessions.finished = made_once(tmp_path_factory, "out-tiny", sessions.make_finished)
    return sessions


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if page.run])
def test_the_commands_of_a_page_do_what_it_says(name: str, with_tiny: Sessions, tmp_path: Path) -> None:
    if failed := with_tiny.run(PAGES[name], tmp_path):
        pytest.fail(failed, pytrace=False)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_written_so_that_it_can_be_run(name: str) -> None:
    if PAGES[name].faults:
        pytest.fail("\n".join(PAGES[name].faults), pytrace=False)


def test_one_page_alone_has_commands_that_are_only_parsed() -> None:
    assert [name for name, page in PAGES.items() if page.parsed_only] == ["docs/reference/commands.md"]


def test_files_of_a_clone_that_a_command_names_are_there() -> None:
    path = re.compile(r"(?<![\w./-])(?:benchmarks|calibration|examples|models|recipes|scripts|tests|\.ci)/[\w./-]+")
    named = [
        (name, command.line, file)
        for name, page in PAGES.items()
        for command in page.commands
        if "a clone" in command.needs
        for file in path.findall(command.text)
    ]
    assert len(named) > 10
    assert [found for found in named if not (REPOSITORY / found[2]).exists()] == []


def python_blocks() -> list[tuple[str, str]]:
    blocks = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [(name, text) for name, page in PAGES.items() for text in blocks.findall(page.path.read_text("utf-8"))]


@pytest.mark.parametrize(("name", "text"), python_blocks())
def test_python_on_a_page_calls_functions_with_arguments_that_they_take(name: str, text: str) -> None:
    for call in ast.walk(ast.parse(text)):
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("quantizers."):
            function = getattr(quantizers, ast.unparse(call.func).removeprefix("quantizers."))
            named = {keyword.arg: None for keyword in call.keywords if keyword.arg}
            inspect.signature(function).bind(*call.args, **named)


def page_of(folder: Path, text: str) -> Page:
    path = folder / "page.md"
    path.write_text(text)
    return read_page(path, folder)


SESSION = """# Title
<!-- before: printf 'one\\n' > texts -->
```sh
count=$(ls -A | wc -l)   # a comment
cd .
cat > made <<'END'
it's two
END
```
* In a list:

  ```sh
  test "$count$(cat texts made)" = "1one
  it's two"
  [ -z "$(ls -A ~)" ] && cd /no/such/folder    # says so; exit code 1
  for one in 1 2; do
      quantize recipes show none # exit code 2
  done # exit code 2
  quantize calibration list |
      grep -c embedded > counted
  python -c 'import quantizers; quantizers.plan' && quantize recipes show tiny-minimax-m2-fp8-int4 > shown
  ```

```sh
# needs a GPU
exit 7
```

```sh
exit 7 # an hour; needs several machines and Docker
```
"""


@pytest.mark.slow
def test_blocks_are_one_session_in_an_empty_folder(sessions: Sessions, tmp_path: Path) -> None:
    page = page_of(tmp_path, SESSION)
    assert not page.faults
    assert [command.line for command in page.commands] == [2, 4, 5, 6, 13, 15, 16, 19, 21, 26, 30]
    assert [words for command in page.commands for words in command.calls()] == [
        ["recipes", "show", "none"],
        ["calibration", "list"],
        ["recipes", "show", "tiny-minimax-m2-fp8-int4"],
    ]
    (folder := tmp_path / "session").mkdir()
    assert sessions.run(page, folder) is None
    assert (folder / "shown").read_text().startswith("#")
    assert int((folder / "counted").read_text())


@pytest.mark.slow
def test_a_command_that_fails_is_named_with_what_it_said(sessions: Sessions, tmp_path: Path) -> None:
    page = page_of(tmp_path, "```sh\necho before\nquantize recipes show \\\n    none\necho after\n```\n")
    (folder := tmp_path / "session").mkdir()
    failed = sessions.run(page, folder)
    assert failed
    assert failed.startswith(f"{page.path}:3: exit code 2, not 0\n    quantize recipes show \\\n        none\nsaid:\n")
    assert "none: no such recipe" in failed
    assert "before" not in failed
    assert "after" not in failed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "ended"),
    [
        ("quantize recipes list # exit code 3", "exit code 0, not 3"),
        ("quantize recipes show none | cat", "exit code 2, not 0"),
        ("cat nothing", "exit code 1, not 0"),
        ("read", "exit code 1, not 0"),  # there is nobody to answer
        ("exit 0", "ended the session"),
    ],
)
def test_an_exit_code_that_differs_is_noticed(sessions: Sessions, tmp_path: Path, command: str, ended: str) -> None:
    (folder := tmp_path / "session").mkdir()
    failed = sessions.run(page_of(tmp_path, f"```sh\n{command}\n```\n"), folder)
    assert failed
    assert f"page.md:2: {ended}" in failed


@pytest.mark.slow
def test_a_command_that_hangs_is_ended(sessions: Sessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("page_session.LIMIT", 0.2)
    (folder := tmp_path / "session").mkdir()
    failed = sessions.run(page_of(tmp_path, "```sh\nsleep 1000\n```\n"), folder)
    assert failed
    assert "page.md:2: had not ended when the page had taken 0.2 seconds" in failed


@pytest.mark.slow
def test_a_command_with_an_environment_of_its_own_has_it(sessions: Sessions, tmp_path: Path) -> None:
    (folder := tmp_path / "session").mkdir()
    text = "```sh\nHF_HUB_OFFLINE=0 quantize --version > said\n```\n"
    assert sessions.run(page_of(tmp_path, text), folder) is None
    assert (folder / "said").read_text().startswith("quantize ")
