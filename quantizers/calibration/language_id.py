"""Spoken languages: their names and ISO 639-1 codes, and identification of a text's language."""

from __future__ import annotations

CODES = {
    "Arabic": "ar",
    "Bengali": "bn",
    "Chinese": "zh",
    "Czech": "cs",
    "Dutch": "nl",
    "English": "en",
    "French": "fr",
    "German": "de",
    "Greek": "el",
    "Hebrew": "he",
    "Hindi": "hi",
    "Hungarian": "hu",
    "Indonesian": "id",
    "Italian": "it",
    "Japanese": "ja",
    "Korean": "ko",
    "Persian": "fa",
    "Polish": "pl",
    "Portuguese": "pt",
    "Romanian": "ro",
    "Russian": "ru",
    "Spanish": "es",
    "Swedish": "sv",
    "Thai": "th",
    "Turkish": "tr",
    "Ukrainian": "uk",
    "Urdu": "ur",
    "Vietnamese": "vi",
}
_BY_LOWER_CASE = {name.lower(): code for name, code in CODES.items()}


def language_code(name: str) -> str | None:
    """The code of a language, in upper or lower case; None for a language that is not in the table."""
    return _BY_LOWER_CASE.get(name.lower())


_NAMES = {code: name for name, code in CODES.items()}


def identify(text: str) -> str:
    """The language of a text, by its everyday name, or its code where the table has no name for it."""
    import py3langid

    code: str = py3langid.classify(text)[0]
    return _NAMES.get(code, code)
