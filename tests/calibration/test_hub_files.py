"""The files of a split, compared with those that `datasets` finds in a folder with the same files and card."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantizers.calibration.hub import data_files

DEFAULT = [None]
# For each layout: its card's configs, its files, and the configurations to compare.
LAYOUTS: dict[str, tuple[list[dict[str, Any]] | None, str, list[str | None]]] = {
    "one file of lines": (None, "dolly-15k.jsonl LICENSE .hidden.jsonl", DEFAULT),
    "names, compressed": (None, "train.jsonl.gz validation.jsonl.gz disagreements/d.jsonl.gz", DEFAULT),
    "other words for a split": (None, "my_training.csv dev-1.csv dev-0.csv 2024.eval.csv deviate.csv", DEFAULT),
    "several formats: the commonest": (None, "b.jsonl a.json c.parquet d.parquet e.json f.json", DEFAULT),
    "several formats: as many": (None, "train.jsonl train.parquet train.csv", DEFAULT),
    "lines and lists": (None, "b.jsonl a.json notes.rst", DEFAULT),
    "numbered, any split": (
        None,
        "data/train-00001-of-00002-ab12.parquet data/train-00000-of-00002-cd.parquet data/extra.parquet "
        "data/train_sft-00000-of-00001.parquet data/random-00000-of-00001.parquet",
        DEFAULT,
    ),
    "folders": (None, "x/train/b.jsonl x/train/a/c.jsonl test_set/a.jsonl other/a.jsonl train-z.jsonl", DEFAULT),
    "folders that match twice": (None, "my-train/train/b.jsonl eval/a.jsonl", DEFAULT),
    "hidden folders": (None, ".git/a.jsonl __pycache__/b.jsonl ok/c.jsonl ok/.d.jsonl config.json", DEFAULT),
    "a list, its order kept": (
        [{"config_name": "x", "data_files": ["b/*", "a.jsonl", "c*"]}],
        "a.jsonl b/2.jsonl b/1.jsonl",
        ["x"],
    ),
    "one text": ([{"config_name": "default", "data_files": "*/x.jsonl"}], "a/x.jsonl a/y.jsonl a/b/x.jsonl", DEFAULT),
    "any depth, ?, [..], ./": (
        [{"config_name": "x", "data_files": [{"split": "a", "path": ["d/**/[ab]?.jsonl", "./c.jsonl"]}]}],
        "d/a1.jsonl d/e/f/b2.jsonl d/c3.jsonl d/a10.jsonl c.jsonl",
        [None, "x"],
    ),
    "hidden, but named": (
        [{"config_name": "x", "data_files": [".h/*.jsonl", "__s__/*"]}],
        ".h/a.jsonl __s__/b.jsonl",
        ["x"],
    ),
    "two configurations, one default": (
        [
            {
                "config_name": "SFT",
                "default": True,
                "data_files": [{"split": s, "path": f"SFT/{s}/*.jsonl"} for s in ("code", "math", "science")],
            },
            {"config_name": "RL", "data_files": [{"split": "instruction", "path": "RL/i/*.jsonl"}]},
        ],
        "SFT/code/code_v1.jsonl SFT/code/code_v1.1.jsonl SFT/math/m.jsonl SFT/science/s.jsonl RL/i/r.jsonl train/r.txt",
        [None, "SFT", "RL"],
    ),
    "a dot in the name": (
        [{"config_name": "default", "data_files": [{"split": "cpp_part00", "path": "data/cpp.part_00.jsonl"}]}],
        "data/cpp.part_00.jsonl data/cpp.part_01.jsonl",
        DEFAULT,
    ),
    "folders by configuration": (
        [{"config_name": "full", "data_dir": "full"}, {"config_name": "seed", "data_dir": "./seed/"}],
        "full/train-1.jsonl full/test.jsonl seed/all.jsonl",
        ["full", "seed"],
    ),
    "a folder, and files in it": (
        [{"config_name": "2024", "data_dir": "d", "data_files": "*.csv"}],
        "d/a.csv a.csv d/e/b.csv",
        DEFAULT,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_those_that_datasets_reads(layout: str, tmp_path: Path) -> None:
    import datasets

    configs, files, subsets = LAYOUTS[layout]
    card = {} if configs is None else {"configs": configs}
    listing = ["README.md", ".gitattributes", *files.split()]
    for path in listing:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"---\n{yaml.safe_dump(card)}---\n" if path == "README.md" else "{}\n")
    for subset in subsets:
        builder = datasets.load_dataset_builder(str(tmp_path), subset)
        expected = {
            str(split): [str(Path(file).relative_to(tmp_path)) for file in dict.fromkeys(found)]
            for split, found in builder.config.data_files.items()
        }
        assert {split: data_files(listing[::-1], card, subset, split)[0] for split in expected} == expected
        with pytest.raises(ValueError, match="no split 'none'; it has ") as refusal:
            data_files(listing, card, subset, "none")
        assert set(str(refusal.value).partition("it has ")[2].split(", ")) == set(expected)


CARD = [{"config_name": "a", "data_files": "a/*"}, {"config_name": "b", "data_files": "b.jsonl"}]


@pytest.mark.parametrize(
    ("configs", "files", "subset", "message"),
    [
        ([], "a.jsonl", "x", "no configuration 'x'; it has default"),
        (CARD, "a/1.jsonl", "x", "no configuration 'x'; it has a, b"),
        (CARD, "a/1.jsonl", None, "several configurations and no default; give one as the subset: a, b"),
        (CARD, "a/1.jsonl", "b", "no file b.jsonl, which its card names for the split train"),
        (CARD, "b.jsonl", "a", "no file a/*, as its card has the split train"),
        ([{"data_dir": ["a"]}], "a/1.jsonl", None, "a configuration of its card is wrong (data_dir: Input should be"),
        (CARD, "a/1.arrow a/2.arrow", "a", "no data files in a form that can be read (2 .arrow); try revision: refs/"),
        ([], "set.py 1.tar 2.tar", None, "no data files in a form that can be read (2 .tar, 1 .py); try revision: re"),
        ([], "", None, "no data files in a form that can be read (none); try revision: refs/convert/parquet"),
    ],
)
def test_what_there_is_not_is_named(
    configs: list[dict[str, Any]], files: str, subset: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        data_files(["README.md", *files.split()], {"configs": configs}, subset, "train")


def test_the_hubs_own_conversion_has_a_folder_for_each_split_of_any_name() -> None:
    listing = ["en/easy/0000.parquet", "en/easy/0001.parquet", "en/partial-hard/0000.parquet", "fr/easy/0000.parquet"]

    def read(subset: str | None, split: str, revision: str = "refs/convert/parquet") -> list[str]:
        return data_files([".gitattributes", *listing], {}, subset, split, revision)[0]

    assert [read("en", "easy"), read("en", "hard"), read("fr", "easy")] == [listing[:2], listing[2:3], listing[3:]]
    assert read("en", "hard", revision="a commit of it") == listing[2:3]
    with pytest.raises(ValueError, match="no split 'train'; it has easy, hard"):
        read("en", "train")
    with pytest.raises(ValueError, match="several configurations and no default; give one as the subset: en, fr"):
        read(None, "easy")
