"""Inputs mutated at random: refused in one line with exit code 2, or good enough to begin; never anything else.

tests/pipeline/test_bad_input.py holds what is wrong in ways that were thought of; this is the rest. A run whose
input is found good is stopped where its first layer would be read.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import yaml
from runs import JobFolder

from quantizers.pipeline import pipeline
from quantizers.system.errors import QuantizeError

FIRST = "model-00001-of-00002.safetensors"
MUTATIONS = 8  # of each kind of file, and in the slow tests as many others
SECONDS = 120  # after which one is taken to hang, on the busiest machine
KINDS = [
    "recipe.yaml",
    "set.yaml",
    "t.jsonl",
    "model/config.json",
    "model/model.safetensors.index.json",
    f"model/{FIRST}",
    "model/tokenizer_config.json",
]
# What stands in for a value somewhere.
ATOMS = [
    "", "~", "null", "true", "-1", "0", "1e999", ".nan", "1e-4", "99999999999999999999", "[]", "{}", "[[[[1]]]]",
    "'", '"', "*anchor", "&a [*a]", "!!python/object/apply:os.system [exit]", "!!binary x", "../../../etc/passwd",
    "/dev/zero", "\\u0000", "\x00", "\ufeff", "é", "\u202e", "x" * 5000, "${HOME}", "~/x", "%s%n", "|", ">-", "? :",
    "{a: {a: {a: 1}}}", "1_0", "0x10", "2001-01-01", "=", "<<: *x", "- - -", "safetensors",
]  # fmt: skip


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
def begin(
    case: JobFolder, quantize: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], tuple[int, str]]:
    """A run of the case, with every kind of key, up to its first layer: 0 where it got there; and standard error."""
    experts = {"bits": 4, "group_size": 32, "awq": {"grid": 20, "duo_scaling": True}, "routed_weight": 0.9}
    verify = {
        "coverage": {"min_routed_tokens": 1},
        "perplexity": {"data": "set.yaml", "max_kl": 0.5, "max_source": "any"},
    }
    body = {"source": {"model": "model", "revision": "main", "trust_remote_code": False}, "calibration": "set.yaml"}
    body |= {"experts": experts, "keep": "everything-else", "verify": verify}
    case.recipe.write_text(yaml.safe_dump(body, sort_keys=False))

    def stop(*_: object, **__: object) -> None:
        raise QuantizeError("", "reached the first layer")

    monkeypatch.setattr(pipeline, "quantize_layers", stop)

    def call() -> tuple[int, str]:
        code, _, err = quantize("run", case.recipe, "--output", case.output, "--device", "cpu")
        return (0 if "reached the first layer" in err else int(code)), err

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


@pytest.mark.parametrize("seed", ["", pytest.param(" again", marks=pytest.mark.every)])
@pytest.mark.parametrize("name", KINDS)
def test_mutated_inputs(
    name: str, seed: str, case: JobFolder, begin: Callable[[], tuple[int, str]], hurry: Callable[[], None]
) -> None:
    chance = random.Random(name + seed)
    assert begin()[0] == 0  # and whatever is imported late is imported now
    raw, refused = (case.folder / name).read_bytes(), 0
    for number in range(MUTATIONS):
        changed = (mutated_header if name.endswith(FIRST) else mutated)(raw, chance)
        (case.folder / name).write_bytes(changed)
        hurry()
        code, errors = begin()
        about = f"{name}, mutation {number}: {changed[:300]!r}\n{errors}"
        assert code in (0, 2), about
        assert "Traceback" not in errors, about
        if code == 2:
            refused += 1
            assert errors, about
            said = [line for line in errors.splitlines() if not line.startswith(("model (", "checking", "scoring"))]
            assert all(line.startswith("quantize: ") for line in said), about
        assert not (case.output / "config.json").exists()
        shutil.rmtree(case.output, ignore_errors=True)
    print(f"{name}: {refused} of {MUTATIONS} refused")
    assert refused > MUTATIONS // 4
