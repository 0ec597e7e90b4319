"""Damage of every kind to a finished folder, and to a shard before the proof: `quantize verify` names each, exit 3."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from command_schema import VerifyReport
from commands import Command
from conftest import Finished
from edited import edit
from safetensors.torch import load_file, save_file

from quantizers.checkpoint.reader import side_files
from quantizers.checkpoint.safetensors_header import read_header
from quantizers.output.manifest import seal_of, write_record
from quantizers.pipeline.report_files import check_manifest, read_front_matter

CPU = torch.device("cpu")
SHARD = "model-00002-of-00005.safetensors"
INDEX = "model.safetensors.index.json"
NORMS = [f"model.layers.{n}.input_layernorm.weight" for n in (0, 1)]
PACKED = "model.layers.1.block_sparse_moe.experts.3.w2.weight_packed"
ROUTER = "model.layers.1.block_sparse_moe.gate.weight"
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


# What is done to files, all of it to one folder, and what `quantize verify` says of it.
FILES: dict[str, tuple[Damage, list[str]]] = {
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
    "another side file": (
        lambda f: (f / "PROVENANCE.md").write_text("mine"),
        ["PROVENANCE.md: differs from the source's"],
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
    "the index's size": (
        in_json(INDEX, lambda i: i["metadata"].update(total_size=1)),
        [f"{INDEX}: changed since the run wrote it"],
    ),
    "recipe.yaml": (text("recipe.yaml", "bits: 4", "bits: 8"), ["recipe.yaml: changed since the run wrote it"]),
    "the calibration set": (
        text("calibration.yaml", "seed: 1", "seed: 2"),
        ["calibration.yaml: changed since the run wrote it"],
    ),
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
        ["additional_chat_templates/tool_use.jinja: not in the source, but loaders read it; remove it"],
    ),
    "merges of a tokenizer": (
        lambda f: (f / "merges.txt").write_text("a b"),
        ["merges.txt: not in the source, but loaders read it; remove it"],
    ),
    "the page": (text("report.html", "Gates", "Goats"), ["report.html: changed since the run wrote it"]),
}
# What is done to the record of a run and to the card.
RECORD: dict[str, tuple[Damage, list[str]]] = {
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
        ["report.json: records '../../etc/hosts', which is no file of this folder"],
    ),
    "report.json without its seal": (
        in_json("report.json", lambda r: r.pop("seal")),
        ["report.json: is not as it was sealed"],
    ),
    "a day that is none in the card's front matter": (
        text("README.md", "library_name: transformers", "library_name: 2024-13-45"),
        ['README.md: front matter: library_name is "2024-13-45", the run wrote "transformers"'],
    ),
    "brackets in the card's front matter": (
        text("README.md", "tags:\n", "more: " + "[" * 5000 + "\ntags:\n"),
        ["README.md: front matter: tags is nothing, the run wrote"],
    ),
}


def test_verify_notices_every_damaged_file(copied: Path, finished: Finished, command: Command) -> None:
    """Each is named, whatever else is damaged."""
    names = {file.name for file in side_files(finished.source)}
    assert names == {
        "PROVENANCE.md",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    for damage, _ in FILES.values():
        damage(copied)
    assert command("verify", copied, "--source", finished.source) == 3
    assert {name: said for name, (_, said) in FILES.items() if any(words not in command.out for words in said)} == {}
    assert str(copied) not in command.out


@pytest.mark.parametrize("name", RECORD)
def test_a_damaged_record_is_noticed(name: str, copied: Path) -> None:
    damage, said = RECORD[name]
    damage(copied)
    found = "\n".join(check_manifest(copied).differences)
    assert [words for words in said if words not in found] == [], found


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            in_json(INDEX, lambda i: swap(i["weight_map"])),
            [f"{INDEX}: {NORMS[0]} should be in model-00002", f"{INDEX}: changed since the run wrote it"],
        ),
        (other_header, [f"{SHARD}: changed since the run wrote it, only in its header"]),
        (
            lambda f: (f / SHARD).write_bytes(b"\xff" * 8 + (f / SHARD).read_bytes()[8:]),
            [f"{SHARD}: changed since the run wrote it (", f"{SHARD}: the header is cut off or corrupt"],
        ),
    ],
)
def test_a_damaged_header_or_index_is_noticed(
    damage: Damage, said: list[str], copied: Path, finished: Finished, command: Command
) -> None:
    damage(copied)
    assert command("verify", copied, "--source", finished.source) == 3
    assert [words for words in said if words not in command.out] == [], command.out


def test_words_of_the_card_and_more_tags_are_no_damage(copied: Path, finished: Finished, command: Command) -> None:
    front(lambda values: (values["tags"].append("mine"), values.update(thumbnail="x.png")))(copied)
    text("README.md", "## Limits", "Thanks to my cat.\n\n## Limits")(copied)
    assert command("verify", copied, "--source", finished.source) == 0
    assert "no differences" in command.out
    assert "README.md: was edited since the run wrote it" in command.out


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
    damage: Callable[[Path], object], copied: Path, command: Command
) -> None:
    """What it would say of the source cannot be known then; that it is damaged is a difference all the same."""
    damage(copied / "report.json")
    assert command("verify", copied) == 3
    assert re.search(r"^quantize: report\.json: (cannot be read|is gone)", command.err, re.M)


def test_the_page_may_be_written_again(
    copied: Path, finished: Finished, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    text("report.html", "Gates", "Goats")(copied)
    monkeypatch.chdir(copied.parent)
    assert command("report", copied, "--output", "copy/report.html") == 0
    assert command("verify", copied, "--source", finished.source) == 0
    assert (copied / "report.html").read_bytes() == (finished.folder / "report.html").read_bytes()


def test_the_seal_is_over_all_the_rest(finished: Finished) -> None:
    report = json.loads((finished.folder / "report.json").read_text())
    assert report["seal"] == seal_of(report)
    for key in report.keys() - {"seal"}:
        assert seal_of({k: v for k, v in report.items() if k != key}) != report["seal"], key
    assert all(layer.keys().isdisjoint({"sha256", "digest"}) for layer in report["layers"]), "a hash in two places"


# Mistakes in what servers read: the consequence is named -------------------------------------------------------------

Section = dict[str, Any]
PUBLISHED = r"re:.*block_sparse_moe\.experts\.\d+\.(w1|w2|w3)$"
ATTENTION, EXPERTS = "attention_fp8_block", "routed_experts"


def section(change: Callable[[Section], object]) -> Callable[[Path], None]:
    """A change of config.json's quantization_config."""

    def make(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config["quantization_config"])
        (folder / "config.json").write_text(json.dumps(config))

    return make


