"""Which process this is, of how many that work on one run: the same bytes as one process gives, sooner.

    torchrun --nproc-per-node 4 -m quantizers run RECIPE --output DIR

and the same for `eval` and `coverage`, which have sequences only.

Sequences go to the processes round-robin, units of experts in contiguous shares. Neither unit of work depends
on the number of processes: every matmul keeps its shape, and sums over sequences or experts are added up in
their order by every process. That is why the bytes are the same.

No tensor is sent. Hidden states lie in files that all processes map, and solved experts are gathered through
files as well, so all processes must be on one machine. Only rank 0 asks the user, writes the journal and the
output, and proves it.
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

from .rendezvous import Rendezvous

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
        rendezvous: how the processes wait for each other; None before `join`, and where there is one process.
        folder: where `gather` exchanges files; created when needed, the same for all ranks.
        check: called while waiting; may raise.
    """

    rank: int = 0
    count: int = 1
    local: int = 0
    rendezvous: Rendezvous | None = None
    folder: Path | None = None
    check: Callable[[], None] = lambda: None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.count > 1

    def at(self, folder: Path, check: Callable[[], None]) -> Ranks:
        """The same, with a folder and a check."""
        return replace(self, folder=folder, check=check)

    def round_robin(self, items: int) -> range:
        """This rank's share of `items` items of unequal size: every count-th."""
        return range(self.rank, items, self.count)

    def contiguous(self, items: int) -> range:
        """This rank's share of `items` items: consecutive ones, in the order of ranks."""
        return range(items * self.rank // self.count, items * (self.rank + 1) // self.count)

    def barrier(self) -> None:
        """Wait until all processes have called this. Raises as `Rendezvous.barrier` does."""
        if self.rendezvous:
            self.rendezvous.barrier(self.check)

    def rank_zero_first(self, make: Callable[[], Made]) -> Made:
        """`make()`, called by rank 0 before the others, which then find what it created or cached."""
        if self.leads:
            made = make()
            self.barrier()
            return made
        self.barrier()
        return make()

    def finish(self) -> None:
        """This process has done its part, and may end before the others."""
        if self.rendezvous:
            with contextlib.suppress(QuantizeError):
                self.rendezvous.finish()

    def broadcast(self, key: str, value: Any) -> None:
        """From rank 0: store a value, anything that JSON holds, for the others to `receive`."""
        if self.rendezvous:
            self.rendezvous.send(key, json.dumps(value))

    def receive(self, key: str) -> Any:
        """In the other ranks: wait for the value that rank 0 broadcasts."""
        assert self.rendezvous, "one process has nothing to receive"
        return json.loads(self.rendezvous.receive(key, self.check))

    def gather(self, parts: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """The rows of all ranks, concatenated in the order of ranks.

        Args:
            parts: this rank's rows by name; a name that is missing here stands for no rows.
            device: where the result is wanted.

        Returns:
            The same in every process, with every name that any process has.
        """
        if self.rendezvous is None:
            return dict(parts)
        import torch
        from safetensors.torch import load_file, save_file

        from quantizers.system.atomic import disk_errors

        assert self.folder
        files = [self.folder / f"{self.rendezvous.number}-{rank}.safetensors" for rank in range(self.count)]
        with disk_errors(files[self.rank]):
            self.folder.mkdir(exist_ok=True)
            save_file({name: part.cpu().contiguous() for name, part in parts.items()}, files[self.rank])
        self.barrier()
        pieces = [load_file(file, str(device)) for file in files]
        self.barrier()  # all have them open, so the files may go; what is open stays
        if self.leads:
            for file in files:
                file.unlink()
        names = dict.fromkeys(name for piece in pieces for name in piece)
        return {name: torch.cat([piece[name] for piece in pieces if name in piece]) for name in names}

    def last_words(self, message: str, code: int) -> tuple[str | None, int]:
        """What a failing process prints, and its exit code: of several, only the first prints why.

        Args:
            message, code: what it would print and end with if it were the only process.

        Returns:
            The message, None where another process prints it; and the code. torchrun interrupts all others
            when one has ended, so a process that was interrupted first checks whether that is the reason.
        """
        if not self.several:
            return message, code
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending already
        if self.rendezvous is None:
            return message if self.leads else None, code
        try:
            if code in INTERRUPTED:
                gone, failure = self.rendezvous.gone(), self.rendezvous.failure()
                if failure is not None:
                    code = failure
                elif gone:
                    message, code = str(self.rendezvous.is_gone(gone[0])), 1
            return message if self.rendezvous.fail(code) else None, code
        except QuantizeError:  # the store is gone
            return message if self.leads else None, code


ALONE = Ranks()


def from_environment() -> Ranks:
    """Which of torchrun's processes this is, not yet joined; `ALONE` where torchrun did not start it."""
    words = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if not all(word.isdigit() for word in words) or int(words[1]) < 2:
        return ALONE
    rank, count, local = map(int, words)
    return Ranks(rank, count, local)


def join(ranks: Ranks) -> Ranks:
    """Connect to the other processes.

    Raises:
        InputError: they are not all on this machine.
        QuantizeError: one has died already.
    """
    if not ranks.several:
        return ranks
    here = os.environ.get("LOCAL_WORLD_SIZE", str(ranks.count))
    if here != str(ranks.count):
        raise InputError(
            f"{here} of {ranks.count} processes are on this machine; all of them must be, for they share files "
            "and memory: give torchrun --nproc-per-node, and no --nnodes"
        )
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # we report a lost store ourselves, in one line
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public all the same
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://"))  # that of torchrun, or of rank 0
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun --max-restarts keeps its store
    return replace(ranks, rendezvous=Rendezvous(PrefixStore(f"quantize/{attempt}", store), ranks.rank, ranks.count))
