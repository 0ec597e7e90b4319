"""`quantize` as a shell would start it."""

from __future__ import annotations

import io

import pytest
import typer
from rich.console import Console, RenderableType

from quantizers.cli import main as cli

COMMANDS = typer.main.get_command(cli.app)  # made once: typer evaluates the annotations of every option of all of them


def quantize(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["quantize", *map(str, words)])
    monkeypatch.setattr(cli, "app", COMMANDS)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


class Command:
    """`command(*words)` is the exit code; `out` and `err` are what the last one printed."""

    out, err = "", ""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *words: object) -> int:
        code = quantize(self._monkeypatch, *words)
        self.out, self.err = self._capsys.readouterr()
        return code


def printed(renderable: RenderableType) -> str:
    """What a wide terminal would show."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()
