"""The two halves of a layer over the rows of many sequences, see streamed_model.py.

Attention runs on batches of whole sequences, what follows on chunks of rows, regardless of where a sequence ends: short
sequences would give the experts a handful of tokens each. A layer without halves runs on batches in both. Batches and
chunks do not depend on the number of processes, so the bytes do not either.
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
    """The first half: from the states `before` it to the residual stream `after` attention; both may be the same store.

    `check` is called between batches, as in all functions here, and may raise to interrupt.
    """
    if not layer.halves:
        if after is not before:
            after.flat.copy_(before.flat)
        return
    for rows, lengths, entering in on_device(model, layer, before, in_chunks=False):
        after.flat[rows].copy_(unpadded(model.attend(layer, entering), lengths))
        check()


def observe(
    model: StreamedModel,
    layer: DecoderLayer,
    states: ActivationStore,
    moe_inputs: MoeInputStore,
    check: Check = lambda: None,
) -> None:
    """The first half in place, and a capture of the experts' inputs, which do not run.

    Args:
        states: those that enter the layer; afterwards the residual stream.
        moe_inputs: filled here, with the rows of all processes.
    """
    attend(model, layer, states, states, check)
    for rows, routed in routes(model, layer, states):
        moe_inputs.put(slice(states.start + rows.start, states.start + rows.stop), routed)
        check()
    moe_inputs.complete(states)


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

    Raises:
        QuantizeError: an output is not finite.
    """
    finite: list[torch.Tensor] = []
    for rows, lengths, entering in on_device(model, layer, residual, in_chunks=layer.halves):
        output, choices = model.finish(layer, entering)
        if lengths:
            output = unpadded(output, lengths)
            choices = None if choices is None else unpadded(choices.view(*entering.shape[:2], -1), lengths)
        finite.append(torch.isfinite(output[..., : model.hidden]).all())
        residual.flat[rows].copy_(output)
        if chosen is not None and choices is not None:
            chosen.flat[rows].copy_(choices)
        check()
    # Checked once: on an accelerator every check is a synchronisation.
    if finite and not bool(torch.stack(finite).all()):
        raise QuantizeError(
            where, "its output is not finite and would spoil the layers after it", "nothing can be computed here"
        )
    for kept in (residual, chosen):
        if kept is not None:
            kept.complete()


def run_whole(model: StreamedModel, layer: DecoderLayer, states: ActivationStore, check: Check = lambda: None) -> None:
    """Both halves of a layer without halves, of whose result nothing is kept: for what looks on."""
    for _, _, entering in on_device(model, layer, states, in_chunks=False):
        model.finish(layer, entering)
        check()


def routes(model: StreamedModel, layer: DecoderLayer, states: ActivationStore) -> Iterator[tuple[slice, MoeInputs]]:
    """Some rows of the `states` that the first half left, and what the experts are called with for them, each time."""
    for rows, lengths, entering in on_device(model, layer, states, in_chunks=layer.halves):
        routed = model.route(layer, entering)
        yield rows, routed.of_sequences(lengths) if lengths else routed


def on_device(
    model: StreamedModel, layer: DecoderLayer, states: ActivationStore, *, in_chunks: bool
) -> Iterator[tuple[slice, list[int], torch.Tensor]]:
    """Load the inputs of half a layer to the device: one chunk of rows, or one batch of sequences, at a time.

    Yields:
        The rows in `states`; the tokens of each sequence of a batch, nothing for a chunk; and on the device the chunk
        (N, H), or the padded batch (B, T, H).
    """
    parts: list[tuple[slice, list[int]]]
    if in_chunks:
        parts = [(rows, []) for rows in states.chunks()]
    elif layer.alone:
        parts = [states.of_batch(range(i, i + 1)) for i in states.sequences]
    else:
        parts = [states.of_batch(batch) for batch in states.batches if batch.start in states.sequences]
    prefetching = prefetched([(states.flat[rows],) for rows, _ in parts], model.device)
    for (rows, lengths), (entering,) in zip(parts, prefetching, strict=True):
        yield rows, lengths, padded(entering, lengths) if lengths else entering


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
