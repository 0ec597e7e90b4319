"""Σ x² of the inputs of every matrix of a layer, and of how many tokens, while texts go through the source's layers.

The inputs are the source's own, and so is the routing of the states that the next layer reads. Texts go through
attention one at a time, since padding would be counted otherwise. The sums of a layer go to a file of their own: there
a run that resumes finds them, and takes the texts through the layer alone.

A matrix of the routed experts has a sum for each expert: over the tokens that the router sends to it (`routed`, as
llama.cpp's own tool counts), over all tokens (`all`), so that no expert is without data, or over both, where a routed
token counts 9 E / K times more: at an even load they have 0.9 of the weight, as in a Hessian, and with few tokens less.
h, the input of down, is computed for these tokens as for a Hessian, see architectures/gates.py.

Legend: T rows, C columns of a matrix, N experts or 1, E experts, K experts chosen per token, H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load, save

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.experts_call import arguments_of
from quantizers.architectures.gates import gate_of
from quantizers.architectures.matrices import as_stacked, bias_of
from quantizers.device.devices import is_accelerator
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.model.activation_store import ActivationStore
from quantizers.model.activation_stream import embed
from quantizers.model.layer_forward import attend, finish
from quantizers.model.moe_inputs import MoeInputs, capture_moe_inputs, route_counts, usable_rows
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.planning.expert_batches import FLOAT, tokens_per_chunk
from quantizers.system.files import atomic, disk_errors

Tokens = Literal["both", "routed", "all"]
LayerSums = dict[str, "Sums"]
# Matrices that are no linear module of the source's, by what follows the layer's prefix.
HEAD = "head"
GATE, DOWN = "experts/gate", "experts/down"  # of the routed experts; up reads what gate reads
KV_B, K_B = ".kv_b_proj", ".k_b_proj"  # of latent attention, and the half of it that makes keys, see `_watch_keys`
ROUTED = 9  # the weight of the routed tokens at an even load, where that of all tokens is 1
ROWS = 4096  # that are squared at a time


@dataclass
class Sums:
    """Σ x² of the inputs of one matrix, or of the same matrix of all experts.

    Attributes:
        squares: (N, C), float64 while it is added up, then float32.
        counts: (N,) int64, the rows that were added up.
        left_out: (N,) int64, rows that are not finite, or whose squares would not be.
    """

    squares: torch.Tensor
    counts: torch.Tensor
    left_out: torch.Tensor

    def add(self, rows: torch.Tensor, at: int | slice = 0, usable: torch.Tensor | None = None, times: int = 1) -> None:
        """Add rows (T, C) to some of the N, so many times; `usable` (T,) bool leaves out more than those not finite."""
        good = usable_rows(rows) if usable is None else usable_rows(rows) & usable
        for some, kept in zip(rows.split(ROWS), good.split(ROWS), strict=True):
            self.squares[at] += some.float().masked_fill(~kept.unsqueeze(-1), 0).square().sum(0).mul_(times)
        self.counts[at] += times * good.sum()
        self.left_out[at] += (~good).sum()


def no_sums(matrices: int, columns: int, device: torch.device) -> Sums:
    """Sums of no rows."""
    counts = torch.zeros(2, matrices, dtype=torch.int64, device=device)
    return Sums(torch.zeros(matrices, columns, dtype=torch.float64, device=device), counts[0], counts[1])


class InputSums:
    """Takes texts through the source's layers, and adds up the squares of what their matrices read.

    Args:
        model: the source.
        sequences: token ids (T,) int64 of all texts, of which each process takes its share.
        folder: for the sums of each layer, which rank 0 writes, and for the states of each process's texts. Sums that
            are there already are kept.
        tokens: of each expert's matrices, see above.
        check: called between batches; may raise to interrupt.
    """

    def __init__(
        self,
        model: StreamedModel,
        sequences: Sequence[torch.Tensor],
        folder: Path,
        tokens: Tokens,
        *,
        check: Callable[[], None] = lambda: None,
        dist: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        self.model = model
        self.folder = folder
        self.tokens = tokens
        self._check = check
        self._dist = dist
        folder.mkdir(parents=True, exist_ok=True)
        own = [sequences[i] for i in range(dist.rank, len(sequences), dist.world_size)]
        chunk = tokens_per_chunk(is_accelerator(model.device))
        path, lengths = folder / f"states-{dist.rank}.bin", [len(sequence) for sequence in own]
        self.states = ActivationStore(path, lengths, model.row_width, model.dtype, chunk=chunk)
        embed(model, own, self.states)

    def add_layer(self, layer: DecoderLayer) -> None:
        """Take the texts through a layer, and add up what its matrices read, unless that is done."""
        file = sums_file(self.folder, layer.number)
        if self._dist.broadcast_object(file.exists()):
            self._follow(layer)
            return
        with self._watched(layer) as sums:
            self._follow(layer)
        self._keep(file, sums)

    def end(self) -> None:
        """After the last layer, add up what the head reads; the states are removed."""
        sums = no_sums(1, self.model.facts.hidden_size, self.model.device)
        for rows in self.states.chunks():
            sums.add(self.model.final(self.states.flat[rows]))
        self._keep(sums_file(self.folder, None), {HEAD: sums})
        self.states.remove()

    def _follow(self, layer: DecoderLayer) -> None:
        """Take the texts through a layer. Raises a QuantizeError if an output is not finite."""
        unpadded = replace(layer, alone=True)
        attend(self.model, unpadded, self.states, self.states, self._check)
        where = f"{self.model.checkpoint.name}: layer {layer.number}"
        finish(self.model, unpadded, self.states, where, self._check)

    def _keep(self, file: Path, sums: LayerSums) -> None:
        """Write the sums of all processes together, atomically."""
        tensors = {}
        for name, matrix_sums in sums.items():
            for field, values in vars(matrix_sums).items():
                tensors[f"{name}:{field}"] = values.unsqueeze(0)
        gathered = self._dist.all_gather(tensors, torch.device("cpu"))
        whole = {name: by_process.sum(0) for name, by_process in gathered.items()}
        if self._dist.is_main:
            with disk_errors(file), atomic(file) as stream:
                stream.write(save({n: t.float() if t.is_floating_point() else t for n, t in whole.items()}))

    @contextmanager
    def _watched(self, layer: DecoderLayer) -> Iterator[LayerSums]:
        """Sums of a layer's matrices, to which all that goes through them in the block is added."""
        facts, device = self.model.facts, self.model.device
        sums = LayerSums()
        hooks = ExitStack()
        for name, (_, columns) in facts.of_layer(layer.number).linears.items():
            module = layer.module.get_submodule(module_of(self.model, name))
            sums[name] = no_sums(1, columns, device)
            hooks.callback(module.register_forward_pre_hook(partial(_add_input, sums[name])).remove)
            if name.endswith(KV_B):
                hooks.callback(self._watch_keys(layer, name.removesuffix(KV_B), sums).remove)
        if layer.number not in facts.dense:
            experts: Any = layer.module.get_submodule(facts.modules.experts)
            count = facts.num_experts
            sums[GATE] = no_sums(count, facts.expert_inputs, device)
            sums[DOWN] = no_sums(count, facts.expert_width, device)
            own_gate = facts.of_layer(layer.number).own_gate

            def add_inputs(module: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
                add_experts(
                    sums,
                    module,
                    capture_moe_inputs(*arguments_of(module, args, kwargs)),
                    self.tokens,
                    own_gate,
                    **facts.modules.layout,
                )

            hooks.callback(experts.register_forward_pre_hook(add_inputs, with_kwargs=True).remove)
        with hooks:
            yield sums

    def _watch_keys(self, layer: DecoderLayer, attention: str, sums: LayerSums) -> Any:
        """A hook for the half of latent attention's kv_b_proj that makes keys.

        llama.cpp stores it transposed, and multiplies it with the part of each head's query that is not rotated.
        """
        linears, heads = self.model.facts.of_layer(layer.number).linears, self.model.facts.num_heads
        name = next(name for name in (f"{attention}.q_b_proj", f"{attention}.q_proj") if name in linears)
        query = module_of(self.model, name)
        module: Any = layer.module.get_submodule(query.rpartition(".")[0])
        width: int = module.qk_nope_head_dim
        sums[attention + K_B] = keys = no_sums(1, heads * width, self.model.device)

        def add(_: Any, __: Any, output: torch.Tensor) -> None:
            keys.add(output.flatten(0, -2).unflatten(-1, (heads, -1))[..., :width].flatten(1))

        return layer.module.get_submodule(query).register_forward_hook(add)


def sums_file(folder: Path, layer: int | None) -> Path:
    """Path of the file where `InputSums` keeps the sums of a layer; None for those of the head, which come last."""
    return folder / ("head.safetensors" if layer is None else f"{layer:05d}.safetensors")


def read_sums(folder: Path, layer: int | None) -> LayerSums:
    """The sums of a layer from their file; None for the head."""
    stored = load(sums_file(folder, layer).read_bytes())
    names = dict.fromkeys(name.rpartition(":")[0] for name in stored)
    return {name: Sums(*(stored[f"{name}:{field.name}"] for field in fields(Sums))) for name in names}


def bytes_of_sums(facts: Architecture, tokens: int, itemsize: int) -> int:
    """Bytes of all that `InputSums` writes for so many tokens, and of the matrix made of it."""
    experts = len(facts.moe_layers) * facts.num_experts * (3 * facts.expert_inputs + 2 * facts.expert_width)
    return tokens * facts.row_bytes(itemsize) + FLOAT * experts


def _add_input(sums: Sums, _: Any, args: tuple[torch.Tensor, ...]) -> None:
    """A forward pre-hook that adds a linear module's input."""
    sums.add(args[0].flatten(0, -2))


def module_of(model: StreamedModel, name: str) -> str:
    """The path in transformers' layer of the module that a linear module, by its published name, is or is part of."""
    weight = f"{name}.weight"
    for parameter, parts in model.facts.modules.converted.items():
        if weight in parts:
            return parameter.removesuffix(".weight")
    return model.facts.in_transformers(weight).removesuffix(".weight")


def add_experts(
    sums: LayerSums, experts: Any, inputs: MoeInputs, tokens: Tokens, own_gate: bool, **layout: bool
) -> None:
    """Add what the matrices of a layer's experts read of some rows to GATE and DOWN of `sums`.

    Args:
        experts: transformers' module with its weights, which `layout` says how it holds, see `Modules`.
        own_gate: whether it has a gate of its own, see architectures/gates.py.
    """
    gate_up, _ = as_stacked(experts, **layout)
    plain, bias = gate_of(experts, own_gate), bias_of(experts, **layout)

    def gate(products: torch.Tensor, expert: int) -> torch.Tensor:
        return plain(products if bias is None else products + bias[expert].unsqueeze(-1))

    chosen = inputs.chosen.long()
    if tokens != "routed":
        sums[GATE].add(inputs.x, slice(None), inputs.usable)
        for expert, weight in enumerate(gate_up):
            sums[DOWN].add(gate(weight @ inputs.x.mT, expert).mT, expert, inputs.usable)
    if tokens == "all":
        return
    times = ROUTED * len(gate_up) // chosen.shape[1] if tokens == "both" else 1
    counts: list[int] = route_counts(chosen, len(gate_up)).tolist()
    rows_by_expert = chosen.flatten().argsort(stable=True) // chosen.shape[1]
    others = len(rows_by_expert) - sum(counts)  # to experts without matrices, which come last
    for expert, rows in enumerate(rows_by_expert.split([*counts, others])[:-1]):
        if len(rows):
            x, usable = inputs.x[rows], inputs.usable[rows]
            sums[GATE].add(x, expert, usable, times)
            sums[DOWN].add(gate(gate_up[expert] @ x.mT, expert).mT, expert, usable, times)
