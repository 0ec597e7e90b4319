"""Sets compared side by side against separate runs with the same draws: figures, bytes read, resuming, processes."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import Command
from rank_threads import together
from runs import change
from sets import rows_set
from tiny import write_job

import quantizers
from quantizers.output import layer_files
from quantizers.sets import figures
from quantizers.sets.compare import why
from quantizers.system.errors import InputError, QuantizeError

CPU = torch.device("cpu")
TOKENS = 250


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A recipe, and beside it the sets a.yaml and b.yaml, of which other draws hold other texts."""
    recipe = write_job(tmp_path / "job", layers=3, words=12, samples=9, rounding="nearest")
    of_words = [(f"field{n % 2}", " ".join(f"w{n * k % 17} {k}" for k in range(20 + n))) for n in range(12)]
    for name, rows in (("a", of_words[:9]), ("b", of_words[3:])):
        rows_set(tmp_path / "job", rows, name, samples=5, seed=7)
    return recipe


def compared(job: Path, **more: Any) -> dict[str, Any]:
    sets = [job.parent / "a.yaml", job.parent / "b.yaml"]
    return quantizers.compare(job, sets, **{"draws": 2, "tokens": TOKENS} | more).figures


@pytest.mark.slow
def test_figures_are_those_of_separate_runs(job: Path, tmp_path: Path, read: Counter[str]) -> None:
    """KL, top-1, perplexity, router and hidden error of two draws of two sets, from bytes that are read once."""
    found = compared(job)
    once = read["model"]
    for one in found["sets"]:
        assert one["draws"] == 2, "both draws hold the same texts"
        for draw in range(2):
            change(Path(one["file"]), lambda body, draw=draw: body.update(seed=7 + draw))
            change(job, lambda body, one=one: body.update(calibration={"set": one["file"], "tokens": TOKENS}))
            read.clear()
            report = quantizers.run(job, tmp_path / f"{one['name']}-{one['file'][-6]}-{draw}").report
            assert once <= 1.001 * read["model"], "the source is read once for all"
            assert report["kl"]["mean"] == pytest.approx(one["kl"]["per_draw"][draw], abs=1e-9)
            for text, kl in zip(report["per_text"], one["kl_by_text"][draw], strict=True):
                assert text["kl"] == pytest.approx(kl, abs=1e-9)
            for layer, errors in zip(report["hidden_error"], one["hidden_error"], strict=True):
                assert errors["low"] - 1e-9 <= layer <= errors["high"] + 1e-9
            assert report["calibration"]["tokens"] == one["tokens"][draw]
        change(Path(one["file"]), lambda body: body.update(seed=7))
    single = compared(job, draws=1)["sets"][1]
    assert single["top1"]["mean"] == pytest.approx(report_of(job, tmp_path / "last", single, "top1"))
    last = json.loads((tmp_path / "last" / "report.json").read_text())
    assert single["perplexity"]["increase"] == pytest.approx(last["perplexity"]["increase"], abs=1e-9)
    assert single["router"]["mean"] == pytest.approx(sum(last["router"]["agreement"]) / 3)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["attention=bf16", "kv_cache=fp8", "experts.engine=llmcompressor"])
def test_variants_are_those_of_runs(setting: str, job: Path, tmp_path: Path) -> None:
    """The same layers are made of what a run makes otherwise."""
    one = compared(job, draws=1, settings=[setting])["sets"][0]
    change(job, lambda body: body.update(calibration={"set": one["file"], "tokens": TOKENS}))
    made = quantizers.run(job, tmp_path / "output", settings=[setting])
    assert made.kl == pytest.approx(one["kl"]["mean"], abs=1e-9)


def report_of(job: Path, output: Path, one: dict[str, Any], key: str) -> Any:
    change(job, lambda body: body.update(calibration={"set": one["file"], "tokens": TOKENS}))
    return quantizers.run(job, output).report[key]


