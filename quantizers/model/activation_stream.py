"""The activations of one model on the held-out texts, from layer to layer; the source and each candidate have a stream.

They are in files, from which an interrupted run resumes. Where the device has room for them they are kept there, and
written to the file once a layer; several processes keep their parts in memory, and rank 0 writes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import torch

from quantizers.device.devices import is_accelerator
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.planning.expert_batches import tokens_per_chunk
from quantizers.system.errors import QuantizeError

from .activation_store import ActivationStore
from .layer_forward import attend, finish
from .streamed_model import DecoderLayer, StreamedModel


@dataclass(eq=False)
class ActivationStream:
    """One model's states, from layer to layer.

    Attributes:
        name: of the model, for messages.
        number: 0 for the source.
        lengths: tokens of each text.
        folder: an existing folder for the files, the same for all streams.
        durable: whether states must be on disk before a layer counts as done.
        check: called between batches; may raise to interrupt.
        device: where the states are kept; None for the files themselves, or for memory in one of several processes.
        writer: a thread that flushes durable states while the next layer is worked on, see `on_disk`; None for this
            one, which then waits for the disk.
        left: the states that left the layer that ran last; between its halves, the residual stream.
        chosen: the experts that its router chose in the layer with experts that ran last, int32.
    """

    name: str
    model: StreamedModel
    number: int
    lengths: Sequence[int]
    folder: Path
    _: KW_ONLY
    durable: bool
    check: Callable[[], None] = lambda: None
    dist: ProcessGroup = SINGLE_PROCESS
    device: torch.device | None = None
    writer: Executor | None = None
    left: ActivationStore = field(init=False)
    _flushed: dict[int, Future[None]] = field(init=False, default_factory=dict)
    _states: dict[int, ActivationStore] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._in_files = self.device is None and not self.dist.is_distributed
        self.chosen = self._rows(self.folder / f"chosen-{self.number}.bin", self.model.facts.top_k, torch.int32)

    def states(self, layer: int) -> ActivationStore:
        """The states that enter a layer; the number of layers stands for those that leave the last."""
        if layer not in self._states:
            self._states[layer] = self._rows(self._file(layer), self.model.row_width, self.model.dtype)
        return self._states[layer]

    def _resume(self, layer: int) -> None:
        """Take the states that enter a layer from their file, of which rank 0 gives each process its part."""
        path = self._file(layer)
        if self.dist.is_main and self.lengths and not path.exists():
            raise QuantizeError(
                path, "is missing, so the run cannot be resumed", "start over with --fresh, or in another --work"
            )
        if not self._in_files:
            self.states(layer).deal(self._whole(layer).flat if self.dist.is_main else None)

    def _whole(self, layer: int) -> ActivationStore:
        """The file of the states that enter a layer, with the rows of all processes."""
        return ActivationStore(self._file(layer), self.lengths, self.model.row_width, self.model.dtype)

    def _file(self, layer: int) -> Path:
        return self.folder / f"states-{self.number}-{layer:05d}.bin"

    def _rows(self, file: Path, width: int, dtype: torch.dtype) -> ActivationStore:
        path = file if self._in_files else None
        chunk = tokens_per_chunk(is_accelerator(self.model.device))
        return ActivationStore(path, self.lengths, width, dtype, self.device, dist=self.dist, chunk=chunk)

    def enter(self, layer: int, texts: Sequence[torch.Tensor]) -> None:
        """Take the states that enter a layer: from token ids (T,) int64 at layer 0, from their file at any other."""
        if layer == 0:
            embed(self.model, texts, self.states(0))
        else:
            self._resume(layer)

    def advance(self, layer: DecoderLayer) -> None:
        """Take all texts through a layer with this stream's weights; a QuantizeError if an output is not finite."""
        self.attend(layer)
        self.finish(layer)

    def attend(self, layer: DecoderLayer) -> None:
        """Take all texts through the first half of a layer; `left` is then the residual stream."""
        self.left = self.states(layer.number + 1)
        attend(self.model, layer, self.states(layer.number), self.left, self.check)
        self._states.pop(layer.number)  # the file stays until it is forgotten

    def begin(self, number: int) -> ActivationStore:
        """Fill `left` with the states that enter a layer, for a caller that takes it through the layer in place."""
        self.left = self.states(number + 1)
        self.left.flat.copy_(self.states(number).flat)
        self._states.pop(number)
        return self.left

    def finish(self, layer: DecoderLayer) -> None:
        """Take them through the second half; a QuantizeError if an output is not finite."""
        where = f"{self.name}: layer {layer.number}"
        finish(self.model, layer, self.left, where, self.check, chosen=self.chosen)
        self.keep(layer.number + 1)

    def keep(self, layer: int) -> None:
        """Write the states that enter a layer to their file if they are durable, and flush it."""
        if not self.durable:
            return
        whole = self._whole(layer) if self.dist.is_main and not self._in_files else self.left
        if not self._in_files:
            self.left.collect(whole.flat if self.dist.is_main else None)
        if self.dist.is_main and self.writer is not None:
            self._flushed[layer] = self.writer.submit(whole.flush)
        elif self.dist.is_main:
            whole.flush()

    def on_disk(self, layer: int) -> None:
        """Wait for the states that enter a layer to be on the disk; a QuantizeError if they could not be written."""
        if layer in self._flushed:
            self._flushed.pop(layer).result()

    def forget(self, number: int) -> None:
        """Remove the states that entered a layer, once those that left it are kept."""
        self._states.pop(number, None)
        if self.dist.is_main:
            self._file(number).unlink(missing_ok=True)


def embed(model: StreamedModel, texts: Sequence[torch.Tensor], states: ActivationStore) -> None:
    """Fill the states that enter layer 0 from the token ids (T,) int64 of all texts."""
    if not len(states):
        return
    table = model.embedding()
    for number in states.sequences:
        states[number] = model.begin(texts[number], table)
