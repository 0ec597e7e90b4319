"""Counts what code asks of an accelerator, while it runs on torch's meta device.

There tensors have shapes and no numbers, and the program takes the way that it takes on every accelerator, see
device/kind.py. Everything that torch dispatches is seen here, whoever calls it:

    on the device        an operation: launches, bytes, arithmetic; or a view
    to the host          bytes, and a synchronisation; the numbers come from `answer`
    to the device        bytes
    on the host          done if it is small; of a megabyte or more only its bytes are counted

A look at a single number is a synchronisation, and finds that all is well: finite, nothing failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from quantizers.device.pinned import is_pinned
from quantizers.system.errors import QuantizeError

from .operations import FREE, changed, described, does_nothing, is_unordered, name_of, tensors
from .values import META, SMALL, form, mapped, numbers_of, shape_of, tensors_within, untouched
from .work import Work

CPU = torch.device("cpu")
Answer = Callable[[torch.Tensor], torch.Tensor | None]


@dataclasses.dataclass(frozen=True)
class _Done:
    """What a function did the first time: its work inside and outside of blocks, with peaks above the start."""

    inside: Mapping[str, Work]
    outside: Work
    result: Any


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # in torch
    """Counts by phase while it is entered.

    Args:
        answer: gives the numbers of a tensor that is copied to the host; None for zeros.

    Attributes:
        phases: what was counted, in the order in which the phases began.

    Raises:
        QuantizeError: an operation whose sum has no order on a GPU.
    """

    def __init__(self, answer: Answer = lambda _: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # in torch
        self.phases: dict[str, Work] = {}
        self._answer = answer
        self._here = self._between = Work()  # what is not within a block belongs to the next lap
        self._alive: dict[int, str] = {}  # storages on the device, and the operation that wrote to each last
        self._now = 0
        self._paused = self._given_back = self._aside = False
        self._done: dict[Any, _Done] = {}

    @contextlib.contextmanager
    def block(self, name: str) -> Iterator[None]:
        """Count what is done within the block under `name`; see device/timing.py."""
        self._here = self.phases.setdefault(name, Work())
        self._note_peak()
        try:
            yield
        finally:
            self._here = self._between
            self._note_peak()

    def lap(self, name: str) -> None:
        """Book all since the last lap that no block has counted under `name`."""
        self.phases.setdefault(name, Work()).add(self._between)
        self._here = self._between = Work()
        self._note_peak()

    def beside(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """`make`, with what it makes left out: the structure of a module, which takes no memory on a device either."""

        def made(*arguments: Any, **named: Any) -> Any:
            with self._unseen():
                return make(*arguments, **named)

        return made

    def once(self, function: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
        """`function`, done for arguments of each shape once, and counted as often as it is called.

        What it frees of its arguments counts as alive until it returns, so that peaks are never too small.

        Args:
            function: what it does must follow from the shapes and dtypes of the tensors in its arguments.
            name: what it is known by; None for itself.
        """

        def counted(*arguments: Any, **named: Any) -> Any:
            key = name or function, *(form(tensor) for tensor in tensors_within((arguments, named)))
            if key not in self._done:
                self._done[key], result = self._first(function, arguments, named)
                return result
            done = self._done[key]
            for phase, work in done.inside.items():
                self._add(self.phases.setdefault(phase, Work()), work)
            self._add(self._here, done.outside)
            self._given_back = True
            try:
                return mapped(done.result, lambda leaf: leaf.clone())
            finally:
                self._given_back = False

        return counted

    def _first(self, function: Callable[..., Any], arguments: Any, named: Any) -> tuple[_Done, Any]:
        phases, here, between, start = self.phases, self._here, self._between, self._now
        self.phases, outside = {}, Work(peak=start)
        self._here = self._between = outside
        try:
            result = function(*arguments, **named)
            inside = self.phases
        finally:
            self.phases, self._here, self._between = phases, here, between
        for name, work in inside.items():
            phases.setdefault(name, Work()).add(work)
        here.add(outside)
        for work in (*inside.values(), outside):
            work.peak -= start
        with self._unseen():
            shapes = mapped(result, torch.empty_like)
        return _Done(inside, outside, shapes), result

    def _add(self, to: Work, work: Work) -> None:
        to.add(dataclasses.replace(work, peak=work.peak + self._now))

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def kernel(self, given: Sequence[torch.Tensor], operation: Any) -> None:
        """Count an operation that a GPU has and the meta device has not."""
        if given[0].is_meta and not self._paused:
            self._here.operations[operation] += 1

    def asked(self) -> None:
        """Count that all processes wait for each other's words."""
        self._here.rounds += 1

    def passed(self, rows: torch.Tensor, *, sends: bool, between: bool, times: int = 1) -> None:
        """Count what is passed on to or by other processes, over the bus if it does not lie on the device.

        Args:
            between: whether it passes between machines.
            times: in how many broadcasts.
        """
        work = self._here
        work.broadcasts += times
        work.between += rows.nbytes * between
        if sends:
            work.sent += rows.nbytes
        else:
            work.received += rows.nbytes
        if not rows.is_meta:
            work.copies += times
            work.to_device += rows.nbytes * sends
            work.to_host += rows.nbytes * (not sends)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return function(*args, **kwargs)
        name, given = name_of(function), tensors((args, kwargs))
        there = [tensor.is_meta for tensor in given]
        if name == "_local_scalar_dense" and there[0]:
            return self._look(given[0])
        if name == "_to_copy" and kwargs.get("device") in (CPU, META) and there[0] != (kwargs["device"] == META):
            return self._crossing(given[0], kwargs.get("dtype") or given[0].dtype)
        if name == "copy_" and there[0] != there[1] and given[1].dim():
            return self._into(*given)
        if not any(there) and kwargs.get("device") != META:
            return self._on_host(function, name, args, kwargs, given)
        targets = changed(function, args, kwargs)
        # What writes to one argument gives that back. It is not done, since many operations are slow on this device.
        gives_back = len(targets) == 1 and function._schema.returns and not function.is_view
        result = targets[0][0] if gives_back else function(*args, **kwargs)
        if self._given_back:  # what a function that is not done again gives back
            self._keep(result, name)
        elif function.is_view or name in FREE or does_nothing(name, given, result):
            self._here.views += 1
            if not function.is_view:
                self._keep(result, name)
        else:
            if is_unordered(function, args):
                raise QuantizeError(
                    f"{name} of {str(given[0].dtype).removeprefix('torch.')}: a GPU adds in the order in which its "
                    "threads come, so the bytes would not be the same again; write it as an ordered sum"
                )
            self._here.operations[described(function, args, kwargs, result)] += 1
            self._keep(result, name)
        return result

    def _look(self, tensor: torch.Tensor) -> bool | int | float:
        self._here.syncs += 1
        self._here.to_host += tensor.element_size()
        if tensor.dtype == torch.bool:
            return self._alive.get(tensor.untyped_storage()._cdata) != "any"  # any failed: no; all finite: yes
        return 1.0 if tensor.is_floating_point() else 1

    def _crossing(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The copy of a tensor on the other side of the bus."""
        self._here.copies += 1
        if not tensor.is_meta:
            self._here.to_device += tensor.nbytes
            self._here.pinned += tensor.nbytes * is_pinned(tensor)
            made = torch.empty(tensor.shape, dtype=dtype, device=META)
            self._keep(made, "_to_copy")
            return made
        self._here.syncs += 1
        self._here.to_host += tensor.nbytes
        answer = self._answer(tensor)
        return untouched(tensor.shape, dtype) if answer is None else answer.to(dtype)

    def _into(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """A copy over the bus into memory that is there."""
        self._here.copies += 1
        here = source if target.is_meta else target
        beside = self._aside and is_pinned(here)  # from and to other memory a copy is waited for
        self._here.pinned += here.nbytes * is_pinned(here)
        self._here.beside += here.nbytes * beside
        if target.is_meta:
            self._here.to_device += source.nbytes
        else:
            self._here.syncs += not beside
            self._here.to_host += target.nbytes
        return target

    @contextlib.contextmanager
    def aside(self) -> Iterator[Work]:
        """Count the copies within the block apart from all else: they cross beside the work, see copies.py."""
        here, copies = self._here, Work()
        self._here, self._aside = copies, True
        try:
            yield copies
        finally:
            self._here, self._aside = here, False

    def book(self, work: Work) -> None:
        """Count what was counted apart."""
        self._here.add(work)

    def _on_host(self, function: Any, name: str, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        if name == "sum" and given[0].is_floating_point() and given[0].nbytes < SMALL:
            args = torch.ones_like(given[0]), *args[1:]  # so that nothing is divided by zero
        if function.is_view or (given and max(tensor.nbytes for tensor in given) < SMALL):
            return function(*args, **kwargs)
        # Shapes alone, to see what it would make.
        arguments, named = tree_map(shape_of, (args, kwargs | ({"device": META} if "device" in kwargs else {})))
        shapes = function(*arguments, **named)
        if not given and max((tensor.nbytes for tensor in tensors(shapes)), default=0) < SMALL:
            return function(*args, **kwargs)
        if name not in FREE:
            cost = described(function, args, kwargs, shapes)
            self._here.host_bytes += cost.read + cost.written
        written = [target for target, _ in changed(function, args, kwargs)]
        if written:
            return written[0]
        return tree_map(numbers_of, shapes)

    def _keep(self, result: Any, name: str) -> None:
        for tensor in tensors(result):
            if tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._alive:
                    self._now += storage.nbytes()
                    self._note_peak()
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
                self._alive[storage._cdata] = name

    def _gone(self, key: int, size: int) -> None:
        self._now -= size
        del self._alive[key]

    def _note_peak(self) -> None:
        self._here.peak = max(self._here.peak, self._now)
