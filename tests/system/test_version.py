"""The digest that tells two commits apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantizers.system import version


def test_the_digest_has_every_file_of_the_packages_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template counts as code does; what Python compiles does not, nor what only a wheel has there."""
    template = tmp_path / "quantizers/eval/report/templates/card.md.jinja"
    others = ("quantizers/system/__pycache__/version.pyc", "quantizers/shipped/recipes/a.yaml", "tests/test_a.py")
    monkeypatch.setattr(version, "__file__", str(tmp_path / "quantizers/system/version.py"))

    def digest(name: str | Path, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return version.files_digest.__wrapped__()

    found = [digest(template, text) for text in ("one", "two", "one")]
    assert found[0] == found[2] != found[1]
    assert all(digest(name, "") == found[0] for name in others)
    assert digest("quantizers/stitch/audit/a.yaml", "") != found[0]
