"""The two halves of a layer over the rows of many sequences, see streamed_model.py.

Attention runs on batches of whole sequences. What follows it treats every row alone, so it runs on chunks of rows
regardless of where a sequence ends: short sequences would give the experts a handful of tokens each. A layer without
halves runs on batches in both. Batches and chunks do not depend on the number of processes, so the bytes do not either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from quantizers.device.prefetch import prefetched
from quantizers.system.errors import QuantizeError

from .activation_store import ActivationStore
from .moe_inputs import MoeInputs, MoeInputStore
from .streamed_model import DecoderLayer, StreamedModel

Check = Callable[[], None]


def attend(
    model: StreamedModel,
    layer: DecoderLayer,
    before: ActivationStore,
    after: ActivationStore,
    check: Check = lambda: None,
) -> None:
    """The first half: from the states that enter the layer to the residual stream after attention.

    Args:
        before, after: may be the same.
        check: called between batches; may raise to interrupt.
    """
    if not layer.halves:
        if after is not before:
            after.flat.copy_(before.flat)
        return
    batches, device = batches_of(layer, before), model.device
    entering = prefetched([(before.flat[rows],) for rows, _ in batches], device)
    for (rows, lengths), (states,) in zip(batches, entering, strict=True):
        batch = model.attend(layer, padded(states, lengths))
        after.flat[rows].copy_(unpadded(batch, lengths))
        check()


def observe(
    model: StreamedModel,
    layer: DecoderLayer,
    states: ActivationStore,
    moe_inputs: MoeInputStore,
    check: Check = lambda: None,
) -> None:
    """The first half in place, and a capture of the experts' inputs. The experts do not run.

    Args:
        states: those that enter the layer; afterwards the residual stream.
        moe_inputs: filled here, with the rows of all processes.
        check: as for `attend`.
    """
    attend(model, layer, states, states, check)
    start = states.partition.start
    for rows, routed in routes(model, layer, states):
        moe_inputs.put(slice(start + rows.start, start + rows.stop), routed)
        check()
    moe_inputs.complete(states.partition.dist, states.partition.rows_of)


def finish(
    model: StreamedModel,
    layer: DecoderLayer,
    residual: ActivationStore,
    where: str,
    check: Check = lambda: None,
    *,
    chosen: ActivationStore | None = None,
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
    for rows, lengths, entering in second_half(model, layer, residual):
        output, choices = model.finish(layer, entering)
        if lengths:
            output = unpadded(output, lengths)
            choices = None if choices is None else unpadded(choices.view(*entering.shape[:2], -1), lengths)
        so_far = torch.isfinite(output[..., : model.hidden]).all()
        finite = so_far if finite is None else finite & so_far
        residual.flat[rows].copy_(output)
        if chosen is not None and choices is not None:
            chosen.flat[rows].copy_(choices)
        check()
    # Checked once: on an accelerator every check is a synchronisation.
    if finite is not None and not bool(finite):
        raise QuantizeError(
            f"{where}: its output is not finite and would spoil the layers after it; nothing can be computed here"
        )
    for kept in (residual, chosen):
        if kept is not None:
            kept.partition.complete(kept.flat)


def routes(model: StreamedModel, layer: DecoderLayer, states: ActivationStore) -> Iterator[tuple[slice, MoeInputs]]:
    """What the experts of a layer are called with; they do not run.

    Args:
        states: what the first half left.

    Yields:
        Some rows of `states`, and their routing.
    """
    for rows, lengths, entering in second_half(model, layer, states):
        routed = model.route(layer, entering)
        yield rows, routed.of_sequences(lengths) if lengths else routed


def second_half(
    model: StreamedModel, layer: DecoderLayer, states: ActivationStore
) -> Iterator[tuple[slice, list[int], torch.Tensor]]:
    """What goes through the second half of a layer together.

    Yields:
        Its rows in `states`; the tokens of each sequence if it is a batch, else nothing; and the rows on the device:
        a chunk (N, H), or a batch (B, T, H).
    """
    chunks: list[tuple[slice, list[int]]] = [(rows, []) for rows in states.partition.chunks()]
    parts = chunks if layer.halves else batches_of(layer, states)
    on_device = prefetched([(states.flat[rows],) for rows, _ in parts], model.device)
    for (rows, lengths), (entering,) in zip(parts, on_device, strict=True):
        yield rows, lengths, padded(entering, lengths) if lengths else entering


def batches_of(layer: DecoderLayer, states: ActivationStore) -> list[tuple[slice, list[int]]]:
    """The rows of the sequences that go through a layer together, and the tokens of each."""
    return [states.of_batch(range(i, i + 1)) for i in states.partition.sequences] if layer.alone else states.batches()


def padded(rows: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """(B, T, …) from the rows (Σ T_i, …) of B sequences, with zeros at the end of those that are shorter than T.

    Attention is causal, so no token sees the padding, which needs no mask. A view where all are of one length.
    """
    if len(set(lengths)) == 1:
        return rows.view(len(lengths), lengths[0], *rows.shape[1:])
    return torch.nn.utils.rnn.pad_sequence(list(torch.split(rows, list(lengths))), batch_first=True)


def unpadded(batch: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The rows (Σ T_i, …) again; a view where all are of one length."""
    if len(set(lengths)) == 1:
        return batch.flatten(0, 1)
    return torch.cat([sequence[:length] for sequence, length in zip(batch, lengths, strict=True)])
