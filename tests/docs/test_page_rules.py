"""A page that does not keep to the rules for its commands is told what to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import NEEDS, REPOSITORY, Command, Page, read_page


def page_of(folder: Path, text: str) -> Page:
    path = folder / "page.md"
    path.write_text(text)
    return read_page(path, folder)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```bash\nls\n```", "page.md:1: a block of bash; commands that can be run are in ```sh"),
        ("```console\n$ ls\n```", "page.md:1: a block of console;"),
        ("```\nquantize run x\n```", "page.md:2: a command in a block of no language; write ```sh"),
        ("```\ntorchrun --nnodes 2 -m quantizers run x\n```", "page.md:2: a command in a block of no language;"),
        ("```text\nmade it\n$ quantize run x\n```", "page.md:3: a command in a block of text; write ```sh"),
        ("```sh\n$ ls\n```", "page.md:2: begins with a prompt; leave it out"),
        ("```sh\nls # needs luck\n```", "page.md:2: `# needs luck` is no known mark; write one of a GPU, two GPUs"),
        ("```sh\n# needs luck\nls\n```", "page.md:2: `# needs luck` is no known mark"),
        ("```sh\nls\n# needs a GPU\nls\n```", "page.md:3: a mark on a line of its own; write it at the end"),
        ("```sh\nls\nfor x in 1; do\n  ls\n```", "page.md:3: bash does not understand this: for x in 1; do"),
        ("```sh\ncat <<END\ntext\n```", "page.md:2: bash does not understand this: cat <<END"),
        ("```sh\nls", "page.md:1: a block that does not end; write its closing fence"),
        ("<!-- before:\nls -->", "page.md:1: is not <!-- before: COMMAND --> in one line; write it so"),
    ],
)
def test_a_page_that_is_written_otherwise_is_told_what_to_write(tmp_path: Path, text: str, fault: str) -> None:
    faults = page_of(tmp_path, text).faults
    assert len(faults) == 1
    assert faults[0].startswith(fault)


def test_what_the_program_prints_may_be_shown(tmp_path: Path) -> None:
    text = "```text\nnext: quantize verify out/tiny\n      quantize eval a b\nquantize 0.1.0\npython 3.11\n"
    text += "quantize: is wrong\n```\n"
    page = page_of(tmp_path, text + "````text\n```bash\nls\n```\n````\n```yaml\nrun: quantize run x\n```\n")
    assert not page.faults
    assert page.shown == [Command(2, "quantize verify out/tiny")]


def test_calls_are_found_wherever_a_shell_has_them(tmp_path: Path) -> None:
    text = """```sh
A=1 .venv/bin/quantize plan x --set 'a={b: 1}' 2>/dev/null > here # not: quantize run
echo "quantize none"; for x in 1; do quantize verify "$x"; done && torchrun --nnodes 2 -m quantizers run y | cat
cat <<'END'
quantize none
END
if ! quantize report z; then echo $(time quantize recipes); fi
```
"""
    assert [words for command in page_of(tmp_path, text).commands for words in command.calls()] == [
        ["plan", "x", "--set", "a={b: 1}"],
        ["verify", "$x"],
        ["run", "y"],
        ["report", "z"],
        ["recipes"],
    ]


def test_contributing_lists_the_marks() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [need for need in NEEDS if f"`# needs {need}`" not in text] == []
