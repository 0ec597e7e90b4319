"""The two halves of a layer over the rows of many sequences, see layered_model.py.

Attention runs on batches of whole sequences. What follows it treats every row alone, so it runs on blocks of rows that
do not care where a sequence ends: short sequences would give the experts a handful of tokens each. Neither unit depends
on the number of processes, so neither do the bytes. Of several processes each one takes on what it keeps, see share.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quantizers.system.errors import QuantizeError

from .batches import padded, unpadded
from .layered_model import LayeredModel
from .recorded import RecordedRows
from .states import Rows

Check = Callable[[], None]


def attend(
    model: LayeredModel,
    layer: torch.nn.Module,
    before: Rows,
    after: Rows,
    check: Check = lambda: None,
) -> None:
    """The first half: from the states that enter the layer to the residual stream after attention.

    Args:
        before, after: may be the same.
        check: called between batches; may raise to interrupt.
    """
    for rows, lengths in before.batches():
        batch = model.attend(layer, padded(before.flat[rows], lengths))
        after.flat[rows].copy_(unpadded(batch, lengths))
        check()


def observe(
    model: LayeredModel,
    layer: torch.nn.Module,
    states: Rows,
    recorded: RecordedRows,
    check: Check = lambda: None,
) -> None:
    """The first half in place, and what the experts are then called with. The experts do not run.

    Args:
        states: those that enter the layer; afterwards the residual stream.
        recorded: filled here, with the rows of all processes.
        check: as for `attend`.
    """
    attend(model, layer, states, states, check)
    start = states.share.start
    for block in states.blocks():
        rows = slice(start + block.start, start + block.stop)
        recorded.put(rows, model.route(layer, states.flat[block]))
        check()
    recorded.complete(states.share.team, states.share.rows_of)


def finish(
    model: LayeredModel,
    layer: torch.nn.Module,
    residual: Rows,
    where: str,
    check: Check = lambda: None,
    *,
    chosen: Rows | None = None,
) -> None:
    """The second half in place: from the residual stream to the states that leave the layer.

    Args:
        where: names the model and the layer in an error.
        chosen: gets the experts that the router chose, int32; left as it is by a layer without experts.
        check: as for `attend`.

    Raises:
        QuantizeError: an output is not finite.
    """
    finite: torch.Tensor | None = None
    for block in residual.blocks():
        output, choices = model.finish(layer, residual.flat[block])
        so_far = torch.isfinite(output).all()
        finite = so_far if finite is None else finite & so_far
        residual.flat[block].copy_(output)
        if chosen is not None and choices is not None:
            chosen.flat[block].copy_(choices)
        check()
    # Looked at once: on an accelerator every look waits for all that was launched.
    if finite is not None and not bool(finite):
        raise QuantizeError(
            f"{where}: its output is not finite and would spoil the layers after it; nothing can be computed here"
        )
    for rows in (residual, chosen):
        if rows is not None:
            rows.share.complete(rows.flat)
