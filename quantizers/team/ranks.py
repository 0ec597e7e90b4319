"""Which process this is, of how many that work on one run: the same bytes as one process gives, sooner.

    torchrun --nproc-per-node 4 -m quantizers run RECIPE --output DIR

and likewise `eval` and `coverage`, which know sequences only.

Sequences are dealt to the processes in turn, chunks of experts in consecutive shares. Both are units of
work whatever the number of processes: no matmul has another shape, and what is added over sequences or
experts is added by everyone in their order. That is why the bytes are the same.

Data does not travel. Hidden states lie in files that all processes map, and what they solved is handed
over through files too, so all of them must be on one machine. Process 0 alone asks, journals, writes
the output and proves it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quantizers.system.errors import InputError, QuantizeError

from .rendezvous import Meeting

if TYPE_CHECKING:
    import torch

Made = TypeVar("Made")
INTERRUPTED = (130, 143)  # exit codes


@dataclass(frozen=True)
class Ranks:
    """One of `count` processes; with one, everything here does nothing.

    Attributes:
        rank: 0 to count - 1.
        local: the number of this process's GPU.
        meeting: how the processes meet; None where there is one, or before they have.
        folder: where `gather` hands over, made there; the same for all.
        check: called while waiting; may raise.
    """

    rank: int = 0
    count: int = 1
    local: int = 0
    meeting: Meeting | None = None
    folder: Path | None = None
    check: Callable[[], None] = lambda: None

    @property
    def leads(self) -> bool:
        """Whether this is process 0."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.count > 1

    def at(self, folder: Path, check: Callable[[], None]) -> Ranks:
        """The same, with a folder and a check."""
        return replace(self, folder=folder, check=check)

    def dealt(self, items: int) -> range:
        """Which of so many items of unequal size are this process's: every count-th."""
        return range(self.rank, items, self.count)

    def share(self, items: int) -> range:
        """Which of so many items are this process's: consecutive ones, the shares in the order of ranks."""
        return range(items * self.rank // self.count, items * (self.rank + 1) // self.count)

    def meet(self) -> None:
        """Wait until all processes are here. Raises as `Meeting.meet` does."""
        if self.meeting:
            self.meeting.meet(self.check)

    def after_first(self, make: Callable[[], Made]) -> Made:
        """`make()`, by process 0 before all others: what it makes or loads, they find."""
        if self.leads:
            made = make()
            self.meet()
            return made
        self.meet()
        return make()

    def leave(self) -> None:
        """This process has done its part, and ends before others."""
        if self.meeting:
            with contextlib.suppress(QuantizeError):
                self.meeting.leave()

    def tell(self, key: str, word: Any) -> None:
        """Process 0 leaves a word, anything that JSON holds, for `hear`."""
        if self.meeting:
            self.meeting.tell(key, json.dumps(word))

    def hear(self, key: str) -> Any:
        """Wait for what process 0 tells."""
        assert self.meeting, "there is nobody to hear"
        return json.loads(self.meeting.hear(key, self.check))

    def gather(self, parts: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """All processes' rows of tensors, one process's after the other's in the order of ranks.

        Args:
            parts: this process's rows by name; a name that is missing here is no rows.
            device: where the result is wanted.

        Returns:
            The same in every process, by every name that a process has.
        """
        if self.meeting is None:
            return dict(parts)
        import torch
        from safetensors.torch import load_file, save_file

        from quantizers.system.atomic import disk_errors

        assert self.folder
        files = [self.folder / f"{self.meeting.number}-{rank}.safetensors" for rank in range(self.count)]
        with disk_errors(files[self.rank]):
            self.folder.mkdir(exist_ok=True)
            save_file({name: part.cpu().contiguous() for name, part in parts.items()}, files[self.rank])
        self.meet()
        pieces = [load_file(file, str(device)) for file in files]
        self.meet()  # all have them open, so the files may go; what is open stays
        if self.leads:
            for file in files:
                file.unlink()
        names = dict.fromkeys(name for piece in pieces for name in piece)
        return {name: torch.cat([piece[name] for piece in pieces if name in piece]) for name in names}

    def last_words(self, message: str, code: int) -> tuple[str | None, int]:
        """What a process that fails says, and its exit code: of several, only the first says why.

        Args:
            message, code: what it would say and end with if it were alone.

        Returns:
            The message, None where it is another's to say it; and the code. torchrun interrupts all others
            when one has ended, so who was interrupted looks first whether that is the reason.
        """
        if not self.several:
            return message, code
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending already
        if self.meeting is None:
            return message if self.leads else None, code
        try:
            if code in INTERRUPTED:
                gone, told = self.meeting.gone(), self.meeting.failure()
                if told is not None:
                    code = told
                elif gone:
                    message, code = str(self.meeting.is_gone(gone[0])), 1
            return message if self.meeting.fail(code) else None, code
        except QuantizeError:  # the store is gone
            return message if self.leads else None, code


ALONE = Ranks()


def from_environment() -> Ranks:
    """Which of torchrun's processes this is, before they have met; `ALONE` where torchrun did not start it."""
    words = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if not all(word.isdigit() for word in words) or int(words[1]) < 2:
        return ALONE
    rank, count, local = map(int, words)
    return Ranks(rank, count, local)


def join(ranks: Ranks) -> Ranks:
    """Meet the others.

    Raises:
        InputError: they are not all on this machine.
        QuantizeError: one is gone already.
    """
    if not ranks.several:
        return ranks
    here = os.environ.get("LOCAL_WORLD_SIZE", str(ranks.count))
    if here != str(ranks.count):
        raise InputError(
            f"{here} of {ranks.count} processes are on this machine; all of them must be, for they share files "
            "and memory: give torchrun --nproc-per-node, and no --nnodes"
        )
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store that is gone is said in one line, by us
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public all the same
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://"))  # that of torchrun, or of rank 0
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun --max-restarts keeps its store
    return replace(ranks, meeting=Meeting(PrefixStore(f"quantize/{attempt}", store), ranks.rank, ranks.count))
