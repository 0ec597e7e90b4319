"""The part of a model on the Hub that lies on the disk while one pass goes over it.

A pass says which parts of a checkpoint it reads, one after the other. Shards are fetched ahead in that order, as far as
the window has room, and removed when the last part with a tensor of it has been read. A shard of which the pass needs
less than half is not fetched: what is needed is read straight into memory. Of several processes on a machine local
rank 0 fetches and removes; the others wait for the files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from threading import Condition, Event, Thread

from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.system import hub_client
from quantizers.system.errors import InputError, QuantizeError
from quantizers.system.files import disk_errors
from quantizers.system.formatting import size
from quantizers.system.progress import duration

from .reader import Checkpoint, read_into
from .remote import HubFile, HubFiles
from .safetensors_header import TensorInfo

CONNECTIONS = 4  # shards fetched at a time, at most
POLL = 0.05  # seconds between two looks for a shard that is waited for
LINES = 20.0  # seconds of waiting between two lines about it
UNFINISHED = ".part"
DEFAULT = 40_000_000_000  # bytes of a window, unless more is needed

Parts = Sequence[Sequence[str]]  # names of tensors that are read together, in the order in which a pass reads them


@dataclass(frozen=True)
class Schedule:
    """Which shards a pass needs, and when."""

    sizes: dict[str, int]  # of the shards that are fetched, in bytes, in the order in which they are
    reads: list[set[str]]  # of each part those among them that it reads
    ranges: int  # bytes that are read of the other shards

    @property
    def needed(self) -> int:
        """The smallest window in bytes: the largest sum of the shards between their first and their last part."""
        reads = list(enumerate(self.reads))
        first = {name: n for n, part in reversed(reads) for name in part}
        last = {name: n for n, part in reads for name in part}
        return max((sum(self.sizes[s] for s in first if first[s] <= n <= last[s]) for n, _ in reads), default=0)

    @property
    def traffic(self) -> int:
        """All bytes that come from the Hub."""
        return sum(self.sizes.values()) + self.ranges

    def window(self, limit: int | None) -> int:
        """Bytes that lie on the disk at most. Raises InputError if `limit`, None for the default, is too small."""
        needed, whole = self.needed, sum(self.sizes.values())
        if limit is not None and limit < needed:
            raise InputError(
                f"--window {size(limit)}",
                f"{size(needed)} of the source must lie on the disk at a time, as its layers lie in its shards",
                f"give --window {-(-needed // 10**6)}MB or more",
            )
        return min(max(needed, DEFAULT) if limit is None else limit, whole)


def schedule(source: Checkpoint, parts: Parts) -> Schedule:
    """The schedule of a pass over a checkpoint, wherever its shards are."""
    read = {(info.file.name, info.start, info.end) for part in parts for info in map(source.tensors.__getitem__, part)}
    stored = {(info.file.name, info.start, info.end) for info in source.tensors.values()}
    needed = Counter[str]()
    held = Counter[str]()
    ends = dict[str, int]()
    for file, start, end in stored:
        held[file] += end - start
        ends[file] = max(end, ends.get(file, 0))
        needed[file] += end - start if (file, start, end) in read else 0
    fetched = {file for file, of_pass in needed.items() if of_pass and 2 * of_pass >= held[file]}
    reads = [{source.tensors[name].file.name for name in part} & fetched for part in parts]
    order = dict.fromkeys(file for part in reads for file in sorted(part))
    ranges = sum(of_pass for file, of_pass in needed.items() if file not in fetched)
    return Schedule({file: ends[file] for file in order}, reads, ranges)


class Window(HubFiles):
    """The files of a commit, of which those that a pass needs are fetched to a folder before it needs them.

    Args:
        folder: where they lie, and nothing else.
        limit: bytes that they have together, at most.
        fetches: whether this process fetches and removes; else another does so in the same folder.
        check: called while a shard is waited for; may raise to interrupt.
    """

    def __init__(
        self,
        remote: HubFiles,
        folder: Path,
        limit: int,
        planned: Schedule,
        *,
        fetches: bool = True,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(remote.model, remote.commit, remote.files, remote.begun)
        self.folder = folder
        self.limit = limit
        self.planned = planned
        self.fetches, self._check = fetches, check
        self.waited = 0.0  # seconds that reading waited for shards
        self._uses = Counter(name for part in planned.reads for name in part)
        self._left = list(reversed(planned.sizes))
        self._changed, self._stopped = Condition(), Event()
        self._here, self._arrived = dict[str, int](), 0
        self._failure: BaseException | None = None
        self._threads: list[Thread] = []

    def start(self) -> None:
        """Begin to fetch. What an earlier call left in the folder is used again, once its bytes have been compared.

        Only of the shards for which there is room at once: that call's window may have been larger.
        """
        if not self.fetches:
            return
        sums = zip(self.planned.sizes, accumulate(self.planned.sizes.values()), strict=True)
        first = {name for name, total in sums if total <= self.limit}
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in self.folder.iterdir():
                name = file.name.removesuffix(UNFINISHED)
                if name in first:
                    os.replace(file, self.folder / f"{name}{UNFINISHED}")
                else:
                    file.unlink()
        # They end with the process: a request that waits for the Hub does not hold it up.
        self._threads = [Thread(target=self._work, daemon=True) for _ in range(CONNECTIONS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End fetching; what has arrived stays for a call that resumes."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=1 / CONNECTIONS)

    def _work(self) -> None:
        try:
            while (name := self._next()) is not None:
                self._fetch(self.files[name])
        except BaseException as failure:
            with self._changed:
                self._failure = self._failure or failure
                self._changed.notify_all()

    def _next(self) -> str | None:
        """The next shard in order, once there is room for it; None at the end."""
        with self._changed:
            while self._left and not (self._stopped.is_set() or self._failure):
                name = self._left[-1]
                if sum(self._here.values()) + self.planned.sizes[name] <= self.limit:
                    self._here[name] = self.planned.sizes[name]
                    return self._left.pop()
                self._changed.wait()
        return None

    def _fetch(self, file: HubFile) -> None:
        unfinished = self.folder / f"{file.name}{UNFINISHED}"
        with disk_errors(unfinished):
            begun = unfinished.stat().st_size if unfinished.exists() else 0
            digest = self._receive(file, unfinished)
            if begun and digest not in ("", file.digest):  # as after a power cut
                unfinished.unlink()
                digest = self._receive(file, unfinished)
            if not digest:
                return
            if digest != file.digest:
                unfinished.unlink()
                raise QuantizeError(
                    f"{self.model}: {file.name}",
                    f"what came from the Hub is not what it has (hash {digest[:16]}…, on the Hub {file.digest[:16]}…)",
                    hub_client.AGAIN,
                )
            os.replace(unfinished, self.folder / file.name)
        with self._changed:
            self._arrived += 1
            self._changed.notify_all()

    def _receive(self, file: HubFile, unfinished: Path) -> str:
        """Fetch what a file lacks; the hash of all its bytes, or nothing if it was stopped."""
        hasher = file.hasher()
        with unfinished.open("a+b") as stream:
            stream.seek(0)
            while block := stream.read(hub_client.PIECE):
                hasher.update(block)
            at = stream.tell()
            if not at:
                at = stream.write(self.begun.get(file.name, b""))
                hasher.update(self.begun.get(file.name, b""))
            while at < file.size:
                if self._stopped.is_set():
                    return ""
                end = min(at + hub_client.PIECE, file.size)
                block = hub_client.retried(partial(self.range, file.name, at, end), self._stopped)
                at += stream.write(block)
                hasher.update(block)
                stream.flush()
        return hasher.hexdigest()

    def read_into(
        self, wanted: Iterable[tuple[TensorInfo, memoryview]], stop: Event | None = None
    ) -> Iterator[TensorInfo]:
        """As `reader.read_into`, once the shards are there; what is not fetched comes from the Hub."""
        fetched = self.planned.sizes.keys()
        for file, pairs in groupby(wanted, lambda pair: pair[0].file.name if pair[0].file.name in fetched else None):
            if file is None:
                yield from super().read_into(pairs, stop)
            elif self._wait_for(file, stop):
                yield from read_into((replace(info, file=self.folder / file), view) for info, view in pairs)

    def _wait_for(self, file: str, stop: Event | None) -> bool:
        """Whether a shard is there at last; False if `stop` was set before. Raises what ended the fetching."""
        began = printed = time.monotonic()
        while not (self.folder / file).exists():
            self._check()
            if stop and stop.is_set():
                return False
            if self._failure is not None:
                raise self._failure
            if self.fetches and time.monotonic() - printed > LINES:
                printed = time.monotonic()
                print(f"waiting for {self._received(file)}", file=sys.stderr, flush=True)
            with self._changed:
                self._changed.wait(POLL)
        self.waited += time.monotonic() - began
        return True

    def _received(self, file: str) -> str:
        """Describe the progress of a shard's download, and of the whole download, for the user."""
        unfinished, whole = self.folder / f"{file}{UNFINISHED}", sum(self.planned.sizes.values())
        there, needed = unfinished.stat().st_size if unfinished.exists() else 0, self.planned.sizes[file]
        return f"{file}: {size(there)} of {size(needed)} ({size(self.fetched)} of {size(whole)} so far)"

    def release(self, infos: Iterable[TensorInfo]) -> None:
        """A part was read by all processes of this machine: remove the shards that no later part needs."""
        for file in {info.file.name for info in infos} & self._uses.keys():
            self._uses[file] -= 1
            if not self._uses[file] and self.fetches:
                (self.folder / file).unlink(missing_ok=True)
                with self._changed:
                    del self._here[file]
                    self._changed.notify_all()

    def fetched_line(self) -> str:
        """Summarize what was fetched, in a sentence."""
        ranges = f", and {size(self.planned.ranges)} in ranges" if self.planned.ranges else ""
        shards = f"{self._arrived} shard{'s' if self._arrived != 1 else ''}"
        return (
            f"fetched {size(self.fetched)} of {self.model} from the Hub: {shards}, "
            f"compared with the Hub's SHA-256{ranges}; waited {duration(self.waited)} for them"
        )


@contextlib.contextmanager
def streamed(
    source: Checkpoint,
    parts: Parts,
    folder: Path,
    limit: int | None = None,
    *,
    check: Callable[[], None] = lambda: None,
    dist: ProcessGroup = SINGLE_PROCESS,
) -> Iterator[Checkpoint]:
    """A checkpoint for one pass, through a window if its shards are on the Hub; all processes call this.

    Args:
        parts: what the pass reads on this machine.
        folder: on this machine, for the shards; removed at the end of the pass.
        limit: bytes of the window; None for the default.
        check: as in `Window`.

    Raises:
        InputError: the limit is less than what has to lie there at a time.
    """
    if source.remote is None:
        yield source
        return
    planned = schedule(source, parts)
    window = Window(source.remote, folder, planned.window(limit), planned, fetches=dist.local_rank == 0, check=check)
    window.start()
    dist.barrier()  # before another process takes a file that an earlier call left for a finished one
    try:
        yield replace(source, remote=window)
    finally:
        window.stop()
    if window.fetches:
        print(window.fetched_line(), file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
