"""A Hub on the loopback interface, a finished folder to publish there, and the command."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import quantize
from conftest import Finished
from hub_stand_in import HubStandIn
from publishing import TOKEN, Publish


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    with HubStandIn(TOKEN) as stand_in:
        yield stand_in


@pytest.fixture
def folder(finished: Finished, tmp_path: Path) -> Path:
    shutil.copytree(finished.folder, tmp_path / "output")
    return tmp_path / "output"


@pytest.fixture
def no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source must not be opened."""

    def refused(*_: Any) -> None:
        raise AssertionError("the source was opened")

    monkeypatch.setattr("quantizers.commands.verify.source_of", refused)


@pytest.fixture
def publish(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Publish:
    """`publish(*arguments, token=TOKEN)`: the command in this process, which imports once; pages have no plots."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_XET_CACHE", "HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH"):
        monkeypatch.setattr(constants, name, str(tmp_path / "home" / name))

    def call(*arguments: object, token: str | None = TOKEN) -> tuple[int, str, str]:
        with monkeypatch.context() as patched:
            patched.setattr("quantizers.eval.report.plots.draw", lambda _: ({}, []))
            patched.delenv("HF_TOKEN", raising=False)
            if token is not None:
                patched.setenv("HF_TOKEN", token)
            code = quantize(patched, "publish", *arguments)
        said = capsys.readouterr()
        assert TOKEN not in said.out + said.err
        return code, said.out, said.err

    return call
