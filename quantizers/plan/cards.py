"""Cards by name for `plan --vram`: what the vendor states, and what torch and vLLM see of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quantizers.system.errors import InputError, did_you_mean
from quantizers.system.formatting import parse_bytes

GIB = 2**30

# GiB as torch reports them ("GPU 0 has a total capacity of ..."): drivers differ in the first decimal, so these are
# the smallest of those seen. A card that is not among them counts with the nominal size.
SEEN = {
    "RTX-4090": 23.6, "RTX-PRO-6000": 94.9, "L40S": 44.3, "A100": 79.1, "A100-40": 39.3, "H100": 79.1, "H200": 139.7,
    "B200": 178.3, "MI300X": 191.4,
}  # fmt: skip
# Nominal sizes in GB, which for memory of cards are 2**30 bytes.
STATED = {
    "RTX-3090": 24, "RTX-4090": 24, "RTX-5090": 32, "RTX-A6000": 48, "RTX-6000-ADA": 48, "RTX-PRO-6000": 96,
    "L4": 24, "A10": 24, "L40": 48, "L40S": 48, "A100-40": 40, "A100": 80, "H100": 80, "H100-NVL": 94, "H20": 96,
    "H200": 141, "B200": 180, "MI300X": 192, "MI325X": 256, "MI355X": 288,
}  # fmt: skip
OTHER_NAMES = {"A100-80": "A100", "H100-80": "H100", "A6000": "RTX-A6000", "6000-ADA": "RTX-6000-ADA"}


@dataclass(frozen=True)
class Cards:
    """`count` equal cards of `bytes` each; `name` is the user's text, such as 2x96GiB or 2xH100."""

    name: str
    count: int
    bytes: int

    def of(self, count: int) -> Cards:
        """Another number of the same cards."""
        return Cards(f"{count}x{_COUNT.sub('', self.name)}", count, self.bytes)


_COUNT = re.compile(r"^\d+\s*[xX×]\s*")


def parse_cards(text: str) -> Cards:
    """Parse `2x96GiB`, `2xH100`, or either for one card.

    Raises:
        InputError: the text has neither form, or no card has this name; the message lists the known ones.
    """
    match = re.fullmatch(r"(?:(\d+)\s*[xX×]\s*)?(.+)", text.strip())
    if match is None or (match[1] is not None and not int(match[1])):
        raise InputError(f"--vram {text!r}: write the number of cards and the memory of each, as 2x96GiB, or 2xH100")
    count = int(match[1] or 1)
    if re.match(r"[a-z]|\d+$|\d{4}", match[2], re.IGNORECASE) and (name := _known(match[2])):
        return Cards(text.strip(), count, int(SEEN.get(name, STATED[name]) * GIB))
    if re.match(r"[a-z]", match[2], re.IGNORECASE) or re.fullmatch(r"\d{4}\s*\w*", match[2]):
        meant = did_you_mean(_spelled(match[2]), STATED)
        raise InputError(
            f"--vram {text!r}: no card {match[2]} is known{meant}; give the memory of each, as {count}x96GiB, or one "
            f"of {', '.join(sorted(STATED))}"
        )
    return Cards(text.strip(), count, parse_bytes(match[2], "--vram"))


def _known(name: str) -> str | None:
    """The name of a card in STATED: in any case, with blanks, and with or without RTX."""
    spelled = _spelled(name)
    spelled = OTHER_NAMES.get(spelled, spelled)
    return next((one for one in (spelled, f"RTX-{spelled}") if one in STATED), None)


def _spelled(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip().upper().removeprefix("NVIDIA ").removeprefix("AMD "))