def targets(**groups: list[str]) -> Callable[[Path], None]:
    return section(lambda s: [s["config_groups"][name].update(targets=t) for name, t in groups.items()])


def scale_inv(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    edit(folder, name, lambda t: t.__setitem__(name + "_inv", t.pop(name)))


MISTAKES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "published names only": (
        targets(routed_experts=[PUBLISHED]),
        ["vLLM", "taken as not quantized", "loading fails on a missing parameter"],
    ),
    "scale not renamed": (scale_inv, ["must be weight_scale", "load the numbers unscaled"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_exits_3_and_names_its_consequence(
    name: str, copied: Path, finished: Finished, command: Command
) -> None:
    make, said = MISTAKES[name]
    make(copied)
    assert command("verify", copied, "--source", finished.source) == 3
    assert [words for words in said if words not in command.out] == [], command.out


def test_a_good_output_passes_and_shows_its_schemes(finished: Finished, command: Command) -> None:
    assert command("verify", finished.folder, "--source", finished.source) == 0
    assert "no differences" in command.out
    assert "every engine reads it as it is stored" in command.out
    assert command("verify", finished.folder, "--source", finished.source, "--json") == 0
    found = json.loads(command.out)
    assert VerifyReport.model_validate(found).as_dict() == found
    assert found["consumers"]["findings"] == []
    assert found["consumers"] == finished.report["consumers"]


def test_a_config_that_is_no_config_is_a_difference(copied: Path, finished: Finished, command: Command) -> None:
    (copied / "config.json").write_text("[]")
    assert command("verify", copied, "--source", finished.source) == 3
    assert "must be a JSON object" in command.out


def test_another_models_folder_as_the_source_is_refused(finished: Finished, tmp_path: Path, command: Command) -> None:
    """Whatever differs; but with its own source, another size in config.json or of a tensor is damage."""
    for number, sizes in enumerate(({"num_local_experts": 8}, {"intermediate_size": 128}, {"num_hidden_layers": 3})):
        other = tiny.make(tmp_path / str(number), **sizes)
        assert command("verify", finished.folder, "--source", other) == 2
        assert f"is another model than {other}; give its own source" in command.err


@pytest.mark.parametrize("name", [ROUTER, PACKED])
def test_a_tensor_of_another_shape_is_a_difference(
    name: str, copied: Path, finished: Finished, command: Command
) -> None:
    edit(copied, name, lambda tensors: tensors.update({name: tensors[name][: len(tensors[name]) // 2].clone()}))
    (copied / "report.json").unlink()
    assert command("verify", copied, "--source", finished.source) == 3
    assert f"{name.removesuffix('_packed').removesuffix('.weight')}" in command.out
