"""A frozen set gives the samples of the set that it was made from, without the Hub."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from commands import Command
from hub_stand_in import HubStandIn

from quantizers.calibration.load_set import load_set

SET = """\
name: mixed
sequence_length: 64
seed: 7
languages: {programming: [Rust, C++, Go]}
sources:
  - {dataset: org/texts, streaming: true, columns: [text], shape: text, samples: 5, category: x}
  - {dataset: org/texts, columns: [text], shape: text, samples: 4, category: "code/{programming_language}",
     prompt: "In {programming_language}:"}
  - {dataset: ./own.jsonl, columns: [text], shape: text, samples: all, category: {column: kind}}
  - {dataset: ./own.jsonl, columns: [text], shape: text, samples: 3, category: y, sequence_length: 80}
  - {dataset: org/tasks, subset: all, split: test, columns: [name], shape: code-contests, samples: 30, category: code}
  - {dataset: org/texts, columns: [text], shape: text, samples: 4, category: "code/{programming_language}"}
"""


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.slow
def test_a_frozen_set_gives_the_same_samples_without_the_hub(
    tmp_path: Path, tokenizer: str, hub: HubStandIn, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = [{"text": f"नमस्ते \u2028{n} \n" if n % 4 else "", "unused": n} for n in range(40)]
    solutions = {"language": [2, 3], "solution": ["int main() {}", "print(1)"]}
    tasks = [{"name": f"{n}_A", "description": f"Task {n}", "solutions": solutions} for n in range(9)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(tasks), stream := io.BytesIO())
    card = b"---\nlicense: cc-by-nc-4.0\n---\n"
    hub.datasets = {
        "org/texts": {"README.md": card, "train-0.jsonl": lines(texts[:20]), "train-1.jsonl": lines(texts[20:])},
        "org/tasks": {"all/test/0.parquet": stream.getvalue()},
    }
    (tmp_path / "own.jsonl").write_bytes(lines([{"text": f"own {n}", "kind": f"k{n}"} for n in range(6)]))
    path, frozen = tmp_path / "mixed.yaml", tmp_path / "frozen"
    path.write_text(SET)
    before = load_set(path, tokenizer)
    assert command("calibration", "freeze", path, frozen, "--tokenizer", tokenizer, "--json") == 0
    said = json.loads(command.out)
    assert (said["digest"], said["rows"]) == (before.digest, len(before.samples))
    assert said["non_commercial"] == ["org/texts"] * 3

    hub.asked.clear()
    again = load_set(frozen / "mixed.yaml", tokenizer)
    assert again.digest == before.digest
    assert [sample.text for sample in again.samples] == [sample.text for sample in before.samples]
    assert [sample.languages for sample in again.samples] == [sample.languages for sample in before.samples]
    assert not hub.asked
    assert {file.name for file in (frozen / "data").iterdir()} == {
        "01-texts.jsonl", "02-texts.jsonl", "03-own.jsonl", "04-own.jsonl", "05-tasks.jsonl", "06-texts.jsonl"
    }  # fmt: skip
    assert b"unused" not in (frozen / "data" / "01-texts.jsonl").read_bytes()
    licences = (frozen / "LICENCES.md").read_text()
    assert f"| {hub.commit('org/texts')} | cc-by-nc-4.0, **not for commercial use** |" in licences
    assert f"| {hub.commit('org/tasks')} | none named |" in licences

    path.write_text(SET.replace("seed: 7", "seed: 8"))
    assert command("calibration", "freeze", path, frozen, "--tokenizer", tokenizer) == 2
    assert command.err == f"quantize: {frozen}/mixed.yaml: exists; give another name or folder\n"
    path.write_text(SET.replace("org/tasks,", "org/gone, required: false,"))
    assert command("calibration", "freeze", path, tmp_path / "new", "--tokenizer", tokenizer) == 2
    assert command.err == f"quantize: {path}: org/gone could not be read; remove it to freeze the others\n"
    assert not (tmp_path / "new").exists()
