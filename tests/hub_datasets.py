"""Small datasets in the shapes that a calibration set expects of the Hub, made from the set itself."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pyarrow
import pyarrow.parquet

from quantizers.calibration_set import CalibrationSet, DataSource

SPARE = 14  # rows more than a set asks for
PADDING = 100_000  # characters in each row of the one dataset that is too large to be read whole

Row = dict[str, Any]


def hub_datasets(calibration: CalibrationSet, large: str) -> dict[str, dict[str, bytes]]:
    """Repositories for every Hub source of a set: files by path, by id.

    Streamed datasets lie in two JSON lines files, others in one Parquet file; a README names subsets
    and splits, as it does on the Hub.

    Args:
        large: a streamed dataset that gets files of many megabytes, so that reading it whole shows.
    """
    repositories: dict[str, dict[str, bytes]] = {}
    configurations: dict[str, dict[str, dict[str, str]]] = {}
    for source in calibration.sources:
        assert isinstance(source.samples, int)
        files = repositories.setdefault(source.dataset, {})
        subset = source.subset or "default"
        folder = f"{subset}/{source.split}"
        rows = list(_rows(source, source.samples + SPARE, PADDING if source.dataset == large else 0))
        if source.streaming:
            splits = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
            if source.dataset == large:
                splits = [splits[0] * 16, splits[1] * 16]
            for number, part in enumerate(splits):
                files[f"{folder}/part-{number}.jsonl"] = "".join(json.dumps(row) + "\n" for row in part).encode()
        else:
            buffer = io.BytesIO()
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
            files[f"{folder}/part-0.parquet"] = buffer.getvalue()
        pattern = f"{folder}/*.{'jsonl' if source.streaming else 'parquet'}"
        configurations.setdefault(source.dataset, {}).setdefault(subset, {})[source.split] = pattern
    for repository, subsets in configurations.items():
        repositories[repository]["README.md"] = _readme(subsets).encode()
    return repositories


def _readme(subsets: dict[str, dict[str, str]]) -> str:
    lines = ["---", "configs:"]
    for subset, splits in subsets.items():
        lines += [f"- config_name: {subset}", "  data_files:"]
        for split, pattern in splits.items():
            lines += [f"  - split: {split}", f'    path: "{pattern}"']
    return "\n".join([*lines, "---", ""])


def _rows(source: DataSource, count: int, padding: int) -> Iterator[Row]:
    for number in range(count):
        text = f"{source.dataset} {source.split}, number {number}. " + f"word{number} " * 20 + "x" * padding
        yield _row(source, text, number) | {"unused": number}


def _row(source: DataSource, text: str, number: int) -> Row:
    first = source.columns[0]
    if source.shape == "text":
        return {first: text}
    if source.shape == "prompt-answer":
        return {first: text, source.columns[1]: f"The answer to {text}"}
    if source.shape == "code-contests":
        solutions = {"language": [2, 3], "solution": ["int main() {}", f"print({number})"]}
        return {first: f"{number}_A. Task", "description": text, "solutions": solutions}
    if source.shape == "chat":
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": f"Answer {number}."}]
        return {first: turns}
    if "tool" in source.dataset:
        return {first: _tool_dialogue(text, number)}
    names = ("human", "gpt") if number % 2 else ("user", "assistant")
    return {first: [{"from": names[0], "value": text}, {"from": names[1], "value": f"Answer {number}."}]}


def _tool_dialogue(text: str, number: int) -> list[dict[str, str]]:
    """As Hermes writes them; every tenth has a tool turn without a call, which templates refuse."""
    call = json.dumps({"name": "look_up", "arguments": {"number": number}})
    asked = "" if number % 10 == 9 else f"<tool_call>\n{call}\n</tool_call>"
    return [
        {"from": "system", "value": "You may call <tools>[...]</tools>."},
        {"from": "human", "value": text},
        {"from": "gpt", "value": f"<think>\nI look it up.\n</think>\nA moment.{asked}"},
        {"from": "tool", "value": f"<tool_response>\n{number}\n</tool_response>"},
        {"from": "gpt", "value": f"It is {number}."},
    ]
