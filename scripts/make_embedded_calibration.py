"""Build calibration/embedded/*.jsonl from a folder of plain texts, the way their authors wrote them.

    TEXTS/code/<language>/<n>.txt     first line `### task: ...`, the rest is code
    TEXTS/spoken/<language>/<n>.txt   first line `### task: ...`, the rest is prose
    TEXTS/domains.jsonl               {"category", "held_out", "messages", "tools"?}
    TEXTS/long/<kind>/<name>          a whole document or file, as it is

The last text of every language is held out for perplexity; the others calibrate. Long texts are all held
out. A part for which there are no texts is left as it is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from quantizers.calibration.set import read_set, slug

OUTPUT = Path(__file__).resolve().parent.parent / "calibration"
TASK = "### task: "
# Folder names that are not the language's slug, and what a fence calls a language.
FOLDERS = {"bash-shell": "bash"}
FENCES = {
    "bash-shell": "bash", "html-css": "html", "gdscript": "gdscript", "x86-64-asm": "asm", "arm-64-asm": "asm",
    "llvm-ir": "llvm", "visual-basic": "vbnet", "lisp": "lisp", "objective-c": "objectivec", "zephyr": "c",
    "vulkan": "cpp", "cuda": "cuda", "delphi": "pascal", "apex": "apex",
}  # fmt: skip

Row = dict[str, Any]


def read_text(path: Path) -> tuple[str, str]:
    """The task and the body of one text."""
    first, _, body = path.read_text(encoding="utf-8").partition("\n")
    if not first.startswith(TASK) or not body.strip():
        raise SystemExit(f"{path}: must begin with {TASK!r} and go on with a text")
    return first.removeprefix(TASK).strip(), body.strip("\n")


def fenced(code: str, language: str) -> str:
    """Code as a chat answer shows it; the fence is longer than any inside."""
    ticks = "```"
    while ticks in code:
        ticks += "`"
    return f"{ticks}{FENCES.get(language, language)}\n{code}\n{ticks}"


def pairs(folder: Path, family: str, languages: Iterable[str]) -> Iterator[tuple[bool, Row]]:
    """(held out, row) for every text of every language, in the order of the set's list."""
    for language in map(slug, languages):
        files = sorted((folder / FOLDERS.get(language, language)).glob("*.txt"))
        if len(files) < 2:
            raise SystemExit(f"{folder}: no texts for {language}")
        for file in files:
            task, body = read_text(file)
            answer = fenced(body, language) if family == "code" else body
            row = {"category": f"{family}/{language}", "prompt": task, "answer": answer}
            yield file is files[-1], row


def conversations(file: Path) -> Iterator[tuple[bool, Row]]:
    """(held out, row) for every conversation."""
    for line in file.read_text(encoding="utf-8").split("\n"):
        if line.strip():
            row = json.loads(line)
            yield row.pop("held_out"), row


def documents(folder: Path) -> Iterator[tuple[bool, Row]]:
    """(held out, row) for every long text."""
    for file in sorted(folder.glob("*/*")):
        yield True, {"category": f"long/{file.parent.name}", "text": file.read_text(encoding="utf-8")}


def write(rows: Iterable[tuple[bool, Row]], name: str) -> None:
    """Split rows into NAME.jsonl and held-out-NAME.jsonl; a part without rows is not written."""
    held_out: dict[bool, list[str]] = {False: [], True: []}
    for is_held_out, row in rows:
        # JSON takes U+2028, U+2029 and U+0085 as they are; editors take them for line ends.
        line = json.dumps(row, ensure_ascii=False)
        for separator in ("\u2028", "\u2029", "\u0085"):
            line = line.replace(separator, f"\\u{ord(separator):04x}")
        held_out[is_held_out].append(line + "\n")
    for is_held_out, prefix in ((False, ""), (True, "held-out-")):
        if not held_out[is_held_out]:
            continue
        path = OUTPUT / "embedded" / f"{prefix}{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(held_out[is_held_out]), encoding="utf-8")
        print(f"{path.name}: {len(held_out[is_held_out])} rows, {path.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    texts = parser.parse_args().texts
    languages = read_set(OUTPUT / "embedded.yaml").languages
    for family, names in (("code", languages.programming), ("spoken", languages.spoken)):
        if (texts / family).is_dir():
            write(pairs(texts / family, family, names), family)
    if (texts / "domains.jsonl").is_file():
        write(conversations(texts / "domains.jsonl"), "chat")
    write(documents(texts / "long"), "long")


if __name__ == "__main__":
    main()
