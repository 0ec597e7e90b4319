"""Whether an output fits on cards: MiniMax-M2.1's published and measured figures, and vLLM's rules."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quantizers.cli import main as cli
from quantizers.plan.job import Job
from quantizers.plan.serving_memory import (
    RUNTIME,
    UTILISATION,
    Model,
    common_fits,
    fit,
    kv_bytes_per_token,
    parse_cards,
    serving_model,
    tensor_parallel_problem,
)
from quantizers.system.byte_size import gib, parse_bytes
from quantizers.system.errors import InputError

MIB, GIB = 2**20, 2**30
WHOLE = 196_608


@pytest.fixture(scope="module")
def model(published_job: Job) -> Model:
    job = published_job
    return serving_model(job.plan, job.facts, job.sizes, job.config, job.fp8)


def test_the_measured_cache(model: Model) -> None:
    """15,872 MiB at 65,536 tokens in 16 bit, as measured on M2.5; half of it in 8 bit."""
    assert kv_bytes_per_token(model, "auto") == 253_952
    assert kv_bytes_per_token(model, "auto") * 65_536 == 15_872 * MIB
    assert kv_bytes_per_token(model, "fp8") * 65_536 == 7_936 * MIB
    assert fit(model, parse_cards("1x512GiB"), 65_536).kv_cache == 15_872 * MIB


def test_two_large_cards_take_the_whole_context_and_four_small_ones_nothing(model: Model) -> None:
    """The FP8 + INT4 quant has been served on 2 x 96 GiB with all 196,608 tokens, at 92.5 GiB a card."""
    two = fit(model, parse_cards("2x96GiB"), WHOLE)
    assert (two.fits, two.longest, two.tensor_parallel, two.pipeline_parallel) == (True, WHOLE, 2, 1)
    assert round(two.weights / GIB, 1) == 61.5
    assert two.kv_cache == 253_952 * WHOLE // 2
    assert two.budget == int(96 * GIB * UTILISATION)
    assert two.left == two.budget - two.weights - two.kv_cache - two.activations - RUNTIME
    assert two.budget - two.left < 92.5 * GIB
    four = fit(model, parse_cards("4x24GiB"), WHOLE)
    assert (four.fits, four.longest) == (False, 0)
    assert four.weights > 24 * GIB


def test_all_weights_are_somewhere(model: Model, published_job: Job) -> None:
    """On one card, the weights are the planned output's, but for headers."""
    planned = sum(spec.bytes for action in published_job.plan.actions for spec in action.outputs.values())
    assert fit(model, parse_cards("1x200GiB")).weights == planned


def test_fp8_keys_and_values_take_half(model: Model) -> None:
    cards = parse_cards("2x80GiB")
    plain, half = fit(model, cards, WHOLE), fit(model, cards, WHOLE, "fp8")
    assert half.kv_cache * 2 == plain.kv_cache
    assert 1.9 < half.longest / plain.longest < 2.1


def test_the_longest_context_fits_and_a_block_more_does_not(model: Model) -> None:
    cards = parse_cards("2x80GiB")
    longest = fit(model, cards).longest
    assert fit(model, cards, longest).fits
    assert not fit(model, cards, longest + 16).fits


@pytest.mark.parametrize(
    ("parallel", "problem"),
    [(2, None), (8, None), (3, "8 key-value heads"), (5, "48 attention heads"), (32, "48 attention heads")],
)
def test_what_vllm_can_split(model: Model, parallel: int, problem: str | None) -> None:
    found = tensor_parallel_problem(model, parallel)
    assert found is None if problem is None else problem in str(found)


def test_cards_that_do_not_divide_go_in_stages(model: Model) -> None:
    three = fit(model, parse_cards("3x96GiB"), WHOLE)
    assert (three.tensor_parallel, three.pipeline_parallel) == (1, 3)
    assert three.kv_cache == 2 * 21 * 8 * 128 * 2 * WHOLE  # 21 of 62 layers on the fullest card
    assert three.fits


def test_more_cards_than_key_value_heads_hold_them_twice(model: Model) -> None:
    assert kv_bytes_per_token(model, "auto", 16) == kv_bytes_per_token(model, "auto", 8)


def test_usual_cards(model: Model) -> None:
    rows = common_fits(model)
    assert {"2x96GiB", "4x80GiB"} <= {row.cards for row in rows if row.fits}
    assert "4x24GiB" not in {row.cards for row in rows}


@pytest.mark.parametrize("text", ["", "x", "0x24GiB", "2x", "2x24", "2x0GiB", "-1x24GiB", "2x24GiX"])
def test_what_is_no_set_of_cards(text: str) -> None:
    with pytest.raises(InputError, match="--vram"):
        parse_cards(text)


@pytest.mark.parametrize(
    ("text", "size"), [("96GiB", 96 * GIB), ("24 GB", 24 * 10**9), ("1.5gib", 3 * GIB // 2), ("512MiB", 512 * MIB)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text, "x") == size


def test_sizes_are_printed_in_gib() -> None:
    assert [gib(n) for n in (61.45 * GIB, -0.34 * GIB, 3 * MIB)] == ["61.5 GiB", "-0.3 GiB", "3.0 MiB"]


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, str, str]:
    monkeypatch.setattr("sys.argv", ["quantize", "plan", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, *capsys.readouterr()


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("minimax-m2.1-fp8-int4", "--vram", "2x96GiB", "--vram", "4x24GiB", "--context", "196608")
    code, out, err = said(monkeypatch, capsys, *words)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert next(line for line in lines if line.startswith("2x96GiB")).endswith(" fits")
    assert next(line for line in lines if line.startswith("4x24GiB")).endswith("does NOT fit")
    assert "assumed:" in lines
    code, out, _ = said(monkeypatch, capsys, *words, "--json")
    assert [row["fits"] for row in json.loads(out)["fits"]] == [True, False]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--context", "4096"), "--context, --kv and --tp go with --vram"),
        (("--vram", "2x96GiB", "--tp", "3"), "--tp 3 does not divide the 2 cards"),
        (("--vram", "3x96GiB", "--tp", "3"), "--tp 3: 8 key-value heads"),
        (("--vram", "2x96GiB", "--context", "196609"), "this model takes 1 to 196,608 tokens"),
    ],
)
def test_what_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    published_job: Job,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr("quantizers.plan.job.prepare", lambda *_, **__: published_job)
    code, out, err = said(monkeypatch, capsys, "minimax-m2.1-fp8-int4", *words)
    assert (code, out) == (2, "")
    assert message in err
