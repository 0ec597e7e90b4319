"""Shards on a Hub that are fetched through a window: what lies on the disk, what is read, and every fault a line."""

from __future__ import annotations

import errno
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from hub_stand_in import HubStandIn, reached
from on_the_hub import MODEL, in_order, resharded, sent
from rank_threads import together

from quantizers.checkpoint import remote as on_hub
from quantizers.checkpoint.loaded_tensors import load_tensors, prefetched_tensors
from quantizers.checkpoint.reader import Checkpoint, open_checkpoint, open_folder
from quantizers.checkpoint.window import Parts, Schedule, schedule, streamed
from quantizers.distributed.process_group import ProcessGroup
from quantizers.system import hub_client
from quantizers.system.errors import CheckpointError, InputError, QuantizeError
from quantizers.system.files import file_sha256

LAYERS, SHARDS = 4, 6


@pytest.fixture(scope="module")
def ordered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose shards follow its layers."""
    folder = tiny.make(tmp_path_factory.mktemp("ordered") / "model", num_hidden_layers=LAYERS)
    resharded(folder, in_order(folder, SHARDS))
    return folder


@pytest.fixture(scope="module")
def scattered(ordered: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with its tensors dealt to the shards at random."""
    folder = tmp_path_factory.mktemp("scattered") / "model"
    shutil.copytree(ordered, folder)
    names = [name for group in in_order(folder, 1) for name in group]
    random.Random(3).shuffle(names)
    resharded(folder, [names[n::SHARDS] for n in range(SHARDS)])
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    with HubStandIn() as stand_in:
        reached(stand_in, tmp_path / "home", monkeypatch)
        monkeypatch.setattr(hub_client, "PIECE", 20_000)
        yield stand_in


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's waits before it asks again are short."""
    from huggingface_hub.utils import _http

    monkeypatch.setattr(_http.time, "sleep", lambda _, real=_http.time.sleep: real(0.001))


def put(hub: HubStandIn, folder: Path) -> Checkpoint:
    """The model on the Hub, opened there."""
    hub.repositories[MODEL] = {"main": {path.name: path.read_bytes() for path in folder.iterdir()}}
    return open_checkpoint(MODEL, stream=True)


def parts_of(source: Checkpoint) -> list[list[str]]:
    """As a run reads them: what is outside the layers, then layer by layer."""
    outside = [name for name in source.tensors if ".layers." not in name]
    layers = [[n for n in source.tensors if n.startswith(f"model.layers.{layer}.")] for layer in range(LAYERS)]
    return [outside, *layers]


def read_all(source: Checkpoint, parts: Parts, folder: Path, limit: int | None = None) -> dict[str, str]:
    """The hash of every tensor of a pass."""
    with streamed(source, parts, folder, limit) as window:
        found = dict(load_tensors(window, parts[0]).hashes)
        window.release(parts[0])
        for part in prefetched_tensors(window, parts[1:]):
            found |= part.hashes
    return found


def headers(source: Checkpoint, shards: Iterable[str]) -> int:
    """Bytes of these shards that are known from when it was opened."""
    assert source.remote is not None
    return sum(len(source.remote.begun[name]) for name in shards)


def simulated(sizes: dict[str, int], reads: list[set[str]]) -> int:
    """The window that is needed, by going through it: what a part needs arrives, what no later one needs goes."""
    here, most = set[str](), 0
    for number, part in enumerate(reads):
        here |= part
        most = max(most, sum(sizes[name] for name in here))
        here -= {name for name in here if not any(name in later for later in reads[number + 1 :])}
    return most


def test_the_window_that_is_needed_is_that_of_a_simulation() -> None:
    drawn = random.Random(0)
    for _ in range(300):
        sizes = {f"shard {n}": drawn.randint(1, 1000) for n in range(drawn.randint(1, 9))}
        reads = [{name for name in sizes if drawn.random() < 0.4} for _ in range(drawn.randint(1, 8))]
        assert Schedule(sizes, reads, 0).needed == simulated(sizes, reads)


