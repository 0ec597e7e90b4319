"""Sizes as people write them, and what is refused rather than guessed."""

from __future__ import annotations

import pytest

from quantizers.system.errors import InputError
from quantizers.system.formatting import gib, parse_bytes


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("96GiB", 96 * 2**30),
        ("24 GB", 24 * 10**9),
        (" 20gib ", 20 * 2**30),
        ("1.5TiB", 3 * 2**39),
        ("400kB", 400_000),
        ("1.9B", 1),
    ],
)
def test_sizes(text: str, number: int) -> None:
    assert parse_bytes(text, "--vram") == number


@pytest.mark.parametrize(
    "text",
    [
        *("", "120", "80G", "8gbit", "1,000GiB", "96GiB each", "-3GiB", "0GiB", "0.5B", "nan", "inf GiB", "1e3GiB"),
        "9" * 400 + "GiB",
    ],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^--vram: .* is not a size; write it as 96GiB or 96GB$"):
        parse_bytes(text, "--vram")


def test_sizes_are_shown_in_powers_of_1024() -> None:
    assert (gib(2**37), gib(2**27), gib(2**27 - 1), gib(1.5 * 2**20)) == (
        "128.0 GiB",
        "0.1 GiB",
        "128.0 MiB",
        "1.5 MiB",
    )
