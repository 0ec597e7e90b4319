"""A tokenizer for the tests of calibration sets."""

from __future__ import annotations

import pytest
from calibration_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tokenizer whose tokens are bytes."""
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
