"""Coverage: counts against transformers' own model with padding, gates, comparison of sets, and the command."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import yaml
from commands import Command
from conftest import Finished
from edited import MOE, edit
from sets import rows_set
from whole_models import finished_weights, source_weights

from quantizers.calibration.load_set import load_set
from quantizers.checkpoint.reader import open_folder
from quantizers.commands.question import Question
from quantizers.eval.coverage.figures import CoverageComparison, CoverageReport, SetName
from quantizers.eval.coverage.routing import TIE, Routed
from quantizers.eval.coverage.summary import check_floors, coverage_table, entropy, gates, report, summarise
from quantizers.eval.report.plots import HIGH, LOW, comparison_figure
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare
from quantizers.recipe.schema import CoverageGate
from quantizers.sets.coverage import measure_coverage
from quantizers.sets.coverage_change import compare_counts, compare_table, labels
from quantizers.system.errors import InputError

CPU = torch.device("cpu")
WholeModel = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]


@torch.no_grad()
def oracle(model: Any, samples: list[tuple[str, torch.Tensor]]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Hooks on the whole model, all texts in one padded batch: counts, and those within TIE, (L, C, E)."""
    names = sorted({category for category, _ in samples})
    longest = max(len(tokens) for _, tokens in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, (_, tokens) in enumerate(samples):
        ids[i, : len(tokens)], mask[i, : len(tokens)] = tokens, 1
    layers, experts = model.config.num_hidden_layers, model.config.num_local_experts
    counts, close = (np.zeros((layers, len(names), experts), dtype=np.int64) for _ in range(2))
    hooks = []
    for number, layer in enumerate(model.model.layers):

        def count(module: Any, inputs: Any, output: Any, number: int = number) -> None:
            scores = (output[0].float().sigmoid() + inputs[1]).view(len(samples), longest, experts)
            ranked = scores.sort(-1, descending=True)
            for i, (category, tokens) in enumerate(samples):
                for t in range(len(tokens)):
                    tie = float(ranked.values[i, t, 1] - ranked.values[i, t, 2]) < TIE
                    for expert in output[2].view(len(samples), longest, 2)[i, t].tolist():
                        counts[number, names.index(category), expert] += 1
                        close[number, names.index(category), expert] += tie

        hooks.append(layer.mlp.gate.register_forward_hook(count))
    model(ids, attention_mask=mask)
    for hook in hooks:
        hook.remove()
    return names, counts, close


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of texts of many lengths in three categories."""
    folder = tmp_path_factory.mktemp("uneven")
    words = "def add ( a , b ) return the sum of two numbers die Summe zweier Zahlen"
    rows = [(f"kind/{n % 3}", (words * 4)[7 * n : 7 * n + 13 * n + 20]) for n in range(20)]
    return rows_set(folder, rows, sequence_length=128)


@pytest.mark.parametrize("which", [pytest.param("FP8 source", marks=pytest.mark.slow), "finished output"])
def test_counts_equal_the_whole_models(
    which: str, finished: Finished, uneven: Path, whole_model: WholeModel, tmp_path: Path
) -> None:
    """Exactly, per layer, expert and category, but for choices within 1e-6, which are counted apart."""
    folder = finished.source if which == "FP8 source" else finished.folder
    weights = source_weights(folder) if which == "FP8 source" else finished_weights(folder)
    data = load_set(uneven, str(finished.source))
    samples = [(s.category, torch.from_numpy(s.tokens).long()) for s in data.samples]
    assert len({len(tokens) for _, tokens in samples}) > 5, "without padding, padding is not tested"
    names, counts, close = oracle(whole_model(*weights), samples)
    found = measure_coverage(Question(str(folder), "main", False, (uneven,), "x"), CoverageGate(), CPU, tmp_path)
    assert isinstance(found, CoverageReport)
    assert list(found.counts) == names
    ours = np.array([found.counts[name] for name in names]).swapaxes(0, 1)
    tied = max(int(close.sum()), found.tied_choices)
    print(f"{which}: {ours.sum():,} choices, {tied} of them within {TIE:g}, {(ours != counts).sum()} counts differ")
    assert tied < 10
    assert np.abs(ours - counts).sum() <= 2 * tied
    assert sum(found.tokens.values()) == sum(len(tokens) for _, tokens in samples)
    assert ours.sum() == 4 * 2 * sum(found.tokens.values())


@pytest.fixture(scope="module")
def unreachable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a model of two layers, in which the bias of layer 1 makes expert 3 unreachable."""
    folder = tmp_path_factory.mktemp("unreachable")
    tiny.write_tokenizer(tiny.make(folder / "model", num_hidden_layers=2, num_local_experts=8))
    recipe = tiny.write_recipe(folder)
    name = f"{MOE}.e_score_correction_bias"
    edit(folder / "model", name, lambda tensors: tensors[name][3:4].fill_(-1e3))
    body = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump(body | {"verify": {"coverage": {"min_routed_tokens": 1}}}))
    return recipe


