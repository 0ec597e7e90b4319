"""Counts where a model's router sends the tokens of texts, layer by layer.

Runs one sequence at a time without padding, so padding tokens cannot count. Two more counts are kept: of tokens whose
choice depends on a margin below TIE, which another machine may route differently; and of tokens that rank an expert
among the first 2 K, which shows what would help an expert that no token chooses. An expert outside the groups that a
token's router chose has no rank. On demand, routing weights times the norms of the experts' outputs are added up.

Legend: L layers with experts, C categories, E experts, T tokens of a sequence, K experts chosen per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.experts_call import arguments_of, weighs_inputs
from quantizers.architectures.skeleton import scores
from quantizers.distributed.process_group import ProcessGroup
from quantizers.model.activation_store import ActivationStore
from quantizers.model.moe_inputs import route_counts
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.system.errors import QuantizeError
from quantizers.walk.walk import all_tensors, walk

TIE = 1e-6  # difference between the scores of the experts ranked K and K + 1, or of the last group chosen and the next


@dataclass(frozen=True)
class Routed:
    """Router statistics by category, layer and expert; all arrays are int64 except the last.

    Attributes:
        categories: names of the rows, C of them, with the `tokens` (C,) of each.
        layers: the numbers of the layers with experts, L of them.
        counts: (L, C, E), tokens routed to each expert; `close`, how many of these depend on a margin below TIE.
        near: (L, C, E), tokens that rank the expert among the first 2 K.
        weighted_norms: (L, C, E) float64, routing weight times the L2 norm of the expert's output, which is not yet
            weighted, added up over the tokens routed to it; None if it was not asked for.
    """

    categories: tuple[str, ...]
    tokens: np.ndarray
    layers: tuple[int, ...]
    counts: np.ndarray
    close: np.ndarray
    near: np.ndarray
    weighted_norms: np.ndarray | None = None

    def part(self, prefix: str) -> Routed:
        """The categories that start with `prefix`, which is removed from their names."""
        rows = [i for i, name in enumerate(self.categories) if name.startswith(prefix)]
        names = tuple(self.categories[i].removeprefix(prefix) for i in rows)
        counts, close, near = (table[:, rows] for table in (self.counts, self.close, self.near))
        norms = None if self.weighted_norms is None else self.weighted_norms[:, rows]
        return Routed(names, self.tokens[rows], self.layers, counts, close, near, norms)


def count_routes(
    model: StreamedModel,
    sequences: Sequence[torch.Tensor],
    categories: Sequence[str],
    work: Path,
    shown: Callable[[str], None],
    dist: ProcessGroup,
    *,
    norms: bool = False,
) -> Routed:
    """Run texts through a model with natural routing.

    Args:
        sequences: (T,) int64 each, with their `categories`.
        work: an empty folder for the hidden states.
        shown: called after each layer.
        dist: the processes that share the sequences; each keeps the states of its own, and gets the result.
        norms: whether `weighted_norms` are made, for which the chosen experts run once more.

    Raises:
        QuantizeError: a layer's output is not finite.
    """
    names = tuple(sorted(set(categories)))
    rows = [names.index(category) for category in categories]
    tokens = np.bincount(rows, weights=[len(sequence) for sequence in sequences]).astype(np.int64)
    file = work / f"states-{dist.rank}.bin"
    counter = _RouteCounter(model, sequences, rows, len(names), file, dist=dist, norms=norms)
    with walk(model.checkpoint, all_tensors(model, model.checkpoint), model, dist=dist) as steps:
        for step in steps:
            with step.module() as layer:
                counter.count(layer)
            shown(f"layer {step.number}")
    counter.states.remove()
    tables = dist.all_gather({"tables": counter.tables.unsqueeze(0)}, torch.device("cpu"))["tables"]
    counts, close, near = tables.sum(0).numpy()
    return Routed(names, tokens, tuple(model.facts.moe_layers), counts, close, near, counter.weighted_norms)


class _RouteCounter:
    """Counts the routes of sequences, each of one category by number; a process takes every N-th of them.

    Its `tables` are counts, close and near of `Routed`, of this process's sequences; its `weighted_norms` are of all,
    added in their order in every process.
    """

    def __init__(
        self,
        model: StreamedModel,
        sequences: Sequence[torch.Tensor],
        categories: Sequence[int],
        count: int,
        file: Path,
        *,
        dist: ProcessGroup,
        norms: bool,
    ) -> None:
        self.model = model
        self.categories = categories
        self.dist = dist
        # Of all ranks one after another, as they gather; and this one's.
        every, ranks = range(len(sequences)), range(dist.world_size)
        self.gathered = [i for rank in ranks for i in every[rank :: dist.world_size]]
        self.own = every[dist.rank :: dist.world_size]
        self.states = ActivationStore(file, [len(sequences[i]) for i in self.own], model.row_width, model.dtype)
        embedding = model.embedding()
        for row, i in enumerate(self.own):
            self.states[row] = model.begin(sequences[i], embedding)
        shape = (len(model.facts.moe_layers), count, model.facts.num_experts)
        self.tables = torch.zeros(3, *shape, dtype=torch.int64)
        self.weighted_norms = np.zeros(shape) if norms else None

    def count(self, layer: DecoderLayer) -> None:
        """Take the sequences through a layer, and count the choices of its router if it has one."""
        model = self.model
        facts = model.facts
        number = layer.number
        experts, dense = facts.num_experts, number in facts.dense
        sums: list[torch.Tensor] = []
        with ExitStack() as stack:
            scores = [] if dense else _router_scores(layer, model, stack)
            if self.weighted_norms is not None and not dense:
                sums = _weighted_norms(layer, model, stack)
            for row, i in enumerate(self.own):
                output, chosen = model.run(layer, self.states[row])
                if not bool(torch.isfinite(output[:, : model.hidden]).all()):
                    raise QuantizeError(f"{model.checkpoint.name}: layer {number}", "its output is not finite")
                self.states[row] = output
                if chosen is not None:
                    near, tie = ranked(scores.pop(), facts)
                    kinds = (chosen, chosen[tie.to(chosen.device)], near)
                    counts = torch.stack([route_counts(choices, experts).cpu() for choices in kinds])
                    self.tables[:, facts.moe_layers.index(number), self.categories[i]] += counts
        if self.weighted_norms is not None and not dense:
            parts = self.dist.all_gather({"sums": torch.stack(sums)} if sums else {}, torch.device("cpu"))
            rows = dict(zip(self.gathered, parts["sums"].numpy(), strict=True))
            for i, category in enumerate(self.categories):
                self.weighted_norms[facts.moe_layers.index(number), category] += rows[i]


def ranked(scores: torch.Tensor, facts: Architecture) -> tuple[torch.Tensor, torch.Tensor]:
    """Which experts are near to being chosen, and which choices are nearly others, by the scores (T, E) of a router.

    Where a router divides the experts into groups, it adds up the best two scores of each, and chooses only in the
    groups with the largest sums (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Returns:
        The experts that tokens rank among the first 2 K, int64 of one dimension, one entry a token and expert; and (T,)
        bool, whether a token's choice depends on a margin below TIE.
    """
    tokens, experts = scores.shape
    chosen, (groups, last) = facts.top_k, facts.groups
    tie = torch.zeros(tokens, dtype=torch.bool, device=scores.device)
    if last < groups:
        in_groups = scores.view(tokens, groups, -1)
        order = in_groups.topk(2).values.sum(-1).sort(descending=True)
        tie |= order.values[:, last - 1] - order.values[:, last] < TIE
        outside = torch.zeros(tokens, groups, dtype=torch.bool, device=scores.device)
        outside.scatter_(1, order.indices[:, last:], True)
        scores = in_groups.masked_fill(outside.unsqueeze(-1), -torch.inf).view(tokens, experts)
    best, order_of_experts = scores.topk(min(2 * chosen, experts))
    if best.shape[1] > chosen:
        tie |= best[:, chosen - 1] - best[:, chosen] < TIE
    return order_of_experts[best > -torch.inf], tie


def _router_scores(layer: DecoderLayer, model: StreamedModel, stack: ExitStack) -> list[torch.Tensor]:
    """Captures within the block the scores (T, E) by which a layer's router chooses experts, or groups of them.

    A router may score more than the experts, behind them. Families with a correction bias pass it to the router as an
    argument, or it is a buffer of the router; with sigmoid scoring it is added to the probabilities.
    """
    captured: list[torch.Tensor] = []
    facts = model.facts
    experts = facts.num_experts + facts.identities

    def capture(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        made = scores(output, experts)
        if made is None:  # it returns its choice alone
            matrix = layer.module.get_parameter(facts.in_transformers(facts.router.tensor))
            made = torch.nn.functional.linear(inputs[0].float(), matrix.float())
        logits = made.float()
        own = (*inputs[1:], *module.buffers())
        extras = [extra for extra in own if torch.is_tensor(extra) and extra.shape == logits.shape[-1:]]
        choice_scores = logits.sigmoid() if facts.router.scoring == "sigmoid" else logits
        if facts.identities and extras:
            choice_scores = logits.softmax(-1)
        for extra in extras:
            choice_scores = choice_scores + extra
        captured.append(choice_scores.flatten(0, -2)[:, :experts])

    stack.callback(layer.module.get_submodule(model.facts.modules.router).register_forward_hook(capture).remove)
    return captured


def _weighted_norms(layer: DecoderLayer, model: StreamedModel, stack: ExitStack) -> list[torch.Tensor]:
    """Captures within the block (E,) float64: `weighted_norms` of `Routed` of each call of a layer's experts.

    The outputs are those of transformers' own module, called again with each choice of a token as a row of its own,
    and 1 as its weight: so gates, clamps and all else are the model's.
    """
    captured: list[torch.Tensor] = []

    def capture(
        module: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor], output: torch.Tensor
    ) -> None:
        x, chosen, weight = arguments_of(module, args, kwargs)
        if weighs_inputs(module):  # one expert of a token, and a block of all tokens for each
            outputs = output.view(-1, *x.shape).sum(0)
        else:
            rows, index = x.repeat_interleave(chosen.shape[1], 0), chosen.reshape(-1, 1)
            shares = torch.ones_like(weight).view(-1, 1)
            if model.facts.identities:  # whose class takes no call with one expert
                index, shares = index.expand(-1, 2), torch.cat([shares, torch.zeros_like(shares)], 1)
            outputs = module.forward(rows, index, shares)
        norms = torch.linalg.vector_norm(outputs, dim=-1, dtype=torch.float32)
        products = (weight.flatten().double() * norms).cpu()  # a GPU would add in no fixed order
        sums = torch.bincount(chosen.flatten().cpu(), products, model.facts.num_experts)
        captured.append(sums[: model.facts.num_experts])

    experts = layer.module.get_submodule(model.facts.modules.experts)
    stack.callback(experts.register_forward_hook(capture, with_kwargs=True).remove)
    return captured
