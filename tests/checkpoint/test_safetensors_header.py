"""Our reading of safetensors headers against the library's own, and against broken files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import read_header
from quantizers.system.errors import CheckpointError

PROPERTY = settings(
    derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
NAMES = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=8).filter(
    lambda name: name != "__metadata__" and name.isprintable()
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    return torch.frombuffer(bytearray(raw), dtype=dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


FILES = st.dictionaries(NAMES, tensors(), max_size=5)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@PROPERTY
@given(body=FILES)
def test_header_and_bytes_are_the_librarys(file: Path, body: dict[str, torch.Tensor]) -> None:
    save_file(body, file, metadata={"format": "pt"})
    infos = read_header(file)
    checkpoint = Checkpoint(file.parent, "any", {}, infos)
    with safe_open(file, "pt") as library:
        assert set(infos) == set(library.keys())
        for name, info in infos.items():
            piece = library.get_slice(name)
            assert (info.dtype, list(info.shape)) == (piece.get_dtype(), piece.get_shape())
            ours, theirs = checkpoint.tensor(name), library.get_tensor(name)
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert bits(ours) == bits(theirs) == bytes(checkpoint.raw(name)) == bits(body[name])


@PROPERTY
@given(body=FILES, data=st.data())
def test_a_mutated_file_is_read_as_the_library_reads_it_or_refused(
    file: Path, body: dict[str, torch.Tensor], data: st.DataObject
) -> None:
    raw = bytearray(save(body, metadata={"format": "pt"}))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw)))
        count = data.draw(st.integers(0, 3))
        raw[at : at + count] = data.draw(st.binary(max_size=3))
    file.write_bytes(raw)
    agrees_with_the_library(file)


def agrees_with_the_library(file: Path) -> None:
    """What we read, the library reads too, and the same; else one line that names the file."""
    infos, said = {}, ""
    try:
        infos = read_header(file)
    except CheckpointError as failure:
        said = str(failure)
    if said:
        assert said.startswith(f"{file}: ")
        assert "\n" not in said
        return
    assert sum(info.size for info in infos.values()) <= file.stat().st_size
    try:
        with safe_open(file, "pt") as library:
            assert set(infos) == set(library.keys())
            for name, info in infos.items():
                piece = library.get_slice(name)
                assert (info.dtype, list(info.shape)) == (piece.get_dtype(), piece.get_shape())
    except SafetensorError:
        pass  # stricter than we need: it also checks its metadata, and the header's first character


def whole(body: dict[str, Any], size: int = 0) -> bytes:
    text = json.dumps(body).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def entry(dtype: object, shape: object, *offsets: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "the header is cut off or corrupt"),
        (bytes(7), "the header is cut off or corrupt"),
        (b"\xff" * 8, "the header is cut off or corrupt"),
        ((200_000_000).to_bytes(8, "little") + b"{}", "the header is cut off or corrupt"),
        ((3).to_bytes(8, "little") + b"{}", "the header is cut off or corrupt"),
        ((2).to_bytes(8, "little") + b"{]", "the header is not JSON"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "the header is not JSON"),
        (bytes(8), "the header is not JSON"),
        ((5000).to_bytes(8, "little") + b"[" * 5000, "the header is not JSON"),
        ((4).to_bytes(8, "little") + b"null", "the header is not a table of tensors"),
        (whole({"a": 5}), "a: its header entry is no table"),
        (whole({"a": {}}), "a: unknown dtype None"),
        (whole({"a": entry("F4", [2], 0, 1)}, 1), "a: unknown dtype 'F4'"),
        (whole({"a": entry("I8", 1, 0, 1)}, 1), "a: shape 1 is not a list of sizes"),
        (whole({"a": entry("I8", [True], 0, 1)}, 1), "a: shape [True] is not a list of sizes"),
        (whole({"a": entry("I8", [-1, -1], 0, 1)}, 1), "a: shape [-1, -1] is not a list of sizes"),
        (whole({"a": entry("I8", [1], 0)}, 1), "a: byte range [0] is not two offsets"),
        (whole({"a": entry("I8", [1], 0, 1.0)}, 1), "a: byte range [0, 1.0] is not two offsets"),
        (whole({"a": entry("I8", [1], 0, 2)}, 2), "a: 2 bytes do not hold I8 [1]"),
        (whole({"a": entry("I8", [1], 1, 0)}, 1), "a: -1 bytes do not hold I8 [1]"),
        (whole({"a": entry("I8", [2], 0, 2)}, 1), "a: the file is truncated"),
        (whole({"a": entry("I8", [10**4000], 0, 10**4000)}, 1), "a: the file is truncated"),
        (whole({"a": entry("I8", [1], 0, 1)}, 2), "has 1 bytes after its last tensor"),
        (whole({"a": entry("I8", [1], 1, 2)}, 2), "a: its byte range leaves a gap before it"),
        (whole({"a": entry("I8", [2], 0, 2), "b": entry("I8", [2], 1, 3)}, 3), "b: its byte range overlaps another"),
        (whole({"a": entry("I8", [2], 0, 2), "b": entry("I8", [2], 0, 2)}, 2), "b: its byte range overlaps another"),
        (whole({"a\nb": entry("I8", [1], 0, 1)}, 1), r"'a\nb': a name with control characters"),
    ],
)
def test_what_is_refused(file: Path, raw: bytes, said: str) -> None:
    file.write_bytes(raw)
    with pytest.raises(CheckpointError) as failure:
        read_header(file)
    assert str(failure.value).startswith(f"{file}: {said}")
    assert str(failure.value).endswith("download this shard again")
    assert len(str(failure.value)) < 500


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read \(No such file or directory\); check the folder"):
        read_header(tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"cannot be read \(Is a directory\)"):
        read_header(tmp_path)


def test_tensors_come_in_the_order_of_their_bytes(file: Path) -> None:
    save_file({"a": torch.ones(1, dtype=torch.int8), "b": torch.ones(3), "c": torch.ones(2, dtype=torch.int64)}, file)
    infos = list(read_header(file).values())
    assert [info.name for info in infos] == ["c", "b", "a"]
    assert [info.size for info in infos] == [16, 12, 1]
    assert infos[-1].end == file.stat().st_size
    save_file({}, file)
    assert read_header(file) == {}