@pytest.mark.parametrize("layout", ["ordered", "scattered"])
def test_a_pass_through_the_smallest_window(
    layout: str, hub: HubStandIn, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte is asked for once and equals the file's; at any time no more lies on the disk than was foreseen."""
    folder: Path = request.getfixturevalue(layout)
    source, window = put(hub, folder), tmp_path / "window"
    parts = parts_of(source)
    planned, largest = schedule(source, parts), [0]
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert planned.traffic == size
    assert planned.needed < size or layout == "scattered"
    whole: Callable[..., bytes] = on_hub.HubFiles.range

    def measured(self: on_hub.HubFiles, name: str, start: int, end: int) -> bytes:
        """What will lie there once this request's file has arrived."""
        there = {path.name.removesuffix(".part") for path in window.glob("*")} | {name}
        if window.exists():
            largest[0] = max(largest[0], sum(self.files[one].size for one in there))
        return whole(self, name, start, end)

    monkeypatch.setattr(on_hub.HubFiles, "range", measured)
    with pytest.raises(InputError, match=r"give --window \d+MB or more"):
        read_all(source, parts, window, planned.needed - 1)
    found = read_all(source, parts, window, planned.needed)
    local = open_folder(folder)
    assert found == {name: local.sha256(name) for name in local.tensors}
    assert sent(hub) == size
    assert largest[0] == planned.needed
    assert not window.exists()


@pytest.mark.slow
def test_a_shard_of_which_little_is_needed_is_not_fetched(hub: HubStandIn, ordered: Path, tmp_path: Path) -> None:
    source, window = put(hub, ordered), tmp_path / "window"
    before, parts = sent(hub), [["model.norm.weight"], parts_of(source)[2]]
    planned = schedule(source, parts)
    found = read_all(source, parts, window)
    assert found.keys() == {name for part in parts for name in part}
    assert all(found[name] == open_folder(ordered).sha256(name) for name in found)
    needed = source.tensors["model.norm.weight"]
    assert needed.file.name not in planned.sizes
    assert planned.ranges >= needed.size
    assert sent(hub) - before == planned.traffic - headers(source, planned.sizes)
    assert source.sha256("model.norm.weight") == found["model.norm.weight"]


@pytest.mark.slow
def test_what_an_earlier_call_left_is_used_if_its_bytes_are_right(
    hub: HubStandIn, ordered: Path, tmp_path: Path
) -> None:
    source, window = put(hub, ordered), tmp_path / "window"
    before, parts = sent(hub), parts_of(source)
    first, second, third = list(schedule(source, parts).sizes)[:3]
    window.mkdir()
    raw = {name: (ordered / name).read_bytes() for name in (first, second, third)}
    (window / first).write_bytes(raw[first])
    (window / f"{second}.part").write_bytes(raw[second][:30_000])
    (window / f"{third}.part").write_bytes(b"\0" * 30_000)  # as after a power cut
    (window / "of another model").write_bytes(b"x")
    read_all(source, parts, window)
    size = sum(path.stat().st_size for path in ordered.glob("*.safetensors"))
    again = len(raw[third]) - 30_000  # fetched behind the zeros before their hash was known
    known = headers(source, {path.name for path in ordered.glob("*.safetensors")} - {first, second})
    assert sent(hub) - before == size - len(raw[first]) - 30_000 + again - known


@pytest.mark.slow
def test_what_an_earlier_call_left_of_a_larger_window_goes(hub: HubStandIn, ordered: Path, tmp_path: Path) -> None:
    """All shards lie there, and then as many as the window has room for when the first request is sent."""
    source, window = put(hub, ordered), tmp_path / "window"
    parts, there = parts_of(source), list[int]()
    planned = schedule(source, parts)
    shutil.copytree(ordered, window, ignore=lambda _, names: [n for n in names if not n.endswith(".safetensors")])
    with streamed(source, parts, window, planned.needed):
        there.append(sum(path.stat().st_size for path in window.iterdir()))
    assert 0 < there[0] <= planned.needed
    assert read_all(source, parts, window).keys() == source.tensors.keys()


class Late:
    """A window whose reading begins late."""

    def __init__(self, window: Any) -> None:
        self.window, self.release = window, window.release

    def read_into(self, *arguments: Any) -> Any:
        time.sleep(0.3)
        return self.window.read_into(*arguments)


@pytest.mark.slow
def test_no_shard_goes_before_the_last_process_has_read_it(hub: HubStandIn, ordered: Path, tmp_path: Path) -> None:
    """A broadcast of gloo's ends in rank 0 long before it has reached the seventh of eight."""
    source = put(hub, ordered)

    def read(dist: ProcessGroup) -> list[str]:
        with streamed(source, parts_of(source)[1:], tmp_path / "window", dist=dist) as window:
            mine = replace(window, remote=Late(window.remote)) if dist.rank == 7 else window
            return [name for part in prefetched_tensors(mine, parts_of(source)[1:], dist) for name in part.tensors]

    wanted = [name for part in parts_of(source)[1:] for name in part]
    assert [sorted(found) for found in together(8, read)] == [sorted(wanted)] * 8


FAULTS: dict[str, tuple[Callable[[HubStandIn], Any], type[QuantizeError], str]] = {
    "a wrong byte": (
        lambda hub: hub.spoiled.update({f"{MODEL}/model-00003-of-00006.safetensors": 9}),
        QuantizeError,
        r"model-00003-of-00006.safetensors: what came from the Hub is not what it has .* give the same command again",
    ),
    "access withdrawn": (lambda hub: hub.gated.add(MODEL), CheckpointError, r"is gated, .*; accept its terms on https"),
    "a server's errors": (
        lambda hub: hub.failing.add(MODEL),
        QuantizeError,
        r"the Hub stopped answering .*; give the same command again, which resumes",
    ),
    "the commit is gone": (
        lambda hub: hub.repositories[MODEL]["main"].update({"README.md": b"new"}),
        CheckpointError,
        r"the Hub has no revision [0-9a-f]{40}, or no longer; give another one, with --fresh if a run was begun$",
    ),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
def test_a_fault_is_one_line_and_the_next_call_goes_on(
    fault: str, hub: HubStandIn, ordered: Path, tmp_path: Path
) -> None:
    """What had arrived before it is not asked for again."""
    break_it, kind, words = FAULTS[fault]
    source, window = put(hub, ordered), tmp_path / "window"
    parts, good = parts_of(source), dict(hub.repositories[MODEL]["main"])
    break_it(hub)
    with pytest.raises(kind, match=words) as raised:
        read_all(source, parts, window, schedule(source, parts).needed)
    assert len(str(raised.value).splitlines()) == 1
    for fault_of in (hub.spoiled, hub.gated, hub.failing):
        fault_of.clear()
    hub.repositories[MODEL]["main"] = good
    kept = sum(path.stat().st_size for path in window.glob("*"))
    assert not list(window.glob("model-00003*")) or fault != "a wrong byte"
    before = sent(hub)
    local = open_folder(ordered)
    assert read_all(source, parts, window) == {name: local.sha256(name) for name in local.tensors}
    size = sum(path.stat().st_size for path in ordered.glob("*.safetensors"))
    assert sent(hub) - before <= size - kept


@pytest.mark.usefixtures("impatient")
@pytest.mark.slow
def test_cut_and_limited_answers_are_asked_for_again(
    hub: HubStandIn,
    ordered: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the library; and where it gives up, after a pause."""
    source, refusals = put(hub, ordered), 40  # four threads, and six requests by the library before it gives up
    monkeypatch.setattr(hub_client, "PAUSES", (0.01,) * refusals)
    hub.cut = {f"{MODEL}/model-0000{n}-of-00006.safetensors": [7, 5000] for n in (2, 5)}
    hub.limited = {f"/{MODEL}/resolve": refusals}
    local = open_folder(ordered)
    found = read_all(source, parts_of(source), tmp_path / "window")
    assert found == {name: local.sha256(name) for name in local.tensors}
    assert not any(cuts for cuts in hub.cut.values())
    assert hub.limited == {f"/{MODEL}/resolve": 0}
    assert "the Hub stopped answering (" in (said := capsys.readouterr().err)
    assert "); trying again in 0.01 s" in said


@pytest.mark.slow
def test_a_full_disk_is_one_line(
    hub: HubStandIn, ordered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, real = put(hub, ordered), Path.open

    def full(path: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
        if path.name.startswith("model-00002") and "+" in mode:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, mode, *given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        with pytest.raises(QuantizeError, match=r"cannot be written \(No space left on device\); make room"):
            read_all(source, parts_of(source), tmp_path / "window")
    local = open_folder(ordered)
    assert read_all(source, parts_of(source), tmp_path / "window")["lm_head.weight"] == local.sha256("lm_head.weight")


@pytest.mark.slow
def test_what_is_not_on_the_hub_is_refused(hub: HubStandIn, ordered: Path) -> None:
    put(hub, ordered)
    for model, revision, words in (
        (str(ordered), "main", "is a folder, which is read where it lies; leave --stream out"),
        ("org/none", "main", r"org/none: the Hub did not give its headers \("),
        (MODEL, "no-such-branch", r"org/tiny: the Hub has no revision no-such-branch, or no longer; give another one"),
    ):
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(model, revision, stream=True)


@pytest.mark.slow
def test_a_shard_that_the_hub_lacks_is_named(hub: HubStandIn, ordered: Path) -> None:
    put(hub, ordered)
    del hub.repositories[MODEL]["main"]["model-00003-of-00006.safetensors"]
    with pytest.raises(
        CheckpointError, match=r"names model-00003-of-00006\.safetensors, which the Hub lacks; give anoth"
    ):
        open_checkpoint(MODEL, stream=True)


@pytest.mark.slow
def test_files_next_to_the_shards_are_hashed_too(hub: HubStandIn, ordered: Path) -> None:
    """The hashes that the Hub lists, of files of both kinds, are those of the files."""
    source = put(hub, ordered)
    assert source.remote is not None
    for path in ordered.iterdir():
        file, hasher = source.remote.files[path.name], source.remote.files[path.name].hasher()
        hasher.update(path.read_bytes())
        assert hasher.hexdigest() == file.digest
        assert file.sha256 in (None, file_sha256(path))
    assert source.revision == hub.commit(MODEL)
