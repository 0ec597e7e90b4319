"""Parts of a checkpoint in memory: the same tensors, each byte read once, one part ahead and never more."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest
import torch
from rank_threads import together
from safetensors.torch import save_file
from tiny import make

from quantizers.architectures.families import architecture_for
from quantizers.checkpoint import reader
from quantizers.checkpoint.loaded_tensors import (
    LoadedTensors,
    bytes_needed,
    layer_names,
    load_tensors,
    prefetched_tensors,
    tensors_in_memory,
)
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.checkpoint.safetensors_header import TORCH_DTYPES, TensorInfo
from quantizers.distributed.process_group import ProcessGroup
from quantizers.system.errors import CheckpointError, PeerFailed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_folder(make(tmp_path_factory.mktemp("loaded") / "model", num_hidden_layers=4))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that were read, in their order."""
    names, real = list[str](), reader.read_into

    def counted(wanted: Iterable[tuple[TensorInfo, memoryview]]) -> Iterator[TensorInfo]:
        for info in real(wanted):
            names.append(info.name)
            yield info

    monkeypatch.setattr(reader, "read_into", counted)
    return names


def parts_of(model: Checkpoint) -> list[list[str]]:
    facts = architecture_for(model.config, "config.json")
    return [layer_names(model, facts, number) for number in range(model.config["num_hidden_layers"])]


def test_a_part_answers_as_the_checkpoint_does_for_its_own_tensors(model: Checkpoint) -> None:
    names = parts_of(model)[1]
    part = load_tensors(model, names)
    assert set(part.tensors) == set(names)
    for name in names:
        assert torch.equal(part.tensor(name).view(torch.uint8), model.tensor(name).view(torch.uint8))
        assert part.raw(name) == model.raw(name)
        assert part.sha256(name) == model.sha256(name) == hashlib.sha256(model.raw(name)).hexdigest()
    assert (part.folder, part.config, part.name) == (model.folder, model.config, model.name)
    other = parts_of(model)[2][0]
    with pytest.raises(CheckpointError, match="missing"):
        part.require(other, "a test")
    with pytest.raises(KeyError):
        part.tensor(other)
    assert part.buffer is not None
    some = part.only(names[:2])
    part.buffer.fill_(255)
    assert set(some.tensors) == set(some.stored) == set(names[:2])
    assert all(some.raw(name) == model.raw(name) for name in some.tensors)


def test_layers_ten_and_one_are_not_confused(model: Checkpoint) -> None:
    facts = architecture_for(model.config, "config.json")
    names = ["model.layers.1.a", "model.layers.10.a", "model.layers.1.b", "lm_head.weight"]
    checkpoint = Checkpoint(model.folder, "m", model.config, dict.fromkeys(names, next(iter(model.tensors.values()))))
    assert layer_names(checkpoint, facts, 1) == ["model.layers.1.a", "model.layers.1.b"]


def test_the_digest_is_over_names_and_bytes(model: Checkpoint) -> None:
    part = load_tensors(model, parts_of(model)[0])
    assert part.digest() == load_tensors(model, parts_of(model)[0]).digest()
    name = next(iter(part.stored))
    other = {**part.stored, name: part.tensor(name).clone()}
    other[name].view(torch.uint8).view(-1)[0] ^= 1
    assert tensors_in_memory(model, other, Path("x")).digest() != part.digest()
    assert tensors_in_memory(model, part.stored, Path("x")).digest() == part.digest()


