"""A process that has imported the program, and forks itself for each `quantize` of page_client.py.

    python tests/page_server.py SOCKET

Of large calibration and held-out sets it uses a part, unless a command says how much: pages are about commands.
Ends when its standard input does. Forking is sound here: one thread, and what it has run itself has ended.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pkgutil import walk_packages
from select import select
from typing import Any

import torch
import typer
from forking import quantize

from quantizers.calibration import load_set as loading
from quantizers.calibration.samples import CalibrationData, digest_of

NOT_HERE = ("offline_vllm", "ask_vllm", "triton_code", "__main__")  # of another environment, or run when imported
# What the shell sets by itself.
SHELL = {"PWD", "OLDPWD", "SHLVL", "_"}
SAMPLES = 32  # of a set
OWN_ENVIRONMENT = dict(os.environ)  # the program adds to it


def with_few_samples(load_set: Any) -> Any:
    """`load_set` with every n-th sample of a set that has many."""

    def load_part(*given: Any, **named: Any) -> CalibrationData:
        data: CalibrationData = load_set(*given, **named)
        tokens = signature(load_set).bind(*given, **named).arguments.get("tokens")
        step = -(-len(data.samples) // SAMPLES)
        if tokens is not None or step < 2:
            return data
        return replace(data, samples=data.samples[::step], digest=digest_of(data.samples[::step]))

    return load_part


def import_everything() -> None:
    """Import the program, and what commands import late."""
    import_module("quantizers.sets.check")  # which is asked about whole sets
    loading.load_set = with_few_samples(loading.load_set)  # before others import it by name
    for found in walk_packages(import_module("quantizers").__path__, "quantizers."):
        if not found.name.endswith(NOT_HERE):
            import_module(found.name)
    from quantizers.cli import main as cli

    vars(cli)["app"] = typer.main.get_command(cli.app)  # which evaluates the annotations of every option
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        assert quantize("plan", "tiny-minimax-m2-fp8-int4") == 0
        assert quantize("calibration", "embedded") == 0


def serve(connection: socket.socket) -> None:
    """What a child does: the command, with the streams, the folder and the environment of its client."""
    length, streams, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as asked:
        words, folder, environment = json.loads(asked.read(int.from_bytes(length)))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    different = {name for name, _ in environment.items() ^ OWN_ENVIRONMENT.items()}
    if different <= SHELL:
        code = quantize(*words)
        sys.stdout.flush()
        sys.stderr.flush()
    else:  # libraries read theirs when they are imported
        code = subprocess.run([sys.executable, "-m", "quantizers", *words], env=environment, check=False).returncode
    connection.sendall(bytes([code % 256]))


def main(path: str) -> None:
    torch.set_num_threads(1)
    import_everything()
    gc.freeze()  # so that children leave it alone
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen()
        print("ready", flush=True)
        while door in select([door, sys.stdin], [], [])[0]:
            connection = door.accept()[0]
            if os.fork():
                connection.close()
                continue
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            door.close()
            try:
                serve(connection)
            finally:
                os._exit(1)  # the client has been told the code, or notices that it was not


if __name__ == "__main__":
    main(sys.argv[1])
