"""Files that are read at once: results in order, failures in their turn, and an end that does not wait for the rest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from quantizers.system import thread_map as module
from quantizers.system.thread_map import thread_map


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_order(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the first of each pair waits for the second, where there are threads for both."""
    monkeypatch.setattr(module, "cores", lambda: threads)
    second = [threading.Event() for _ in range(10)]

    def make(item: int) -> int:
        if item % 2:
            second[item // 2].set()
        elif threads > 1:
            assert second[item // 2].wait(60)
        return item * item

    assert list(thread_map(make, range(20))) == [item * item for item in range(20)]
    assert list(thread_map(make, [])) == []


def test_what_has_not_begun_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads are at work on the third and fourth when the second is found to have failed."""
    begun, go_on = list[int](), threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, *arguments: Any, **named: Any) -> None:
            go_on.set()
            super().shutdown(*arguments, **named)

    monkeypatch.setattr(module, "cores", lambda: 2)
    monkeypatch.setattr(module, "ThreadPoolExecutor", Pool)

    def make(item: int) -> int:
        begun.append(item)
        if item == 1:
            raise ValueError("the second")
        assert item == 0 or go_on.wait(60)
        return item

    with closing(thread_map(make, range(100))) as found:
        assert next(found) == 0
        with pytest.raises(ValueError, match="the second"):
            next(found)
    assert set(begun) <= {0, 1, 2, 3}


def test_few_items_are_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow their work is, next to asking for them."""
    monkeypatch.setattr(module, "cores", lambda: 2)
    asked, done = list[int](), list[int]()

    def items() -> Iterator[int]:
        for item in range(100):
            assert item - len(done) <= 5
            asked.append(item)
            yield item

    for made in thread_map(lambda item: item, items()):
        done.append(made)
    assert done == asked == list(range(100))
