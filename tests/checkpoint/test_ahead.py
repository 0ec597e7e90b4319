"""A checkpoint that several processes read: each byte once on every machine, and every process has all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import together
from safetensors.torch import save_file

from quantizers.checkpoint import ahead
from quantizers.checkpoint.ahead import held_ahead
from quantizers.checkpoint.held import Held, hold, ranges, share_of
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.distributed.process_group import ProcessGroup

SIZES = (0, 1, 3, 700, 64, 1, 500, 0, 64, 300, 0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Two files of tensors of very different sizes, some of them empty."""
    torch.manual_seed(0)
    for file in ("a", "b"):
        tensors = {f"{file}.{n:02d}": torch.randn(size) for n, size in enumerate(SIZES)}
        save_file(tensors, tmp_path / f"{file}.safetensors")
    index = {name: f"{name[0]}.safetensors" for name in (f"{file}.{n:02d}" for file in "ab" for n in range(len(SIZES)))}
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {index}}}'.replace("'", '"'))
    (tmp_path / "config.json").write_text("{}")
    return open_folder(tmp_path)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 40])
def test_shares_are_whole_tensors_of_about_as_many_bytes(checkpoint: Checkpoint, count: int) -> None:
    found = ranges(checkpoint.tensors.values())
    whole, largest = sum(one.size for one in found), 4 * max(SIZES)
    names, place = list[str](), {info.name: one.slice_of(info) for one in found for info in one.infos}
    for rank in range(count):
        dist = ProcessGroup()
        dist.rank, dist.world_size = rank, count
        shares = share_of(found, dist)
        assert {info.name: one.slice_of(info) for one in shares for info in one.infos}.items() <= place.items()
        names += [info.name for one in shares for info in one.infos]
        assert abs(sum(one.size for one in shares) - whole / count) <= largest
    assert sorted(names) == sorted(checkpoint.tensors)


@pytest.mark.parametrize(("count", "nodes"), [(2, 1), (3, 1), (4, 2)])
def test_every_process_has_all_and_each_byte_is_read_once_on_a_machine(
    checkpoint: Checkpoint, count: int, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [sorted(name for name in checkpoint.tensors if name[0] == file) for file in "aba"]
    wanted = [hold(checkpoint, names) for names in parts]
    read: list[str] = []

    def noted(*arguments: Any, **named: Any) -> Held:
        held = hold(*arguments, **named)
        read.extend(held.hashes)
        return held

    monkeypatch.setattr(ahead, "hold", noted)

    def work(dist: ProcessGroup) -> list[tuple[list[str], str, bool]]:
        return [
            (list(part.hashes), part.digest(), all(torch.equal(part.tensor(n), one.tensor(n)) for n in part.stored))
            for part, one in zip(held_ahead(checkpoint, parts, dist), wanted, strict=True)
        ]

    found = together(count, work, nodes)
    assert found == [[(list(one.hashes), one.digest(), True) for one in wanted]] * count
    assert sorted(read) == sorted(name for names in parts for name in names for _ in range(nodes))
