"""Inputs mutated at random: refused in one line with exit code 2, or good enough to begin; never anything else.

tests/test_bad_input.py holds what is wrong in ways that were thought of; this is the rest. A run whose
input is found good is stopped where its first layer would be read.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import tiny
import yaml
from calibration_tokenizer import write_tokenizer

from quantizers.cli import main as cli
from quantizers.pipeline import pipeline
from quantizers.system.errors import QuantizeError

FEW, EACH = 16, 100  # mutations of each kind of file: for everybody, and among the slow tests
SECONDS = 120  # after which one is taken to hang, on the busiest machine
HEADER, INDEX = "model/model-00001-of-00002.safetensors", "model/model.safetensors.index.json"
KINDS = ["recipe.yaml", "set.yaml", "texts.jsonl", "model/config.json", INDEX, HEADER, "model/tokenizer_config.json"]
# What stands in for a value somewhere.
ATOMS = [
    "", "~", "null", "true", "-1", "0", "1e999", ".nan", "1e-4", "99999999999999999999", "[]", "{}", "[[[[1]]]]",
    "'", '"', "*anchor", "&a [*a]", "!!python/object/apply:os.system [exit]", "!!binary x", "../../../etc/passwd",
    "/dev/zero", "\\u0000", "\x00", "\ufeff", "é", "\u202e", "x" * 5000, "${HOME}", "~/x", "%s%n", "|", ">-", "? :",
    "{a: {a: {a: 1}}}", "1_0", "0x10", "2001-01-01", "=", "<<: *x", "- - -", "safetensors",
]  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, its set, its texts, and a checkpoint of one layer."""
    folder = tmp_path_factory.mktemp("good")
    write_tokenizer(tiny.make(folder / "model", num_hidden_layers=1))
    rows = [{"text": f"some text {i}", "kind": "code"} for i in range(3)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    source = {
        "dataset": "./texts.jsonl", "columns": ["text"], "shape": "text", "samples": 3, "category": {"column": "kind"},
    }  # fmt: skip
    body = {"name": "small", "sequence_length": 32, "seed": 1, "sources": [source]}
    (folder / "set.yaml").write_text(yaml.safe_dump(body, sort_keys=False))
    recipe = {
        "source": {"model": "model", "revision": "main", "trust_remote_code": False},
        "calibration": "set.yaml",
        "experts": {"bits": 4, "group_size": 32, "awq": {"grid": 20, "duo_scaling": True}, "routed_weight": 0.9},
        "keep": "everything-else",
        "verify": {"coverage": {"min_routed_tokens": 1}, "perplexity": {"data": "set.yaml", "max_kl": 0.5}},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return folder


def mutated(raw: bytes, chance: random.Random) -> bytes:
    """One to three changes: bytes, lines, words, or the end."""
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(raw) + 1) if raw else 0
        kind = chance.randrange(7)
        lines = raw.split(b"\n")
        line = chance.randrange(len(lines))
        if kind == 0:
            raw = raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :]
        elif kind == 1:
            raw = raw[:at]
        elif kind == 2:
            raw = raw[:at] + raw[min(len(raw), at + chance.randrange(1, 20)) :]
        elif kind == 3:
            raw = b"\n".join([*lines[:line], lines[line], *lines[line:]])
        elif kind == 4:
            raw = b"\n".join([*lines[:line], *lines[line + 1 :]])
        elif kind == 5:
            raw = raw[:at] + chance.choice(ATOMS).encode() + raw[at:]
        else:  # a value after a colon
            key, colon, _ = lines[line].partition(b":")
            lines[line] = key + colon + b" " + chance.choice(ATOMS).encode()
            raw = b"\n".join(lines)
    return raw


def mutated_header(raw: bytes, chance: random.Random) -> bytes:
    """A shard whose header is changed, its length told rightly or not, or whose data is cut."""
    size = int.from_bytes(raw[:8], "little")
    header, data = raw[8 : 8 + size], raw[8 + size :]
    kind = chance.randrange(4)
    if kind == 0:
        return chance.choice([0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little") + raw[8:]
    if kind == 1:
        return raw[: chance.randrange(len(raw))]
    if kind == 2:
        header = mutated(header, chance)
    else:
        body = json.loads(header)
        entry = body[chance.choice([name for name in body if name != "__metadata__"])]
        key = chance.choice(list(entry))
        entry[key] = chance.choice(
            [None, [], [-1, 5], [0, 2**63], [2**63, 0], "F8_E4M3", "I4", [1.5], {}, [[1]], 7, [8, 8]]
        )
        header = json.dumps(body).encode()
    return len(header).to_bytes(8, "little") + header + data


@pytest.fixture
def quantize(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Path], tuple[int, str]]:
    """A run of the recipe in a folder up to its first layer: exit code (0 where it got there) and standard error."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    reached = "reached the first layer"

    def stop(*_: object, **__: object) -> None:
        raise QuantizeError(reached)

    monkeypatch.setattr(pipeline, "quantize_layers", stop)

    def call(folder: Path) -> tuple[int, str]:
        arguments = ["quantize", "run", folder / "recipe.yaml", "--output", folder / "output", "--device", "cpu"]
        monkeypatch.setattr("sys.argv", [*map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        errors = capsys.readouterr().err
        return (0 if reached in errors else int(str(ended.value.code))), errors

    return call


@pytest.fixture
def hurry() -> Iterator[Callable[[], None]]:
    """A function that gives the next seconds; who takes longer ends here."""

    def late(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"hung for more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    yield lambda: signal.setitimer(signal.ITIMER_REAL, SECONDS) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("each", [FEW, pytest.param(EACH, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KINDS)
def test_mutated_inputs(
    name: str,
    each: int,
    good: Path,
    tmp_path: Path,
    quantize: Callable[[Path], tuple[int, str]],
    hurry: Callable[[], None],
) -> None:
    chance = random.Random(name)
    folder = shutil.copytree(good, tmp_path / "case")
    assert quantize(folder)[0] == 0  # and whatever is imported late is imported now
    raw = (good / name).read_bytes()
    refused = 0
    for number in range(each):
        changed = (mutated_header if name == HEADER else mutated)(raw, chance)
        (folder / name).write_bytes(changed)
        hurry()
        code, errors = quantize(folder)
        about = f"{name}, mutation {number}: {changed[:300]!r}\n{errors}"
        assert code in (0, 2), about
        assert "Traceback" not in errors, about
        if code == 2:
            refused += 1
            assert errors, about
            assert all(line.startswith("quantize: ") for line in errors.splitlines()), about
        assert not (folder / "output" / "config.json").exists()
        shutil.rmtree(folder / "output", ignore_errors=True)
    print(f"{name}: {refused} of {each} refused")
    assert refused > each // 4


def test_a_yaml_bomb_is_refused_at_once(
    good: Path, tmp_path: Path, quantize: Callable[[Path], tuple[int, str]], hurry: Callable[[], None]
) -> None:
    folder = shutil.copytree(good, tmp_path / "case")
    for name in ("recipe.yaml", "set.yaml"):
        text = (good / name).read_text()
        bomb = "a: &a [x]\n" + "".join(
            f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
        )
        for body in (bomb + text, "{" * 100_000, "[" * 100_000, "- " * 50_000, text + "x: " + "9" * 200_000):
            (folder / name).write_text(body)
            hurry()
            code, errors = quantize(folder)
            assert code == 2, errors[:300]
            assert len(errors) < 2000
            assert errors.count("\n") == 1
        (folder / name).write_text(text)
