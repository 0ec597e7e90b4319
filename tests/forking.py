"""Runs of `quantize` forked from one process that has imported everything.

    python tests/forking.py LOG WORDS…      the words of a run, as JSON, whose imports all of them have

Each line of standard input, the words of a call as JSON, starts one, which adds what it says to LOG. Standard output
has its process id in a line, and once it has ended its exit code, or minus the signal. Forking is sound here: one
thread, and those of a finished run have ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from select import select
from typing import Any


class Forking:
    """That process, for a test. Use as a context manager."""

    def __init__(self, log: Path, first: Sequence[Any], environment: dict[str, str]) -> None:
        command, pipe = [sys.executable, __file__, log, *map(str, first)], subprocess.PIPE
        single = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._server = subprocess.Popen(command, env=environment | single, stdin=pipe, stdout=pipe, text=True, cwd="/")
        self._log, self._said, self.process = log, 0, 0

    def __enter__(self) -> Forking:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin
        with self._server:
            self._server.stdin.close()

    def start(self, *words: object) -> None:
        """Start `quantize` with these words; `process` is its id."""
        assert self._server.stdin
        print(json.dumps([str(word) for word in words]), file=self._server.stdin, flush=True)
        self.process = self._answer()

    def kill(self) -> None:
        """End it, if it has not ended, and wait until it is gone."""
        with suppress(ProcessLookupError):
            process = os.pidfd_open(self.process)
            os.kill(self.process, signal.SIGKILL)
            select([process], [], [])
            os.close(process)

    def ended(self) -> tuple[int, str]:
        """How it ended, and what it said."""
        code, said = self._answer(), self._log.read_text()
        said, self._said = said[self._said :], len(said)
        return code, said

    def _answer(self) -> int:
        assert self._server.stdout
        return int(self._server.stdout.readline())


def quantize(*words: object) -> int:
    """The command in this process; its exit code."""
    from quantizers.cli import main as cli

    sys.argv = ["quantize", *map(str, words)]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("main() always exits")


def main(log: str, *first: str) -> None:
    import_module("stopping")  # threads and plots are then as in the tests' own process
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    assert quantize(*first) == 0
    os.ftruncate(stream, 0)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            os._exit(quantize(*json.loads(line)))
        print(child, file=answers)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
