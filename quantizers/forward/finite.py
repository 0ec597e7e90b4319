"""Whether what was read is finite, looked at once for many tensors: on an accelerator a look is a synchronisation."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Finite:
    """Looks that are still to be made."""

    def __init__(self) -> None:
        self._found: list[torch.Tensor] = []
        self._again: list[Callable[[], object]] = []

    def add(self, found: torch.Tensor, again: Callable[[], object]) -> None:
        """Put off a look.

        Args:
            found: a bool on the device: whether something is finite.
            again: reads that again, and raises an error that names it where it is not.
        """
        self._found.append(found)
        self._again.append(again)

    def require(self) -> None:
        """Make all looks so far; whatever the errors say comes from the first that was not finite."""
        if self._found and not bool(torch.stack(self._found).all()):
            for again in self._again:
                again()
            raise AssertionError("a tensor was not finite, and is now")
        self._found.clear()
        self._again.clear()
