"""Memory decides how many Hessians are cached, and no byte: sweeps, and a device that is full in the middle."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from one_layer import GROUP, Layer, assert_same, batches_cached, make_layer, plain
from torch.utils._python_dispatch import TorchDispatchMode

from quantizers.planning.device_memory import Residents
from quantizers.recipe.schema import Awq, Experts
from quantizers.solve import hessians, solver
from quantizers.solve.result import LayerResult
from quantizers.solve.solver import solve
from quantizers.system.errors import QuantizeError

EXPERTS, BATCH = 7, 2  # four expert batches, the last of one expert


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(1, experts=EXPERTS)


def solved_with(layer: Layer, residents: Residents, **options: Any) -> LayerResult:
    settings = Experts(group_size=GROUP, awq=Awq(grid=4), **options)
    return solve(
        layer.recorded(), layer.weights(), norm=layer.norm, router=layer.router,
        shape=layer.router.shape, gate=plain, settings=settings, batch_size=BATCH, residents=residents,
    )  # fmt: skip


def same(got: LayerResult, wanted: LayerResult) -> None:
    assert_same(got, wanted)
    assert got.error == wanted.error
    assert got.fallbacks == wanted.fallbacks


@pytest.fixture(scope="module")
def wanted(layer: Layer) -> LayerResult:
    return solved_with(layer, Residents(EXPERTS, 1, 0))


@pytest.mark.parametrize("count", [1, 3])
def test_the_number_of_cached_hessians_decides_no_bit(
    layer: Layer, wanted: LayerResult, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each sweep gathers as many as the others, one more at most."""
    cached = batches_cached(monkeypatch)
    same(solved_with(layer, Residents(count, BATCH, 0)), wanted)
    assert cached == {1: [1, 1, 1, 1], 3: [2, 2]}[count]


class Full(TorchDispatchMode):
    """A device whose memory is full at the operation of this number, once for each number given."""

    def __init__(self, *at: int) -> None:
        super().__init__()
        self.at, self.number = set(at), 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        if self.number in self.at:
            raise torch.OutOfMemoryError("injected")
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def places(layer: Layer) -> dict[str, tuple[int, int]]:
    """The numbers of the first and last operation of a sweep, of the norm's search, and of the expert batches."""
    named = ("sweep", hessians, "sweep"), ("search", solver, "norm_scale"), ("batches", solver, "solve_batch")
    found: dict[str, tuple[int, int]] = {}
    with Full() as counter, pytest.MonkeyPatch.context() as patched:
        for name, module, function in named:
            original = getattr(module, function)

            def noted(*arguments: Any, name: str = name, real: Any = original, **more: Any) -> Any:
                before = counter.number
                result = real(*arguments, **more)
                first = found.get(name, (before, 0))[0] if name == "batches" else before
                found[name] = first, counter.number
                return result

            patched.setattr(module, function, noted)
        solved_with(layer, Residents(4, BATCH, 0))
    return found


@pytest.mark.parametrize(
    ("where", "share"),
    [
        ("sweep", 0.7),
        pytest.param("search", 0.02, marks=pytest.mark.slow),
        pytest.param("batches", 0.7, marks=pytest.mark.slow),
    ],
)
def test_a_full_device_in_the_middle_changes_no_bit(
    layer: Layer,
    wanted: LayerResult,
    places: dict[str, tuple[int, int]],
    where: str,
    share: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At any operation: fewer Hessians are cached from then on, and one line says so."""
    first, last = places[where]
    residents = Residents(4, BATCH, 0)
    with Full(first + round(share * (last - first))):
        got = solved_with(layer, residents)
    same(got, wanted)
    assert residents.count == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "the device's memory was full: from now on the Hessians of 2 expert batches of 2 experts are kept at a time; "
        "the output stays the same"
    )


def test_full_again_and_again(
    layer: Layer, wanted: LayerResult, places: dict[str, tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    """From four to two to one; at one it is the end, with what is needed and what to do."""
    begins, _ = places["batches"]
    residents = Residents(4, BATCH, 3 * 2**30)
    with Full(begins + 50, begins + 500):
        same(solved_with(layer, residents), wanted)
    assert residents.count == 1
    assert len(capsys.readouterr().err.splitlines()) == 2
    with (
        pytest.raises(
            QuantizeError, match=r"full with the Hessians of one batch of 2 experts at a time, for which 3\.0 GiB"
        ),
        Full(begins + 50),
    ):
        solved_with(layer, residents)


def test_work_is_dealt_evenly() -> None:
    """As few sweeps as the limit allows, and none with more than one batch less than another."""
    for batches, count in itertools.product(range(1, 20), range(1, 9)):
        residents, waiting, shares = Residents(count, 16, 0), batches, []
        while waiting:
            shares.append(residents.share(waiting))
            waiting -= shares[-1]
        assert len(shares) == -(-batches // count)
        assert max(shares) <= count
        assert max(shares) - min(shares) <= 1
