"""Damage of every kind to a finished folder, and to a shard before the proof: `quantize verify` names each, exit 3."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import quantize
from conftest import Finished
from safetensors.torch import load_file, save_file

from quantizers.checkpoint.reader import open_folder, side_files
from quantizers.checkpoint.safetensors_header import read_header
from quantizers.output.manifest import seal_of, write_record
from quantizers.pipeline import pipeline
from quantizers.pipeline.manifest_check import check_manifest
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.pipeline.report_files import read_front_matter
from quantizers.planning.job import prepare
from quantizers.system.errors import QuantizeError

CPU = torch.device("cpu")
SHARD = "model-00002-of-00005.safetensors"
INDEX = "model.safetensors.index.json"
NORMS = [f"model.layers.{n}.input_layernorm.weight" for n in (0, 1)]
PACKED = "model.layers.1.block_sparse_moe.experts.3.w2.weight_packed"
DAMAGED = f"{PACKED}: changed since the run wrote it"
Damage = Callable[[Path], object]
pytestmark = pytest.mark.altered_report


def damage_bytes(file: Path) -> None:
    """Flip a bit in each of 64 bytes of an expert: by so little that its matrix is still close to the source's."""
    start = read_header(file)[PACKED].start
    with file.open("rb+") as stream:
        stream.seek(start)
        raw = stream.read(64)
        stream.seek(start)
        stream.write(bytes(byte ^ 1 for byte in raw))


