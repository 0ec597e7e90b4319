"""Nobody waits for the dead: who is lost is noticed and named, and one line says why all end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rank_threads import together
from torch.distributed import HashStore

from quantizers.distributed import heart as module
from quantizers.distributed.launch import Distributed
from quantizers.distributed.process_group import Heart
from quantizers.system.errors import InputError, Interrupted, PeerFailed, QuantizeError

AGAIN = "give the same command again to go on"


@pytest.fixture(autouse=True)
def keep_sigterm() -> Iterator[None]:
    """`last_words` ignores the signal from then on; here others come after it."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def peer() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def heart(store: HashStore, nodes: list[int], pids: dict[int, int], **options: bool) -> Heart:
    """That of rank 0."""
    names = [f"rank {rank} of {len(nodes)} on host{node}" for rank, node in enumerate(nodes)]
    return Heart(store, 0, names, nodes, pids, **({"prints": True, "launched": False} | options))


def until_it_raises(one: Heart) -> QuantizeError:
    with pytest.raises(QuantizeError) as ended:
        one.wait(lambda: False)
    return ended.value


def test_a_killed_process_of_this_machine(peer: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first look, so without waiting once; and that a launcher then interrupts the others is not the reason."""
    own = heart(HashStore(), [0, 0], {1: peer.pid})
    own.check()
    peer.kill()
    peer.wait()
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited for the dead"))
    ended = until_it_raises(own)
    assert str(ended) == f"rank 1 of 2 on host0 is gone: killed, or out of memory? {AGAIN}"
    assert ended.exit_code == 1
    assert own.last_words("interrupted by SIGTERM", 143) == (str(ended), 1)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_process_that_died_before_the_others_came(peer: subprocess.Popen[bytes]) -> None:
    peer.kill()
    peer.wait()
    own = heart(HashStore(), [0, 0], {1: peer.pid})
    assert "rank 1 of 2 on host0 is gone" in str(until_it_raises(own))
    own.finish()


def test_who_has_done_its_part_is_not_missed(peer: subprocess.Popen[bytes]) -> None:
    store = HashStore()
    own = heart(store, [0, 0], {1: peer.pid})
    store.set("ended/1", "")
    peer.kill()
    peer.wait()
    own.check()
    assert own.last_words("interrupted by SIGTERM", 143) == ("interrupted by SIGTERM", 143)


def test_a_machine_that_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """One beat came, and no other."""
    monkeypatch.setattr(module, "BEAT", 0.02)
    monkeypatch.setattr(module, "SILENCE", 1.0)
    monkeypatch.setattr(Heart, "_guard", lambda _: None)  # a slow test machine is no store that is gone
    store = HashStore()
    store.set("beat/1", "0")
    own = heart(store, [0, 1], {})
    ended = until_it_raises(own)
    assert str(ended) == (
        f"rank 1 of 2 on host1 has not been heard of for 1 s: is the machine down, or its network? {AGAIN}"
    )
    own.finish()


def test_a_launcher_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = heart(HashStore(), [0], {}, launched=True)
    own.check()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert str(until_it_raises(own)) == (
        f"rank 0 of 1 on host0: the launcher, which started this process, is gone; {AGAIN}"
    )
    own.finish()


class Gone:
    """A store whose machine is lost."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object) -> None:
            raise RuntimeError("connection reset")

        return fail if name != "set_timeout" else lambda *_: None


@pytest.mark.parametrize("prints", [True, False])
def test_a_store_that_is_gone(prints: bool) -> None:
    """Then nobody can say who prints why: one process of each machine does."""
    own = heart(Gone(), [0, 1], {}, prints=prints)  # type: ignore[arg-type]
    ended = until_it_raises(own)
    assert "the launcher of rank 0 of 2 on host0, by which all find each other, does not answer" in str(ended)
    assert own.last_words(str(ended), 1) == (str(ended) if prints else None, 1)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_first_that_fails_says_why(nodes: int) -> None:
    """The others end with the same code: silently on its machine, with the same line once on another one."""
    lines: dict[int, tuple[str | None, int]] = {}

    def work(dist: Distributed) -> None:
        try:
            if dist.rank == 1:
                raise InputError("what is wrong")
            dist.barrier()
        except QuantizeError as failure:
            # Rank 2 was interrupted by its launcher meanwhile.
            lines[dist.rank] = dist.final_message(str(failure), 143 if dist.rank == 2 else failure.exit_code)

    store = HashStore()

    def ends(dist: Distributed) -> None:
        work(dist)
        while len(lines) < 4:
            time.sleep(0.01)

    for found in together(4, lambda dist: _quietly(ends, dist), nodes, store):
        assert found is None
    elsewhere = "what is wrong" if nodes == 2 else None
    assert lines == {0: (None, 2), 1: ("what is wrong", 2), 2: (elsewhere, 2), 3: (None, 2)}


def _quietly(work: Any, dist: Distributed) -> None:
    """Without the barrier that ends a thread's part: the others are not there any more."""
    work(dist)
    dist.barrier = lambda: None  # type: ignore[method-assign]


def test_waiting_ends_with_an_interrupt() -> None:
    def stop() -> None:
        raise Interrupted("stopped", 15)

    def work(dist: Distributed) -> None:
        if dist.is_main:
            dist.watch(stop)
        dist.barrier()
        dist.barrier()

    ended = together(2, work)
    assert isinstance(ended[0], Interrupted)
    assert isinstance(ended[1], PeerFailed)


def test_a_broken_connection_is_explained_by_who_is_lost(peer: subprocess.Popen[bytes]) -> None:
    own = heart(HashStore(), [0, 0], {1: peer.pid})
    peer.kill()
    peer.wait()
    assert "rank 1 of 2 on host0 is gone" in str(own.explain(RuntimeError("Connection closed by peer")))
    own.finish()


def test_a_process_that_hangs_is_ended(tmp_path: Any) -> None:
    """Its main thread waits for ever; the line and the code come all the same."""
    script = (
        "import os, time\n"
        "from torch.distributed import HashStore\n"
        "from quantizers.distributed import heart\n"
        "heart.GRACE = heart.BEAT = 0.1\n"
        "store = HashStore()\n"
        "heart.Heart(store, 0, ['a', 'b'], [0, 1], {}, prints=True, launched=True)\n"
        "os.getppid = lambda: 1\n"
        "time.sleep(600)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == f"quantize: a: the launcher, which started this process, is gone; {AGAIN}"