def test_an_unreachable_expert_exits_3_and_is_named(unreachable: Path, tmp_path: Path, command: Command) -> None:
    picture = tmp_path / "coverage.png"
    assert command("coverage", unreachable, "--picture", picture, "--json") == 3
    found = json.loads(command.out)
    assert CoverageReport.model_validate(found).as_dict() == found
    assert found["uncovered_pairs"] == [[1, 3]]
    assert found["worst"][0] | {"sent_by": {}, "nearly_sent_by": {}, "tokens": 0} == found["worst"][0]
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = coverage_table(CoverageReport.model_validate(found))
    for words in ("uncovered: layer 1 expert 3", "no category of this set comes near it", "FAILED"):
        assert words in out


def test_a_run_records_the_fallback_and_writes_finite_values(unreachable: Path, tmp_path: Path) -> None:
    done = run(prepare(str(unreachable)), Options(tmp_path / "output", CPU))
    assert any("expert 3: 0 routed tokens" in line for line in done["layers"][1]["fallbacks"])
    assert [gate["passed"] for gate in done["gates"] if gate["name"] == "coverage"] == [False]
    assert done["coverage"]["uncovered_pairs"] == [[1, 3]]
    assert done["coverage"]["forced"]["min"] == done["coverage"]["forced"]["tokens"] == done["calibration"]["tokens"]
    output = open_folder(tmp_path / "output")
    tensors = ((name, output.tensor(name)) for name in output.tensors)
    assert [name for name, t in tensors if t.is_floating_point() and not torch.isfinite(t.float()).all()] == []


def test_a_floor_for_a_category_that_the_set_lacks_is_refused() -> None:
    with pytest.raises(InputError, match="the calibration set has no such category; it has code/c, math"):
        check_floors(CoverageGate(categories={"cod": 1}), ["math", "code/c"], "r.yaml")
    check_floors(CoverageGate(categories={"code": 1, "code/c": 2}), ["math", "code/c"], "r.yaml")


def routed(counts: list[list[list[int]]], tokens: list[int], names: tuple[str, ...] = ("code/c", "math")) -> Routed:
    array = np.array(counts)
    return Routed(names, np.array(tokens), tuple(range(len(array))), array, np.zeros_like(array), array * 2)


SIDES = [SetName(label=side, name=side, file=f"{side}.yaml") for side in ("before", "after")]


def test_gates() -> None:
    counts = [np.array([[4, 0, 0, 0], [2, 2, 0, 4]]), np.array([[1, 1, 1, 1], [1, 1, 1, 1]])]
    names = ("code/c", "math")
    rule = CoverageGate(min_routed_tokens=2, max_uncovered=0.2, categories={"code": 1, "math": 5}, min_entropy=0.7)
    found = {g.name: g.as_dict() for g in gates(summarise(counts, names, 2, range(2)), counts, names, rule)}
    assert (found["coverage"]["value"], found["coverage"]["passed"]) == (1 / 8, True)
    assert (found["coverage code"]["value"], found["coverage code"]["passed"]) == (3 / 8, False)
    assert (found["coverage math"]["value"], found["coverage math"]["passed"]) == (1.0, False)
    load = np.array([6, 2, 4]) / 12
    assert found["entropy"]["value"] == pytest.approx(-(load * np.log(load)).sum() / np.log(4))
    assert found["entropy"]["passed"]
    assert not gates(summarise(counts, names, 2, range(2)), counts, names, CoverageGate(min_entropy=0.99))[-1].passed


def test_entropy() -> None:
    assert entropy(np.array([5, 5, 5])) == pytest.approx(1)
    assert entropy(np.array([0, 7, 0])) == entropy(np.array([0, 0])) == 0
    assert entropy(np.array([7])) == 1


