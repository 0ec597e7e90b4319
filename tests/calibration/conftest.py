"""What the tests of calibration sets share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from calibration_tokenizer import write_tokenizer
from hub_stand_in import HubStandIn, reached
from made_once import made_once

from quantizers.calibration import hub as hub_module
from quantizers.calibration.load_set import load_set
from quantizers.calibration.samples import CalibrationData
from quantizers.system.shipped import shipped


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tokenizer whose tokens are bytes."""
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def embedded_in_tokens(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> CalibrationData:
    """The embedded set in the tokens of the trained tiny model."""
    path = shipped("calibration") / "embedded.yaml"
    return made_once(tmp_path_factory, "embedded", lambda _: load_set(path, str(tiny_model)))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    monkeypatch.setattr(hub_module, "PAUSES", (0.5,))
    with HubStandIn() as stand_in:
        reached(stand_in, tmp_path / "home", monkeypatch)
        yield stand_in
