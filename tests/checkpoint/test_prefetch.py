"""A checkpoint that several processes read: each has all of it, and the same bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from rank_threads import together
from safetensors.torch import save_file

from quantizers.checkpoint.loaded_tensors import load_tensors
from quantizers.checkpoint.prefetch import prefetched_tensors
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.distributed.process_group import ProcessGroup
from quantizers.system.errors import CheckpointError, PeerFailed

SIZES = (0, 1, 3, 700, 64, 1, 500, 0, 64, 300, 0)


@pytest.fixture
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Two files of tensors of very different sizes, some of them empty."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    for file in ("a", "b"):
        tensors = {f"{file}.{n:02d}": torch.randn(size) for n, size in enumerate(SIZES)}
        save_file(tensors, folder / f"{file}.safetensors")
    index = {name: f"{name[0]}.safetensors" for name in (f"{file}.{n:02d}" for file in "ab" for n in range(len(SIZES)))}
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {index}}}'.replace("'", '"'))
    (folder / "config.json").write_text("{}")
    return open_folder(folder)


@pytest.mark.parametrize("count", [1, 3])
def test_every_process_has_all_parts(checkpoint: Checkpoint, count: int) -> None:
    parts = [sorted(name for name in checkpoint.tensors if name[0] == file) for file in "aba"]
    wanted = [load_tensors(checkpoint, names) for names in parts]

    def work(dist: ProcessGroup) -> list[tuple[list[str], str, bool]]:
        return [
            (list(part.hashes), part.digest(), all(torch.equal(part.tensor(n), one.tensor(n)) for n in part.stored))
            for part, one in zip(prefetched_tensors(checkpoint, parts, dist), wanted, strict=True)
        ]

    assert together(count, work) == [[(list(one.hashes), one.digest(), True) for one in wanted]] * count


def test_a_copy_with_another_bit_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(checkpoint.folder, tmp_path / "copy")
    shard = tmp_path / "copy" / "b.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    copies = [checkpoint, open_folder(tmp_path / "copy")]
    ended = together(2, lambda dist: list(prefetched_tensors(copies[dist.rank], [sorted(checkpoint.tensors)], dist)))
    assert isinstance(ended[0], PeerFailed)
    assert isinstance(ended[1], CheckpointError)
    assert str(ended[1]).startswith(f"rank 1 of 2 on host0: {shard}: b.09 has other bytes")