@pytest.mark.slow
def test_it_resumes_after_any_layer(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the figures of an unbroken call; not with other draws."""
    whole, real, written = compared(job), layer_files.write_json, list[str]()

    def cut(path: Path, content: Any) -> None:
        if len(written) % 2:
            written.append("cut")
            raise QuantizeError("", "cut")
        real(path, content)
        written.append(path.name)

    with monkeypatch.context() as patched:
        patched.setattr(layer_files, "write_json", cut)
        for _ in range(2):
            with pytest.raises(QuantizeError, match="cut"):
                compared(job, work=tmp_path / "work")
    assert written == ["layer-00000.json", "cut", "layer-00001.json", "cut"]
    with pytest.raises(
        QuantizeError, match=r"holds an unfinished run with another calibration .*, or give another --work"
    ):
        compared(job, work=tmp_path / "work", draws=1)
    assert compared(job, work=tmp_path / "work") == whole
    assert not list((tmp_path / "work").iterdir()), "states of finished comparisons stay"


@pytest.mark.slow
def test_several_processes_find_the_same(job: Path) -> None:
    alone = compared(job)
    first, second = together(2, lambda dist: compared(job, dist=dist))
    assert first == alone
    assert second == {}


@pytest.mark.slow
def test_the_first_layers_alone(job: Path) -> None:
    """The others are the source's: nothing is lost there but what comes from before."""
    found = compared(job, layers="first:1", draws=1)
    assert (found["solved_layers"], found["layers"]) == (1, 3)
    assert any("first 1 of 3 layers" in note for note in found["notes"])
    whole, part = compared(job, draws=1)["sets"][0], found["sets"][0]
    assert part["hidden_error"][0] == whole["hidden_error"][0]
    assert 0 < part["kl"]["mean"] < whole["kl"]["mean"]
    for wrong in ("first:0", "first:4", "8", "first:x"):
        with pytest.raises(InputError, match=r"is not first:N with N from 1 to 3"):
            compared(job, layers=wrong)


@pytest.mark.slow
def test_more_draws_are_taken_until_it_is_decided(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as all of them at once, with wider intervals; once it is decided there is no further look."""
    verdicts, real = iter(["no difference", "better", "better", "too few texts"]), figures.decided  # look by look
    monkeypatch.setattr(
        "quantizers.sets.compare.decided",
        lambda pairs: real([pair | {"verdict": next(verdicts)} for pair in pairs]),
    )
    looked, at_once = compared(job, at_most=3), compared(job, draws=3)
    assert (looked["draws"], looked["looks"], looked["error"]) == (3, 2, 0.025)
    assert any("2 of at most 2 looks; each has an error of 0.025" in note for note in looked["notes"])
    for one, other in zip(looked["sets"], at_once["sets"], strict=True):
        assert one["kl_by_text"] == other["kl_by_text"]
        assert one["kl"]["interval"][0] < other["kl"]["interval"][0]
    assert looked["pairs"][0]["routing"] == at_once["pairs"][0]["routing"]
    found = compared(job, at_most=8)
    assert (found["draws"], found["looks"], found["error"]) == (2, 4, 0.0125)


def test_held_out_texts_in_a_set_are_said(job: Path) -> None:
    """Its KL would be too small."""
    held = job.parent / "held-out.yaml"
    (job.parent / "b.yaml").write_text(held.read_text().replace("name: held-out", "name: b"))
    found = compared(job, draws=1, tokens=None)
    assert [note for note in found["notes"] if "9 of its texts are held-out texts too" in note]


@pytest.mark.slow
def test_a_source_that_is_left_out(job: Path) -> None:
    """`why` gives KL of the set with and without a source, as a set without it has."""
    folder = job.parent
    sources = [yaml.safe_load((folder / f"{name}.yaml").read_text())["sources"][0] for name in ("a", "b")]
    body = {"name": "both", "sequence_length": 100, "sources": [one | {"samples": "all"} for one in sources]}
    (folder / "both.yaml").write_text(yaml.safe_dump(body))
    (folder / "only.yaml").write_text(yaml.safe_dump(body | {"name": "only", "sources": body["sources"][:1]}))
    found = why(folder / "both.yaml", job, draws=2).figures
    assert [one["source"] for one in found["sources"]] != []
    (of_b,) = (one for one in found["sources"] if one["source"] == "b.jsonl")
    with_both, with_one = quantizers.compare(job, [folder / "both.yaml", folder / "only.yaml"], draws=1).figures["sets"]
    assert found["set"]["kl"]["mean"] == with_both["kl"]["mean"]
    assert of_b["change"] == pytest.approx(with_one["kl"]["mean"] / with_both["kl"]["mean"] - 1)
    assert of_b["texts"] == [9, 9]
    assert any("every draw is the whole set" in note for note in found["notes"])
    assert any("as many --tokens from both" in note for note in found["notes"]), "without a source there are fewer"


@pytest.mark.parametrize(
    ("sets", "more", "lines"),
    [
        (["a", "broken", "torn"], [], [r"broken.yaml:\d+: sources\[0\].samp", r"torn.yaml:\d+: sources\[0\].samp"]),
        (["a"], [], ["give two sets or more, each with --calibration"]),
        (["a", "a"], [], ["a.yaml: is given twice; give each set once"]),
        (["a", "nowhere"], [], ["nowhere.yaml: no such set; give a file"]),
        (["a", "b"], ["--at-most", "1"], ["--at-most 1: is less than --draws 5; give more, or leave it out"]),
        (["a", "b"], ["--calibration", "experts.bits=3"], ["write --set experts.bits=3 to change the recipe"]),
        (["a", "b"], ["--set", "experts.budget=1MB"], ["a budget chooses other bits for each set"]),
        (["a", "b"], ["--set", "bits"], ["--set bits: is not key=value; write it as --set experts.g"]),
        (
            ["a", "b"],
            ["--set", "verify=null"],
            ["has no verify.perplexity, so no held-out texts; give --data held-out"],
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_line_each(
    sets: list[str], more: list[str], lines: list[str], job: Path, command: Command
) -> None:
    for name in ("broken", "torn"):
        (job.parent / f"{name}.yaml").write_text((job.parent / "a.yaml").read_text().replace(": 5", ": 0"))
    given = [part for name in sets for part in ("--calibration", str(job.parent / f"{name}.yaml"))]
    assert command("compare", job, *given, *more) == 2
    for line, wanted in zip(command.err.splitlines(), lines, strict=True):
        assert re.search(wanted, line)
