"""Runs a page: one session of bash in one empty folder, with `quantize` and `python` on its PATH, offline."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from pages import REPOSITORY, Command, Page

HERE = Path(__file__).resolve().parent
LIMIT = 300  # seconds that a page may take, many times what one takes
DONE = "all"
LINES = 30  # of a failed command's output that are shown
TINY = "tiny-minimax-m2-fp8-int4"
INHERITED = ("PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR")
MADE = "QUANTIZERS_TEST_TINY"  # environment variable: a finished out/tiny that was made before


class Sessions:
    """Where pages are run: what they find there, and the process that their `quantize` is forked from.

    Use as a context manager.

    Attributes:
        home: the user's home, emptied before each page.
        finished: a finished `out/tiny`, of which pages that name it get a copy; None before it was made.
    """

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.finished: Path | None = None
        self._bin, self._log = folder / "bin", folder / "log"
        self._server: subprocess.Popen[str] | None = None
        self._place = tempfile.TemporaryDirectory()  # the path of a socket has 107 characters at most
        self._socket = Path(self._place.name) / "socket"
        for part in (self.home, self._bin, folder / "matplotlib"):
            part.mkdir(parents=True)
        client = f"-S -E {HERE / 'page_client.py'} {self._socket}"
        for name, words in (("python", ""), ("torchrun", "-m torch.distributed.run"), ("quantize", client)):
            script = self._bin / name
            script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
            script.chmod(0o755)
        self.environment = {
            "PATH": f"{self._bin}:{os.defpath}",
            "HOME": str(self.home),
            "MPLCONFIGDIR": str(folder / "matplotlib"),
            "LC_ALL": "C.UTF-8",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        } | {name: os.environ[name] for name in INHERITED if name in os.environ}

    def __enter__(self) -> Sessions:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_server()
        self._place.cleanup()

    def run(self, page: Page, folder: Path) -> str | None:
        """Run a page's commands in the folder; None, or the first that did not end as it should, and what it said."""
        if self._server is None:
            self._start_server()
        self._empty_home()
        commands = page.run
        if self.finished and any("out/tiny" in command.text for command in commands):
            shutil.copytree(self.finished, folder / "out" / "tiny")
        at, log = self._log.with_suffix(".at"), self._log
        script = [f"exec >>{log} 2>&1 </dev/null", "set -o pipefail"]
        for number, command in enumerate(commands):
            script += [
                f": >{log}; echo {number} >{at}",
                command.text,
                f"{{ code=$?; [ $code = {command.code} ] || {{ echo {number} $code >{at}; exit 99; }}; }} 2>/dev/null",
            ]
        script.append(f"echo {DONE} >{at}")
        at.write_text("0")  # if bash does not even come to the first command
        session = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-c", "\n".join(script)],
            cwd=folder, env=self.environment, start_new_session=True,
        )  # fmt: skip
        try:
            session.wait(LIMIT)
            ended = "ended the session"
        except subprocess.TimeoutExpired:
            ended = f"had not ended when the page had taken {LIMIT} seconds"
            os.killpg(session.pid, signal.SIGKILL)
            session.wait()
            self._end_server()
        if at.read_text().strip() == DONE:
            return None
        number, *code = map(int, at.read_text().split())
        if code:
            ended = f"exit code {code[0]}, not {commands[number].code}"
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()
        name = page.path.relative_to(REPOSITORY) if page.path.is_relative_to(REPOSITORY) else page.path
        head = f"{name}:{commands[number].line}: {ended}"
        return "\n".join([head, *_indented(commands[number].text.splitlines()), "said:", *_indented(said[-LINES:])])

    def make_finished(self, folder: Path) -> Path:
        """The folder of a finished run, made in `folder` as a reader does, unless QUANTIZERS_TEST_TINY names one."""
        if MADE in os.environ:
            return Path(os.environ[MADE])
        failed = self.run(Page(Path("out/tiny"), [Command(1, f"quantize run {TINY} --output out/tiny")]), folder)
        assert failed is None, failed
        return folder / "out" / "tiny"

    def _empty_home(self) -> None:
        shutil.rmtree(self.home)
        self.home.mkdir()

    def _start_server(self) -> None:
        self._socket.unlink(missing_ok=True)
        self._server = subprocess.Popen(
            [sys.executable, HERE / "page_server.py", self._socket],
            env=self.environment, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert self._server.stdout
        assert self._server.stdout.readline() == "ready\n", "page_server.py did not start"

    def _end_server(self) -> None:
        """End it with all that is forked from it."""
        if self._server:
            os.killpg(self._server.pid, signal.SIGKILL)
            with self._server:
                self._server = None


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
