"""Drawing a number of tokens from a set, against a version that hands them out one by one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY
from hypothesis import given
from hypothesis import strategies as st
from sets import rows_set

from quantizers.calibration.load_set import load_set
from quantizers.calibration.samples import CalibrationData, Sample, digest_of, subsample
from quantizers.calibration.set import seeded
from quantizers.system.errors import CalibrationError

MEMBERS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(2, 12)), min_size=1, max_size=20)
ASKED = st.integers(1, 200)


def loaded(members: list[tuple[str, int]]) -> CalibrationData:
    """A set of samples with these categories and lengths; every token of it is another number."""
    made, first = [], 0
    for number, (category, length) in enumerate(members):
        tokens = np.arange(first, first + length, dtype=np.int32)
        made.append(Sample(tokens, category, "x", truncated=number % 3, place=str(number)))
        first += length
    return CalibrationData("set", 12, (12,), tuple(made), digest_of(made), (), ("v",))


def one_by_one(held: dict[str, int], tokens: int) -> Counter[str]:
    """Shares by handing out single tokens: each to one of the categories that have fewest so far, and not yet all."""
    given_out: Counter[str] = Counter()
    for _ in range(tokens):
        hungry = [name for name in held if given_out[name] < held[name]]
        if not hungry:
            break
        least = min(given_out[name] for name in hungry)
        given_out[max((n for n in hungry if given_out[n] == least), key=lambda n: (held[n], n))] += 1
    return given_out


@given(members=MEMBERS, tokens=ASKED, seed=st.integers(0, 9))
def test_what_is_drawn_is_what_one_token_after_the_other_gives(
    members: list[tuple[str, int]], tokens: int, seed: int
) -> None:
    data = loaded(members)
    drawn = subsample(data, tokens, seed)
    expected: Counter[int] = Counter()  # tokens of each sample
    held = Counter({name: sum(n for other, n in members if other == name) for name, _ in members})
    for name, share in one_by_one(held, tokens).items():
        queue = [number for number, (category, _) in enumerate(members) if category == name]
        seeded(f"{seed}:draw:{name}").shuffle(queue)
        expected.update([number for number in queue for _ in range(members[number][1])][:share])
    assert [(int(sample.place), len(sample.tokens)) for sample in drawn.samples] == sorted(expected.items())
    for sample in drawn.samples:
        whole = data.samples[int(sample.place)]
        assert sample.tokens.tolist() == whole.tokens[: len(sample.tokens)].tolist()
        assert sample.truncated - whole.truncated == len(whole.tokens) - len(sample.tokens)
    assert drawn.digest == digest_of(drawn.samples)
    assert sum(len(sample.tokens) for sample in drawn.samples) == min(tokens, held.total())
    assert drawn.drawn is not None
    assert drawn.drawn.cut == sum(count < members[number][1] for number, count in expected.items())
    assert (drawn.drawn.asked, drawn.drawn.samples, drawn.drawn.tokens) == (tokens, len(members), held.total())


@pytest.mark.parametrize("positions", [9, 50, 300])
def test_texts_are_cut_at_the_positions_of_a_model(positions: int, tmp_path: Path, tokenizer: str) -> None:
    """As a set does whose sequences are as long; and a note counts them."""
    path = rows_set(tmp_path, [("a", "word " * count) for count in (4, 10, 19, 40)], sequence_length=300)
    cut, whole = load_set(path, tokenizer, positions=positions), load_set(path, tokenizer)
    path.write_text(path.read_text().replace("300", str(positions)))
    same = load_set(path, tokenizer)
    assert cut.digest == same.digest
    assert [sample.truncated for sample in cut.samples] == [sample.truncated for sample in same.samples]
    longer = sum(len(sample.tokens) > positions for sample in whole.samples)
    note = f"texts longer than the {positions} positions of the model are cut there: {longer}"
    assert cut.notes == ((note,) if positions < 300 else ())


@given(members=MEMBERS, tokens=ASKED, more=st.integers(0, 50), seed=st.integers(0, 9))
def test_a_larger_draw_holds_the_smaller_one(members: list[tuple[str, int]], tokens: int, more: int, seed: int) -> None:
    fewer = {token for sample in subsample(loaded(members), tokens, seed).samples for token in sample.tokens.tolist()}
    larger = subsample(loaded(members), tokens + more, seed)
    assert fewer <= {token for sample in larger.samples for token in sample.tokens.tolist()}


@given(members=MEMBERS, seed=st.integers(0, 9))
def test_a_set_that_holds_no_more_is_used_whole(members: list[tuple[str, int]], seed: int) -> None:
    data, total = loaded(members), sum(length for _, length in members)
    for asked, notes in (
        (total, ()),
        (total + 1, (f"set holds fewer than calibration.tokens, {total:,} of {total + 1:,}: all are used",)),
    ):
        whole = subsample(data, asked, seed)
        assert (whole.digest, whole.notes) == (data.digest, notes)
        assert [vars(sample) for sample in whole.samples] == [vars(sample) for sample in data.samples]


def test_the_seed_decides_which() -> None:
    data = loaded([("a", 10)] * 20)
    digests = [subsample(data, 50, seed).digest for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]
    assert len({*digests, data.digest}) == 3


def test_the_embedded_set_gives_every_category_as_much(tiny_model: Path, embedded_in_tokens: CalibrationData) -> None:
    whole = embedded_in_tokens
    drawn = load_set(REPOSITORY / "calibration" / "embedded.yaml", tiny_model, tokens=15_000)
    tokens: Counter[str] = Counter()
    for sample in drawn.samples:
        tokens[sample.category] += len(sample.tokens)
    assert set(tokens) == {sample.category for sample in whole.samples}
    assert tokens.total() == 15_000
    assert max(tokens.values()) - min(tokens.values()) <= 1  # no category of it holds less than its share
    assert drawn.summary()["drawn"] == {"asked": 15_000, "samples": 299, "tokens": 76_544, "cut": 88}
    assert "drawn" not in whole.summary()


def test_required_languages_are_required_of_what_is_drawn(tmp_path: Path, tiny_model: Path) -> None:
    """One token is in one of two languages."""
    rows = [(f"code/{name}", f"some words, row {number}") for number in range(2) for name in ("ada", "zig")]
    languages = {"programming": ["Ada", "Zig"], "required": True}
    path = rows_set(tmp_path, rows, "two", languages=languages)
    held = sum(len(sample.tokens) for sample in load_set(path, tiny_model).samples)
    assert load_set(path, tiny_model, tokens=held - 1).drawn
    with pytest.raises(
        CalibrationError, match=r"two.yaml: of 1 tokens drawn from it none is in (Ada|Zig); raise calibration\.tokens"
    ):
        load_set(path, tiny_model, tokens=1)
