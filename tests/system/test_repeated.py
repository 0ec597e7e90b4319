"""What is true of many layers is said once, and nothing else is joined."""

from __future__ import annotations

import pytest

from quantizers.system.formatting import collapse_lines, places, ranges

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
