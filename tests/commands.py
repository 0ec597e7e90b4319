"""`quantize` as a shell would start it."""

from __future__ import annotations

import pytest

from quantizers.cli import main as cli


def quantize(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["quantize", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)
