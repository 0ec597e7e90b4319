"""Is a text in the language that its category claims? Asked of py3langid, which carries its model."""

from __future__ import annotations

# The codes (ISO 639-1) that the identifier answers with, by the languages' everyday names.
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
_NAMES = {code: name for name, code in CODES.items()}


def identify(text: str) -> str:
    """The language of a text, by its everyday name, or its code where this module has no name for it."""
    import py3langid

    code: str = py3langid.classify(text)[0]
    return _NAMES.get(code, code)
