"""The two halves of a layer over the rows of many sequences, see layered_model.py.

Attention runs sequence by sequence. What follows it treats every row alone, so it runs on blocks of rows that do not
care where a sequence ends: short sequences would give the experts a handful of tokens each. Neither unit depends on
the number of processes, so neither do the bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quantizers.system.errors import QuantizeError
from quantizers.team.ranks import ALONE, Ranks

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
    ranks: Ranks = ALONE,
) -> None:
    """The first half: from the states that enter the layer to the residual stream after attention.

    Args:
        before, after: may be the same.
        check: called between sequences; may raise to interrupt.
        ranks: who shares the sequences; all of them wait until all rows are there.
    """
    for i in ranks.round_robin(len(before)):
        after[i] = model.attend(layer, before[i])
        check()
    ranks.barrier()


def observe(
    model: LayeredModel,
    layer: torch.nn.Module,
    states: Rows,
    recorded: RecordedRows,
    check: Check = lambda: None,
    ranks: Ranks = ALONE,
) -> None:
    """The first half in place, and what the experts are then called with. The experts do not run.

    Args:
        states: those that enter the layer; afterwards the residual stream.
        recorded: filled here.
        check, ranks: as for `attend`.
    """
    attend(model, layer, states, states, check, ranks)
    blocks = states.blocks()
    for i in ranks.round_robin(len(blocks)):
        recorded.put(blocks[i], model.route(layer, states.flat[blocks[i]]))
        check()
    ranks.barrier()


def finish(
    model: LayeredModel,
    layer: torch.nn.Module,
    residual: Rows,
    where: str,
    check: Check = lambda: None,
    ranks: Ranks = ALONE,
    *,
    chosen: Rows | None = None,
) -> None:
    """The second half in place: from the residual stream to the states that leave the layer.

    Args:
        where: names the model and the layer in an error.
        chosen: gets the experts that the router chose, int32; left as it is by a layer without experts.
        check, ranks: as for `attend`.

    Raises:
        QuantizeError: an output is not finite.
    """
    blocks = residual.blocks()
    finite: torch.Tensor | None = None
    for i in ranks.round_robin(len(blocks)):
        output, choices = model.finish(layer, residual.flat[blocks[i]])
        so_far = torch.isfinite(output).all()
        finite = so_far if finite is None else finite & so_far
        residual.flat[blocks[i]].copy_(output)
        if chosen is not None and choices is not None:
            chosen.flat[blocks[i]].copy_(choices)
        check()
    # Looked at once: on an accelerator every look waits for all that was launched.
    if finite is not None and not bool(finite):
        raise QuantizeError(
            f"{where}: its output is not finite and would spoil the layers after it; nothing can be computed here"
        )
    ranks.barrier()
