"""Sizes as people write them, and what is true of many layers said once."""

from __future__ import annotations

import pytest

from quantizers.system.errors import InputError
from quantizers.system.formatting import collapse_lines, gib, parse_bytes, places, ranges, size_between, size_from


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
    ("least", "most", "text"),
    [
        (65_086_337_448, 74_296_381_384, "74.2GB"),
        (65_086_337_448, 65_091_000_000, "65.09GB"),
        (2_000_000_000, 2_000_000_000, "2GB"),
        (3_393_016, 3_393_016, "3.393016MB"),
        (900, 999, "999B"),
    ],
)
def test_a_size_between_two(least: int, most: int, text: str) -> None:
    """As few digits as do; never less than what is needed, nor more than there is."""
    assert size_between(least, most) == text
    assert least <= parse_bytes(text, "budget") <= most


@pytest.mark.parametrize(("least", "text"), [(65_086_337_448, "65.1GB"), (2_000_000_000, "2GB"), (999, "999B")])
def test_the_smallest_size_that_is_enough(least: int, text: str) -> None:
    assert size_from(least) == text
    assert parse_bytes(text, "budget") >= least


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


ROUTER = "model.layers.{n}.mlp.gate.weight: not compensated, though model.layers.{n}.norm was divided in {c} channels"


def test_one_cause_in_all_layers_is_one_line_with_a_count() -> None:
    lines = [ROUTER.format(n=n, c=128) for n in range(62)]
    assert collapse_lines(lines) == [
        "layers 0–61: mlp.gate.weight: not compensated, though norm was divided in 128 channels (62 times)"
    ]


def test_numbers_that_differ_are_given_from_least_to_most() -> None:
    lines = [f"model.layers.{n}.mlp.experts.{e}.w1.weight: {9 + n}% away" for n in (0, 1, 3) for e in range(4)]
    assert collapse_lines(lines) == ["layers 0–1, 3, experts 0–3: mlp.experts.*.w1.weight: 9% to 12% away (12 times)"]


def test_other_lines_stay_as_they_are_and_in_their_order() -> None:
    lines = [
        "model.layers.0.a.weight: missing",
        "model-00001-of-00002.safetensors: has 5 bytes",
        "model-00002-of-00002.safetensors: has 6 bytes",
        "model.layers.1.b.weight: missing",
        "model.layers.2.w1.weight: is BF16 [4, 8], should be F32 [4, 8]",
        "model.layers.2.w2.weight: is BF16 [4, 8], should be F32 [4, 8]",
        "config.json: x is 5, should be 4",
    ]
    assert collapse_lines(lines) == lines


@pytest.mark.parametrize(
    ("numbers", "text"), [([3], "3"), ([1, 0], "0–1"), ([5, 0, 1, 2, 2, 9], "0–2, 5, 9"), ([], "")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_names_of_several_matrices_are_listed() -> None:
    names = [f"model.layers.{n}.mlp.experts.{e}.{w}" for n in range(3) for e in range(2) for w in ("w1", "w2")]
    assert places(names) == "layers 0–2, experts 0–1: mlp.experts.*.w1, mlp.experts.*.w2"
    assert places(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert places(["model.layers.3.x"]) == "model.layers.3.x"
