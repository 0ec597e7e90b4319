"""One of the models that go through the layers side by side: the states of its held-out texts.

The source is the first lane, and every candidate is one more. States lie in files, since what a layer leaves behind
is what an interrupted run goes on from: the source's cannot be computed again without reading the source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from quantizers.system.errors import QuantizeError
from quantizers.team.ranks import ALONE, Ranks

from .halves import attend, finish
from .layered_model import LayeredModel
from .states import Rows


class Lane:
    """One model's states, from layer to layer.

    Args:
        name: of the model, for messages.
        model: its structure and device.
        number: 0 for the source.
        lengths: tokens of each text.
        folder: an existing folder for the files, the same for all lanes.
        durable: whether states must be on disk before a layer counts as done.
        check: called between sequences; may raise to interrupt.
        ranks: the processes that share the texts.

    Attributes:
        left: the states that left the layer that ran last; between its halves, the residual stream.
        chosen: the experts that its router chose in the layer with experts that ran last, int32.
    """

    left: Rows

    def __init__(
        self,
        name: str,
        model: LayeredModel,
        number: int,
        lengths: Sequence[int],
        folder: Path,
        *,
        durable: bool,
        check: Callable[[], None] = lambda: None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.name, self.model, self.number = name, model, number
        self._lengths, self._folder, self._durable, self._check, self._ranks = lengths, folder, durable, check, ranks
        self.chosen = self._rows(f"chosen-{number}.bin", model.sizes["chosen"], torch.int32)

    def states(self, layer: int) -> Rows:
        """The states that enter a layer; the number of layers stands for those that leave the last."""
        return self._rows(self._file(layer), self.model.sizes["hidden"], self.model.dtype)

    def require(self, layer: int) -> None:
        """Refuse to go on at a layer whose states are gone, instead of taking zeros for them.

        Raises:
            QuantizeError: there is no file of the states that enter it.
        """
        path = self._folder / self._file(layer)
        if self._lengths and not path.exists():
            raise QuantizeError(f"{path}: is gone, and with it what the next layer reads; start over with --fresh")

    def _file(self, layer: int) -> str:
        return f"states-{self.number}-{layer:05d}.bin"

    def _rows(self, name: str, width: int, dtype: torch.dtype) -> Rows:
        return self._ranks.rank_zero_first(lambda: Rows(self._folder / name, self._lengths, width, dtype))

    def embed(self, texts: Sequence[torch.Tensor]) -> None:
        """Fill the states that enter layer 0 from token ids (T,) int64."""
        states = self.states(0)
        if self._ranks.leads:
            embed(self.model, texts, states)
        self._ranks.barrier()

    def attend(self, number: int, layer: torch.nn.Module) -> None:
        """Take all texts through the first half of a layer with this lane's weights; `left` is then the residual."""
        self.left = self.states(number + 1)
        attend(self.model, layer, self.states(number), self.left, self._check, self._ranks)

    def attend_as(self, other: Lane, number: int) -> None:
        """Take over the residual of a lane that entered the layer with the same states and has the same attention."""
        self.left = self.states(number + 1)
        if self._ranks.leads:
            self.left.flat.copy_(other.left.flat)
        self._ranks.barrier()

    def finish(self, number: int, layer: torch.nn.Module) -> None:
        """Take them through the second half.

        Raises:
            QuantizeError: an output is not finite.
        """
        where = f"{self.name}: layer {number}"
        finish(self.model, layer, self.left, where, self._check, self._ranks, chosen=self.chosen)
        if self._durable and self._ranks.leads:
            self.left.flush()

    def forget(self, number: int) -> None:
        """Remove the states that entered a layer, once those that left it are kept."""
        if self._ranks.leads:
            (self._folder / self._file(number)).unlink(missing_ok=True)


def embed(model: LayeredModel, texts: Sequence[torch.Tensor], states: Rows) -> None:
    """Fill the states that enter layer 0 from token ids (T,) int64."""
    if not texts:
        return
    table = model.embedding()
    for i, tokens in enumerate(texts):
        states[i] = table[tokens.to(table.device)]
