"""Where there is no home, or none that can be written: a container of an unknown user."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import NoReturn

import pytest

from quantizers.checkpoint.reader import locate
from quantizers.system.caches import settle_caches, user_cache
from quantizers.system.errors import CheckpointError

SETTLED = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR")
HUB = ("HF_HOME", "HF_DATASETS_CACHE", "HF_MODULES_CACHE")


def unknown(_: int) -> NoReturn:
    raise KeyError


def is_writable(path: str | Path, mode: int) -> bool:
    return mode == os.W_OK and "read-only" not in str(path)  # for root everything is


@pytest.mark.parametrize(
    ("home", "variables", "cache", "settled"),
    [
        (None, {}, None, {*SETTLED, "HF_HOME"}),
        ("read-only", {}, None, {*SETTLED, "HF_HOME"}),
        (None, {"XDG_CACHE_HOME": "cache"}, "cache", set(SETTLED)),
        ("home", {}, "home/.cache", set[str]()),
        ("home", {"HF_HOME": "read-only/hub"}, "home/.cache", {"HF_DATASETS_CACHE", "HF_MODULES_CACHE"}),
    ],
)
def test_libraries_get_a_temporary_folder_for_one_that_cannot_be_written(
    home: str | None,
    variables: dict[str, str],
    cache: str | None,
    settled: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {name: str(tmp_path / value) for name, value in variables.items()}
    for name in (*SETTLED, *HUB, "HF_HUB_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)
    for name, value in (({"HOME": str(tmp_path / home)} if home else {}) | given).items():
        monkeypatch.setenv(name, value)
    for name in ("home", "read-only", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(os, "access", is_writable)
    assert user_cache() == (tmp_path / cache if cache else None)
    settle_caches()
    for name in settled:
        Path(os.environ[name]).mkdir(parents=True)
    assert {name for name in (*SETTLED, *HUB) if name in os.environ} - set(given) == settled
    if "HF_HOME" in settled:
        with pytest.raises(CheckpointError, match=r"me/model: there is no home folder .*; set HF_HOME"):
            locate("me/model")
