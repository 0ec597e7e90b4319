"""What the tests of calibration sets share."""

from __future__ import annotations

from pathlib import Path

import pytest
from calibration_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tokenizer whose tokens are bytes."""
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees what another one has cached."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
