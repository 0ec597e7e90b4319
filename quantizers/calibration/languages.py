"""The spoken languages that this program knows, by their everyday English names, with their ISO 639-1 codes.

A check of a set identifies these languages, and a card lists them in its front matter.
"""

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
