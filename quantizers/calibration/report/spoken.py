"""Is a text in the language that its category claims? py3langid answers; its model comes with the package."""

from __future__ import annotations

from quantizers.calibration.languages import CODES

_NAMES = {code: name for name, code in CODES.items()}


def identify(text: str) -> str:
    """The language of a text, by its everyday name, or its code where the table has no name for it."""
    import py3langid

    code: str = py3langid.classify(text)[0]
    return _NAMES.get(code, code)