def in_json(name: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    def make(folder: Path) -> None:
        data = json.loads((folder / name).read_text())
        change(data)
        (folder / name).write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")

    return make


def text(name: str, before: str, after: str) -> Damage:
    def make(folder: Path) -> None:
        found = (folder / name).read_text()
        assert before in found
        (folder / name).write_text(found.replace(before, after, 1))

    return make


def swap(entries: dict[str, Any]) -> None:
    one, other = NORMS
    entries[one], entries[other] = entries[other], entries[one]


def other_header(folder: Path) -> None:
    save_file(load_file(folder / SHARD), folder / SHARD, metadata={"format": "np"})


def other_theta(config: dict[str, Any]) -> None:
    config["rope_theta"] *= 10
    config["rms_norm_eps"] = 1e-3


def a_lie(report: dict[str, Any]) -> None:
    report["kl"]["mean"] /= 10


def resealed(change: Callable[[dict[str, Any]], object]) -> Damage:
    """A change by somebody who computes the seal anew."""

    def make(folder: Path) -> None:
        report = json.loads((folder / "report.json").read_text())
        change(report)
        write_record(folder, report)

    return make


def in_folder(name: str) -> Damage:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir()
        (folder / name).write_text("{{ messages }}")

    return make


def front(change: Callable[[dict[str, Any]], object]) -> Damage:
    def make(folder: Path) -> None:
        _, _, body = (folder / "README.md").read_text().split("---\n", 2)
        values = read_front_matter((folder / "README.md").read_text())
        change(values)
        (folder / "README.md").write_text(f"---\n{yaml.safe_dump(values)}---\n{body}")

    return make


# What is done, and what `quantize verify` says of it.
DAMAGE: dict[str, tuple[Damage, list[str]]] = {
    "an emptied tokenizer": (
        lambda f: (f / "tokenizer.json").write_text(""),
        ["tokenizer.json: differs from the source's"],
    ),
    "a missing tokenizer_config": (
        lambda f: (f / "tokenizer_config.json").unlink(),
        ["tokenizer_config.json: missing; the source has it"],
    ),
    "another chat template": (
        lambda f: (f / "chat_template.jinja").write_text("{{ messages }}"),
        ["chat_template.jinja: differs from the source's"],
    ),
    "another generation_config": (
        in_json("generation_config.json", lambda c: c.update(temperature=2.0)),
        ["generation_config.json: differs from the source's"],
    ),
    "code that comes from nowhere": (
        lambda f: (f / "modeling_tiny.py").write_text("print('hello')"),
        ["modeling_tiny.py: not in the source, but loaders read it; remove it"],
    ),
    "another rope_theta and rms_norm_eps": (
        in_json("config.json", other_theta),
        ["config.json: rope_theta is 100000, should be 10000", "config.json: rms_norm_eps is 0.001, should be 1e-06"],
    ),
    "a key more in config.json": (
        in_json("config.json", lambda c: c.update(auto_map={"AutoConfig": "x.Y"})),
        ['config.json: auto_map is {"AutoConfig": "x.Y"}, should be missing'],
    ),
    "a key less in config.json": (
        in_json("config.json", lambda c: c.pop("use_qk_norm")),
        ["config.json: use_qk_norm is missing, should be true"],
    ),
    "a group in quantization_config": (
        in_json("config.json", lambda c: c["quantization_config"].update(quantization_status="frozen")),
        ['config.json: quantization_config.quantization_status is "frozen", should be "compressed"'],
    ),
    "a shard": (lambda f: damage_bytes(f / SHARD), [DAMAGED]),
    "a shard's header": (other_header, [f"{SHARD}: changed since the run wrote it, only in its header"]),
    "two entries of the index": (
        in_json(INDEX, lambda i: swap(i["weight_map"])),
        [f"{INDEX}: {NORMS[0]} should be in model-00002", f"{INDEX}: changed since the run wrote it"],
    ),
    "the index's size": (
        in_json(INDEX, lambda i: i["metadata"].update(total_size=1)),
        [f"{INDEX}: changed since the run wrote it"],
    ),
    "a figure in report.json": (in_json("report.json", a_lie), ["report.json: is not as it was sealed"]),
    "report.json sealed anew": (
        resealed(lambda r: r["sha256"].update({"tokenizer.json": "0" * 64})),
        ["tokenizer.json: changed since the run wrote it"],
    ),
    "no report.json": (lambda f: (f / "report.json").unlink(), ["report.json: is gone, though report.html is there"]),
    "half of report.json": (
        lambda f: (f / "report.json").write_text((f / "report.json").read_text()[:500]),
        ["report.json: cannot be read"],
    ),
    "recipe.yaml": (text("recipe.yaml", "bits: 4", "bits: 8"), ["recipe.yaml: changed since the run wrote it"]),
    "the calibration set": (
        text("calibration.yaml", "seed: 1", "seed: 2"),
        ["calibration.yaml: changed since the run wrote it"],
    ),
    "the card's front matter": (
        front(lambda values: values.update(base_model="somebody/else", library_name="other")),
        [
            'README.md: front matter: base_model is "somebody/else", the run wrote nothing',
            'README.md: front matter: library_name is "other", the run wrote "transformers"',
        ],
    ),
    "a figure that the Hub shows": (
        front(lambda values: values["model-index"][0]["results"][0]["metrics"][1].update(value="0.0001")),
        ["README.md: front matter: kl_divergence 0.0"],
    ),
    "a tag of the card less": (
        front(lambda values: values["tags"].remove("int4")),
        ["README.md: front matter: tags is"],
    ),
    "the card": (lambda f: (f / "README.md").unlink(), ["README.md: named in report.json, not in the folder"]),
    "a picture": (
        lambda f: shutil.copy(f / "coverage.png", f / "calibration.png"),
        ["calibration.png: changed since the run wrote it"],
    ),
    "weights beside the index": (
        lambda f: shutil.copy(f / SHARD, f / "model.safetensors"),
        ["model.safetensors: weights file not in the index"],
    ),
    "weights in another format": (
        lambda f: (f / "pytorch_model.bin").write_bytes(b"x"),
        ["pytorch_model.bin: weights file not in the index"],
    ),
    "a template in a folder": (
        in_folder("additional_chat_templates/tool_use.jinja"),
        ["additional_chat_templates/tool_use.jinja: in a subfolder that loaders may read; remove it"],
    ),
    "merges of a tokenizer": (
        lambda f: (f / "merges.txt").write_text("a b"),
        ["merges.txt: not in the source, but loaders read it; remove it"],
    ),
    "a shard's header that cannot be read": (
        lambda f: (f / SHARD).write_bytes(b"\xff" * 8 + (f / SHARD).read_bytes()[8:]),
        [f"{SHARD}: changed since the run wrote it (", f"{SHARD}: the header is cut off or corrupt"],
    ),
    "a digest in report.json": (
        in_json("report.json", lambda r: r["audit"]["digests"].update({SHARD: None})),
        ["report.json: is not as it was sealed"],
    ),
    "brackets for report.json": (
        lambda f: (f / "report.json").write_text("[" * 200_000),
        ["report.json: cannot be read (RecursionError)"],
    ),
    "report.json sealed anew without a record": (
        resealed(lambda r: r.update(sha256=None, card=None)),
        ["report.json: holds no record of the files beside it"],
    ),
    "report.json that leads elsewhere": (
        resealed(lambda r: r["sha256"].update({"../../etc/hosts": "0" * 64})),
        ["report.json: records '../../etc/hosts', which is no file beside it"],
    ),
    "report.json without its seal": (
        in_json("report.json", lambda r: r.pop("seal")),
        ["report.json: is not as it was sealed"],
    ),
    "a date in the card's front matter": (
        text("README.md", "library_name: transformers", "library_name: 2024-01-01"),
        ['README.md: front matter: library_name is "2024-01-01", the run wrote "transformers"'],
    ),
    "a day that is none in the card's front matter": (
        text("README.md", "library_name: transformers", "library_name: 2024-13-45"),
        ['README.md: front matter: library_name is "2024-13-45", the run wrote "transformers"'],
    ),
    "brackets in the card's front matter": (
        text("README.md", "tags:\n", "more: " + "[" * 5000 + "\ntags:\n"),
        ["README.md: front matter: tags is nothing, the run wrote"],
    ),
    "the page": (text("report.html", "Gates", "Goats"), ["report.html: changed since the run wrote it"]),
}


@pytest.fixture
def copied(finished: Finished, tmp_path: Path) -> Path:
    shutil.copytree(finished.folder, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("name", DAMAGE)
def test_verify_notices(
    name: str, copied: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, `verify` and `publish` read tensors and quantization_config only, and exited with 0."""
    damage, said = DAMAGE[name]
    damage(copied)
    assert quantize(monkeypatch, "verify", copied, "--source", finished.source) == 3
    out = capsys.readouterr().out
    assert [words for words in said if words not in out] == [], out
    assert str(copied) not in out


def test_every_side_file_is_compared(
    copied: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [file.name for file in side_files(finished.source)]
    assert len(names) >= 4
    for name in names:
        with (copied / name).open("ab") as stream:
            stream.write(b" ")
    assert quantize(monkeypatch, "verify", copied, "--source", finished.source) == 3
    out = capsys.readouterr().out
    assert [name for name in names if f"{name}: differs from the source's" not in out] == []


def test_words_of_the_card_and_more_tags_are_no_damage(
    copied: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    front(lambda values: (values["tags"].append("mine"), values.update(thumbnail="x.png")))(copied)
    text("README.md", "## Limits", "Thanks to my cat.\n\n## Limits")(copied)
    assert quantize(monkeypatch, "verify", copied, "--source", finished.source) == 0
    out = capsys.readouterr().out
    assert "no differences" in out
    assert "README.md: was edited since the run wrote it" in out


def test_a_card_with_other_line_ends_is_an_edited_one(copied: Path) -> None:
    card = copied / "README.md"
    card.write_bytes(card.read_bytes().replace(b"\n", b"\r\n"))
    found = check_manifest(copied)
    assert (found.differences, found.notes) == ((), ("README.md: was edited since the run wrote it",))


def test_another_tools_report_is_not_accused(copied: Path) -> None:
    (copied / "report.json").write_text('{"a": 1}')
    found = check_manifest(copied)
    assert found.differences == ()
    assert "not written by this program" in found.notes[0]


@pytest.mark.parametrize("damage", [lambda f: f.write_text(f.read_text()[:500]), lambda f: f.unlink()])
def test_without_source_a_damaged_report_is_named_too(
    damage: Callable[[Path], object], copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it would say of the source cannot be known then; that it is damaged is a difference all the same."""
    damage(copied / "report.json")
    assert quantize(monkeypatch, "verify", copied) == 3
    assert re.search(r"^quantize: report\.json: (cannot be read|is gone)", capsys.readouterr().err, re.M)


def test_the_page_may_be_written_again(copied: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    text("report.html", "Gates", "Goats")(copied)
    monkeypatch.chdir(copied.parent)
    assert quantize(monkeypatch, "report", copied, "--output", "copy/report.html") == 0
    assert quantize(monkeypatch, "verify", copied, "--source", finished.source) == 0
    assert (copied / "report.html").read_bytes() == (finished.folder / "report.html").read_bytes()


def test_a_shard_damaged_before_the_proof_is_not_certified(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: 0 differences, and report.json held two contradicting hashes."""
    output = tmp_path / "output"
    with pytest.MonkeyPatch.context() as patched:
        real = pipeline.assemble

        def damaged(*arguments: Any) -> None:
            real(*arguments)
            damage_bytes(output / ".quantize" / "output" / SHARD)

        patched.setattr(pipeline, "assemble", damaged)
        assert quantize(patched, "run", finished.recipe, "--output", output, "--device", "cpu") == 1
    assert DAMAGED in capsys.readouterr().err
    assert not (output / "config.json").exists()
    assert quantize(monkeypatch, "run", finished.recipe, "--output", output, "--device", "cpu") == 0
    report = json.loads((output / "report.json").read_text())
    whole = finished.report["audit"]["digests"][SHARD]
    assert report["audit"]["digests"][SHARD] == whole, "not what was written"
    assert all(layer.keys().isdisjoint({"sha256", "digest"}) for layer in report["layers"]), "a hash in two places"


def test_a_shard_that_cannot_be_opened_stops_the_proof_and_is_made_again(finished: Finished, tmp_path: Path) -> None:
    """Before, the message was the reader's: «download this shard again»."""
    output = tmp_path / "output"
    shard = output / ".quantize" / "output" / SHARD
    with pytest.MonkeyPatch.context() as patched:
        real = pipeline.assemble

        def damaged(*arguments: Any) -> None:
            real(*arguments)
            shard.write_bytes(b"\xff" * 8 + shard.read_bytes()[8:])

        patched.setattr(pipeline, "assemble", damaged)
        with pytest.raises(QuantizeError, match=rf"{SHARD}: changed since the run wrote it \(.*\); check the disk"):
            run(prepare(str(finished.recipe)), Options(output, CPU))
    assert not (output / "config.json").exists()
    assert run(prepare(str(finished.recipe)), Options(output, CPU))["audit"]["differences"] == []


def test_the_seal_is_over_all_the_rest(finished: Finished) -> None:
    report = json.loads((finished.folder / "report.json").read_text())
    assert report["seal"] == seal_of(report)
    for key in report.keys() - {"seal"}:
        assert seal_of({k: v for k, v in report.items() if k != key}) != report["seal"], key
    assert open_folder(finished.folder).config["rope_theta"] == 10000