def test_what_would_help_an_expert() -> None:
    one = routed([[[90, 8, 2, 0], [40, 10, 0, 0]]], [50, 25])
    text = coverage_table(report(one, CoverageGate(), model="m", name="s"))
    row = next(line for line in text.splitlines() if line.startswith("0      2 "))
    assert "code/c 40.0" in row
    assert "math" not in row
    assert "uncovered: layer 0 expert 3" in text


def test_compare() -> None:
    before, after = routed([[[9, 0, 1, 2]] * 2], [10, 10]), routed([[[9, 1, 0, 2]] * 2], [10, 10])
    found = compare_counts(before, after, CoverageGate(), SIDES).as_dict()
    assert (found["won"], found["lost"]) == ([[0, 1]], [[0, 2]])
    even = 2 * 4 / 24  # a share of 2 in 24, of four experts
    assert found["more"] == [
        {"layer": 0, "expert": 1, "before": 0, "after": 2, "before_of_even": 0.0, "after_of_even": even}
    ]
    assert found["fewer"] == [
        {"layer": 0, "expert": 2, "before": 2, "after": 0, "before_of_even": even, "after_of_even": 0.0}
    ]
    (layer,) = found["per_layer"]
    assert layer["before"]["routed_tokens"] == [18, 0, 2, 4]
    assert layer["after"]["shares"] == [18 / 24, 2 / 24, 0.0, 4 / 24]
    assert (layer["moved"], layer["entropy_change"]) == (pytest.approx(2 / 24), pytest.approx(0))


def test_an_expert_is_won_and_lost_by_its_share_at_the_smaller_sets_size() -> None:
    """Against a slow version with fractions: 15 of 1,000 tokens are 1.5 of 100, and fewer than 2."""
    old, new = [40, 3, 1, 56, 100], [400, 15, 20, 565, 1000]
    found = compare_counts(
        routed([[old]], [100], ("x",)), routed([[new]], [1000], ("x",)), CoverageGate(min_routed_tokens=2), SIDES
    ).as_dict()
    covered = [[Fraction(n) * 100 / size >= 2 for n in row] for row, size in ((old, 100), (new, 1000))]
    assert found["won"] == [[0, e] for e in range(5) if covered[1][e] and not covered[0][e]] == [[0, 2]]
    assert found["lost"] == [[0, e] for e in range(5) if covered[0][e] and not covered[1][e]] == [[0, 1]]
    assert [row["expert"] for row in found["fewer"]] == [1]
    shares = [np.array(row) / sum(row) for row in (old, new)]
    (layer,) = found["per_layer"]
    by_hand = [-(p * np.log(p)).sum() / np.log(5) for p in shares]
    assert layer["entropy_change"] == pytest.approx(by_hand[1] - by_hand[0])
    assert layer["moved"] == pytest.approx(np.maximum(shares[1] - shares[0], 0).sum())


def test_what_each_category_covers_equals_a_slow_loop() -> None:
    rng = np.random.default_rng(3)
    names, tokens = [("code/c", "math", "spoken/fr"), ("code/rust", "math")], [[700, 400, 100], [300, 100]]
    tables = [rng.poisson(rng.gamma(0.6, 5, (2, len(one), 8))) for one in names]
    rule = CoverageGate(min_routed_tokens=3)
    sets = [routed(table.tolist(), size, name) for table, size, name in zip(tables, tokens, names, strict=True)]
    change = compare_counts(sets[0], sets[1], rule, SIDES)
    found = change.as_dict()

    def sent(n: int, name: str, layer: int, expert: int) -> Fraction:
        row = names[n].index(name) if name in names[n] else None
        return Fraction(0 if row is None else int(tables[n][layer, row, expert])) * 400 / sum(tokens[n])

    every = sorted({*names[0], *names[1]})
    changes = {name: {"category": name, "won": 0, "lost": 0} for name in every}
    for name, layer, expert in itertools.product(every, range(2), range(8)):
        old, new = (sent(n, name, layer, expert) >= 3 for n in (0, 1))
        changes[name]["won"] += new and not old
        changes[name]["lost"] += old and not new
    assert found["languages"] == sorted(changes.values(), key=lambda row: -row["won"] - row["lost"])
    assert len({row["won"] + row["lost"] for row in found["languages"]}) > 2, "the order is tested"
    for n, key in ((1, "won"), (0, "lost")):
        assert found[key]
        for (layer, expert), most in zip(found[key], found[f"{key}_by"], strict=True):
            tally = {name: int(tables[n][layer, i, expert]) for i, name in enumerate(names[n])}
            assert list(most.values()) == sorted(filter(None, tally.values()), reverse=True)
            assert most.items() <= tally.items()
    rows = [line.split() for line in compare_table(change).splitlines()]
    assert [row[0] for row in rows if row and row[0] in every] == [
        row["category"] for row in found["languages"] if row["won"] or row["lost"]
    ]


