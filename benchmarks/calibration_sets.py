"""What `quantize compare` says of damaged sets, and whether the first layers alone rank sets as the whole model does.

    python benchmarks/calibration_sets.py damaged tiny-minimax-m2-fp8-int4 --tokens 16384 --draws 5
    python benchmarks/calibration_sets.py proxy tiny-minimax-m2-fp8-int4 --tokens 8192 --draws 3
    python benchmarks/calibration_sets.py why tiny-minimax-m2-fp8-int4 --tokens 16384 --draws 5
    python benchmarks/calibration_sets.py draws tiny-minimax-m2-fp8-int4 --tokens 8192 --draws 24 --json

All sets are made of the texts of the set `embedded`. `why` asks which sources of a set help, in which two are planted:
copies of texts that are there anyway, and random letters in their place. `draws` prints the KL of each text with each
draw of two sets, by which tests/sets/test_estimate.py checks intervals.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import quantizers
from quantizers.planning.job import prepare
from quantizers.sets.compare import why
from quantizers.sets.tables import sources_table
from quantizers.system.formatting import text_table
from quantizers.system.shipped import shipped

Rows = Mapping[str, Sequence[dict[str, Any]]]  # by file of the embedded set
SHAPES = {
    "code": {"columns": ["prompt", "answer"], "shape": "prompt-answer"},
    "spoken": {"columns": ["prompt", "answer"], "shape": "prompt-answer"},
    "chat": {"columns": ["messages", "tools"], "shape": "chat"},
}
LENGTH = 256  # tokens of a text, at most


def embedded() -> Rows:
    """The rows of the embedded set."""
    folder = shipped("calibration") / "embedded"
    return {name: list(map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())) for name in SHAPES}


def every(step: int, rows: Rows) -> Rows:
    """One row in so many."""
    return {name: some[::step] for name, some in rows.items()}


def without(category: str, rows: Rows) -> Rows:
    """The rows of all categories but one."""
    return {name: [row for row in some if row["category"] != category] for name, some in rows.items()}


def repeated(rows: Rows) -> Rows:
    """An eighth of the rows, eight times each."""
    return {name: [row for row in some[::8] for _ in range(8)] for name, some in rows.items()}


def noise(rows: Rows, share: float = 1.0) -> Rows:
    """Prompts and answers of random letters instead of those of code and spoken, or of a share of them; no chat."""
    letters, chance = (
        [chr(n) for n in (*range(33, 127), *range(0x400, 0x450), *range(0x4E00, 0x4F00))],
        random.Random(0),
    )

    def text() -> str:
        return "".join(chance.choices(letters, k=400))

    def perhaps(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"prompt": text(), "answer": text()} if chance.random() < share else row

    spoiled = {name: [perhaps(row) for row in rows[name]] for name in ("code", "spoken")}
    return spoiled | ({} if share == 1 else {"chat": rows["chat"]})


def only(*names: str) -> Callable[[Rows], Rows]:
    """Some of the files."""
    return lambda rows: {name: rows[name] for name in names}


DAMAGED: dict[str, Callable[[Rows], Rows]] = {
    "whole": lambda rows: rows,
    "without Python": lambda rows: without("code/python", rows),
    "without spoken languages": only("code", "chat"),
    "an eighth, eight times": repeated,
    "random letters": noise,
    "a tenth": lambda rows: every(10, rows),
}
OTHERS: dict[str, Callable[[Rows], Rows]] = {
    "code alone": only("code"),
    "spoken alone": only("spoken"),
    "chat alone": only("chat"),
    "without code": only("spoken", "chat"),
    "half": lambda rows: every(2, rows),
    "a twentieth": lambda rows: every(20, rows),
    "half of it random letters": lambda rows: noise(rows, 0.5),
    "texts of 32 tokens": lambda rows: rows,
}
LENGTHS = {"texts of 32 tokens": 32}


def planted(rows: Rows) -> Rows:
    """The embedded set, copies of a third of its code, and for each prompt and answer of it four of random letters."""
    letters = noise(rows)
    return dict(rows) | {"copies": rows["code"][::3], "letters": [*letters["code"], *letters["spoken"]] * 4}


def write(folder: Path, name: str, rows: Rows) -> Path:
    """A set's YAML, and its files beside it."""
    place, sources = folder / name.replace(" ", "-").replace(",", ""), list[dict[str, Any]]()
    place.mkdir()
    for kind, some in rows.items():
        (place / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        column = {"category": {"column": "category"}, "samples": "all"}
        sources.append({"dataset": f"{kind}.jsonl", **SHAPES.get(kind, SHAPES["code"]), **column})
    body = {"name": name, "sequence_length": LENGTHS.get(name, LENGTH), "seed": 42, "sources": sources}
    (place / "set.yaml").write_text(json.dumps(body, indent=1))  # which is YAML
    return place / "set.yaml"


def held_out(folder: Path) -> Path:
    """The held-out set without its long texts, which no figure here is of."""
    body = yaml.safe_load((shipped("calibration") / "held-out.yaml").read_text())
    body["sources"] = [source for source in body["sources"] if "long" not in source["dataset"]]
    for source in body["sources"]:
        source["dataset"] = str(shipped("calibration") / source["dataset"])
    (folder / "held-out.yaml").write_text(yaml.safe_dump(body))
    return folder / "held-out.yaml"


def ranks(values: Sequence[float]) -> np.ndarray:
    """(N,) the place of each among all."""
    return np.argsort(np.argsort(values)).astype(float)


def damaged_table(comparison: dict[str, Any]) -> str:
    """KL of each set, and what is said of each against the first."""
    against = {pair["other"]: pair for pair in comparison["pairs"] if pair["first"] == comparison["sets"][0]["label"]}
    rows = []
    for figures in comparison["sets"]:
        low, high = figures["kl"]["interval"]
        kl = f"{figures['kl']['mean']:.5f} ({low:.5f} to {high:.5f})"
        label = figures["label"]
        rows.append((label, kl, against[label]["words"] if label in against else ""))
    return text_table(("set", "KL", "verdict"), rows)


def main() -> None:
    """Parse, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("damaged", "proxy", "why", "draws"))
    parser.add_argument("recipe")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    wanted = DAMAGED | (OTHERS if given.what == "proxy" else {})
    if given.what == "draws":
        wanted = {name: DAMAGED[name] for name in ("whole", "without spoken languages")}
    with tempfile.TemporaryDirectory() as name:
        folder, rows = Path(name), embedded()
        common = {"draws": given.draws, "tokens": given.tokens, "data": held_out(folder), "device": given.device}
        if given.what == "why":
            print(sources_table(why(write(folder, "planted", planted(rows)), given.recipe, **common).figures))
            return
        files = [write(folder, label, make(rows)) for label, make in wanted.items()]
        comparison = quantizers.compare(given.recipe, files, **common).figures
        if given.what != "proxy":
            if given.json:
                tokens = [text["tokens"] for text in comparison["texts"]]
                kl = {figures["label"]: figures["kl_by_text"] for figures in comparison["sets"]}
                print(json.dumps({"tokens": tokens, "kl": kl}))
            else:
                print(damaged_table(comparison))
            return
        columns = {"whole": [figures["kl"]["mean"] for figures in comparison["sets"]]}
        for first in range(1, prepare(given.recipe).facts.num_layers):
            first_layers = quantizers.compare(given.recipe, files, layers=f"first:{first}", **common).figures
            columns[f"first:{first}"] = [figures["kl"]["mean"] for figures in first_layers["sets"]]
        labels = [figures["label"] for figures in comparison["sets"]]
        shown = [(label, *(f"{column[n]:.5f}" for column in columns.values())) for n, label in enumerate(labels)]
        whole = ranks(columns["whole"])
        correlated = [f"{np.corrcoef(whole, ranks(column))[0, 1]:.3f}" for column in columns.values()]
        print(text_table(("set", *columns), [*shown, ("rank correlation", *correlated)]))


if __name__ == "__main__":
    main()