def test_every_dtype_that_can_be_written_can_be_loaded(tmp_path: Path, model: Checkpoint) -> None:
    tensors = {name: torch.zeros(3, 2).to(getattr(torch, own)) for name, own in TORCH_DTYPES.items()}
    tensors["empty"] = torch.empty(0, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    written = open_folder(tmp_path)
    made = tensors_in_memory(model, tensors, tmp_path / "model.safetensors")
    for name, info in written.tensors.items():
        assert (made.tensors[name].dtype, made.tensors[name].shape) == (info.dtype, info.shape)
        assert made.sha256(name) == load_tensors(written, [name]).sha256(name)


def test_each_part_comes_in_its_turn_and_each_byte_is_read_once(model: Checkpoint, read: list[str]) -> None:
    """In the order of the bytes; the two buffers in turn, as large as the largest part needs."""
    parts = parts_of(model)
    parts = [parts[0][:5], *parts[1:]]
    places, sizes = [], set()
    for names, part in zip(parts, prefetched_tensors(model, parts), strict=True):
        assert part.buffer is not None
        assert set(part.stored) == set(names)
        assert all(part.holds(tensor) for tensor in part.stored.values())
        places.append(part.buffer.untyped_storage().data_ptr())
        sizes.add(part.buffer.untyped_storage().nbytes())
    in_file = {name: (info.file, info.start) for name, info in model.tensors.items()}
    assert read == [name for names in parts for name in sorted(names, key=lambda name: in_file[name])]
    assert places[0] == places[2] != places[1] == places[3]
    assert sizes == {max(bytes_needed(model.tensors[name] for name in names) for names in parts)}
    assert list(prefetched_tensors(model, [])) == []


def test_a_tensor_keeps_its_bytes_until_the_next_part_is_asked_for(model: Checkpoint) -> None:
    """However far the thread has read; and whoever still has the part afterwards finds nothing in it."""
    parts = parts_of(model)
    with closing(prefetched_tensors(model, parts)) as ahead:
        before: LoadedTensors | None = None
        for number, part in enumerate(ahead):
            time.sleep(0.05)  # the thread reads the next one meanwhile
            assert all(part.raw(name) == model.raw(name) for name in parts[number])
            if before is not None:
                assert not before.stored
                with pytest.raises(KeyError):
                    before.tensor(parts[number - 1][0])
                assert before.digest() == load_tensors(model, parts[number - 1]).digest()
            before = part


def test_a_part_on_a_device_keeps_its_hashes(model: Checkpoint) -> None:
    """Asked of the meta device, which every machine has."""
    part = load_tensors(model, parts_of(model)[0])
    assert part.to(torch.device("cpu")) is part
    moved = part.to(torch.device("meta"))
    for name, tensor in part.stored.items():
        on_device = moved.tensor(name)
        assert (on_device.device.type, on_device.dtype, on_device.shape) == ("meta", tensor.dtype, tensor.shape)
        assert on_device.storage_offset() == tensor.storage_offset()
    assert moved.digest() == part.digest()
    assert moved.tensors == part.tensors


def test_closing_stops_reading_at_the_next_tensor(model: Checkpoint, read: list[str]) -> None:
    stop = Event()
    stop.set()
    load_tensors(model, parts_of(model)[0], stop)
    assert read == []
    parts = parts_of(model)
    with closing(prefetched_tensors(model, parts)) as ahead:
        next(ahead)
    assert len(parts[0]) <= len(read) <= len(parts[0]) + len(parts[1])


def test_the_tensor_at_which_a_file_ends_is_named_when_its_part_is_due(tmp_path: Path) -> None:
    model = open_folder(make(tmp_path / "model", shards=1))
    first, inner, *_ = sorted(model.tensors.values(), key=lambda info: info.start)
    with inner.file.open("rb+") as stream:
        stream.truncate(inner.end - 1)
    ahead = prefetched_tensors(model, [[first.name], list(model.tensors)])
    next(ahead)
    with pytest.raises(CheckpointError, match=f"{inner.name}: the file is truncated; download this shard again"):
        next(ahead)
    inner.file.unlink()
    with pytest.raises(CheckpointError, match=f"{first.name}: cannot be read"):
        load_tensors(model, model.tensors)


@pytest.mark.parametrize("count", [1, 3])
def test_every_process_has_all_parts(model: Checkpoint, count: int) -> None:
    parts = parts_of(model)
    wanted = [load_tensors(model, names).digest() for names in parts]

    def work(dist: ProcessGroup) -> list[str]:
        return [part.digest() for part in prefetched_tensors(model, parts, dist)]

    assert together(count, work) == [wanted] * count


def test_a_copy_with_another_bit_is_named(model: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(model.folder, tmp_path / "copy")
    copies = [model, open_folder(tmp_path / "copy")]
    changed = copies[1].tensors[parts_of(model)[1][0]]
    raw = bytearray(changed.file.read_bytes())
    raw[changed.start] ^= 1
    changed.file.write_bytes(raw)
    ended = together(2, lambda dist: list(prefetched_tensors(copies[dist.rank], parts_of(model), dist)))
    assert isinstance(ended[0], PeerFailed)
    assert isinstance(ended[1], CheckpointError)
    message = f"rank 1 of 2 on host0: {changed.file}: {changed.name} has other bytes"
    assert str(ended[1]).startswith(message)