def test_sets_are_called_by_name_or_by_as_much_of_their_paths_as_differs(tmp_path: Path) -> None:
    a, b = tmp_path / "a" / "set.yaml", tmp_path / "b" / "set.yaml"
    assert labels(["old", "new"], [a, b]) == ["old", "new"]
    assert labels(["x", "x"], [tmp_path / "old.yaml", tmp_path / "new.yaml"]) == ["old.yaml", "new.yaml"]
    assert labels(["x", "x"], [a, b]) == ["a/set.yaml", "b/set.yaml"]
    assert labels(["x", "x"], [a, a]) == ["set.yaml (1)", "set.yaml (2)"]
    assert labels(["x", "x"], [a, a.parent / ".." / "a" / "set.yaml"]) == ["set.yaml (1)", "set.yaml (2)"]


def test_the_picture_of_two_sets_shows_the_ratio_of_shares_and_marks_what_is_won() -> None:
    found = compare_counts(
        routed([[[4, 0, 4, 8]]], [8], ("x",)), routed([[[16, 8, 0, 8]]], [16], ("x",)), CoverageGate(), SIDES
    )
    assert "moved" in compare_table(found)
    axes = comparison_figure(found, "m").axes[0]
    image = axes.images[0]
    assert image.get_array().tolist() == [[2.0, 2 * HIGH, LOW / 2, 0.5]]
    assert (image.norm.vmin, image.norm.vmax) == (LOW, HIGH), "nothing is scaled to the data"
    assert [marks.get_offsets().tolist() for marks in axes.collections] == [[[1, 0]], [[2, 0]]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give a recipe, or --model with --data"),
        (("--model", "MODEL"), "--data is missing"),
        (("--model", "MODEL", "--data", "nowhere.yaml"), "nowhere.yaml: no such set"),
        (("RECIPE", "--min-routed-tokens", "3"), "holds the gates"),
        (("RECIPE", "--compare", "SET", "SET", "--data", "SET"), "--compare names both sets"),
    ],
)
def test_wrong_questions(words: tuple[str, ...], said: str, finished: Finished, command: Command) -> None:
    given = {"MODEL": finished.source, "RECIPE": finished.recipe, "SET": finished.calibration}
    assert command("coverage", *(given.get(word, word) for word in words)) == 2
    assert said in command.err


@pytest.mark.slow
def test_compare_two_sets(
    finished: Finished, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each side's numbers are those of the set alone; sets of one name are called by their files; a picture."""
    name = yaml.safe_load(finished.calibration.read_text())["name"]
    other = finished.held_out.with_name("held-out-renamed.yaml")
    other.write_text(yaml.safe_dump(yaml.safe_load(finished.held_out.read_text()) | {"name": name}))
    sides = {"before": finished.calibration, "after": other}
    monkeypatch.chdir(tmp_path)
    assert command("coverage", finished.recipe, "--compare", *sides.values(), "--json") == 0
    both = json.loads(command.out)
    assert (tmp_path / "coverage-compare.png").read_bytes().startswith(b"\x89PNG")
    out = compare_table(CoverageComparison.model_validate(both))
    assert f"newly covered by {other.name}:" in out
    for side, path in sides.items():
        assert (both[side]["name"], both[side]["label"]) == (name, path.name)
        assert f"{sum(both[side]['tokens'].values()):,}" in out, "its tokens are said"
    words = ("--model", finished.source, "--data", other, "--max-uncovered", 1, "--no-picture", "--json")
    assert command("coverage", *words) == 0
    other.unlink()
    assert [file.name for file in tmp_path.iterdir()] == ["coverage-compare.png"]
    alone = json.loads(command.out)
    for key in ("min", "median", "tokens"):
        assert alone[key] == both["after"][key]
    rows = [row["after"]["routed_tokens"] for row in both["per_layer"]]
    assert [row["routed_tokens"] for row in alone["per_layer"]] == rows
