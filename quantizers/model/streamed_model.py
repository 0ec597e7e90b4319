"""A model of which only one decoder layer is in memory at a time, made of transformers' own modules.

A layer is a copy of one of transformers' whole model on the meta device. It gets its weights, runs with the arguments
that the model's own forward passes to it, and its weights are freed. Only tables of which it looks rows up stay in the
files (table_rows.py).

Most layers are `residual + block(norm(residual))` from a residual stream that attention leaves, and run in two halves.
The first, `attend`, is the layer without its MoE block, a batch of sequences at a time. The second, `finish`, is norm,
router and experts, added to that. It treats every token alone, so it takes any rows of any sequences together; and
if only norm, router and experts change, the first half need not run again. Any other layer runs whole each time: its
first half leaves the states as they are. Only the call of the routed experts is intercepted, see experts_call.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.config_class import config_of
from quantizers.architectures.expert_probes import LARGE
from quantizers.architectures.experts_call import arguments_of, of_chosen_rows, replaced_experts, weighs_inputs
from quantizers.architectures.gates import gate_of
from quantizers.architectures.roles import EXACT
from quantizers.architectures.skeleton import Skeleton, first, replaced_forward
from quantizers.architectures.whole_class import model_class
from quantizers.formats.dequantization import read_weight
from quantizers.system.errors import ArchitectureError, CheckpointError

from .layer_weights import layer_weights
from .moe_inputs import MoeInputs, capture_moe_inputs
from .table_rows import TableRows

if TYPE_CHECKING:
    from quantizers.checkpoint.reader import Checkpoint


@dataclass(frozen=True)
class DecoderLayer:
    """A decoder layer of transformers' with its weights."""

    number: int
    module: torch.nn.Module
    halves: bool  # whether it runs in two halves
    alone: bool  # whether each sequence must go through it alone


class StreamedModel:
    """A checkpoint that is run layer by layer.

    Args:
        checkpoint: source or candidate, in any format that formats/dequantization.py reads; the tensors outside the
            layers suffice if the layers' own are given to `layer`.
        dtype: of the forward pass: float32 on a CPU, bfloat16 on an accelerator.
    """

    def __init__(self, checkpoint: Checkpoint, facts: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        self.checkpoint, self.facts = checkpoint, facts
        self.device = device
        self.dtype = dtype
        self.hidden = facts.hidden_size * facts.streams
        whole = model_class(facts.model_class, f"the facts of {facts.model_type}: model_class")
        try:
            config = config_of(whole, checkpoint.config)
        except ArchitectureError as failure:  # of a candidate's own config.json
            where = f"{checkpoint.folder / 'config.json'}"
            raise ArchitectureError(where, failure.without_remedy, failure.remedy) from None
        self.skeleton = Skeleton(whole, config, device, dtype)
        self._keeps_products: bool | None = None
        outside = [name for name in facts.outside if name not in (facts.embedding, facts.head)]
        # Clones: a view would keep the buffer of all of them.
        self.skeleton.put({name: self._plain(name).clone() for name in outside})

    def _plain(self, name: str) -> torch.Tensor:
        info = self.checkpoint.require(name, "a tensor outside the layers")
        tensor = self.checkpoint.tensor(info.name)
        if not bool(torch.isfinite(tensor.float()).all()):
            raise CheckpointError(info.file, f"{name} holds a NaN or infinity", "download this shard again")
        return tensor.to(device=self.device, dtype=self.dtype)

    def embedding(self) -> torch.Tensor:
        """The embedding table (vocabulary, H) in the model's dtype."""
        return self._plain(self.facts.embedding)

    @property
    def row_width(self) -> int:
        """The numbers of a token between two layers: H of its state, and behind it what is kept besides."""
        return self.facts.row_bytes(self.dtype.itemsize) // self.dtype.itemsize

    def begin(self, tokens: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """The rows (T, W) that enter layer 0, from token ids (T,) int64 and the embedding table."""
        here = tokens.to(self.device)
        return self.row(self.skeleton.begin(here.unsqueeze(0), embedding)[0].flatten(1), None, here)

    def row(
        self, states: torch.Tensor, handed: torch.Tensor | None = None, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows (…, W) of states (…, H), and of what the facts say is kept besides, if anything.

        States are rounded to the model's dtype: some layers add in float32, whatever they are given. Behind them are
        the bits of int32: how many numbers are handed on, these, or those of float32, and the token's id.

        Args:
            handed: what a layer hands on, (…, at most the facts' width); an ArchitectureError if it is more.
            tokens: ids (…); None for 0.
        """
        facts, states = self.facts.handed, states.to(self.dtype)
        if not self.facts.extra_columns:
            return states
        columns = torch.zeros(*states.shape[:-1], self.facts.extra_columns, dtype=torch.int32, device=states.device)
        if self.facts.tokens and tokens is not None:
            columns[..., -1] = tokens
        if facts is not None and handed is not None:
            count = handed.shape[-1]
            if count > facts.width:
                raise ArchitectureError(
                    f"{self.checkpoint.name}: {facts.argument}",
                    f"a layer hands on {count} numbers for a token, more than the {facts.width} that were found",
                    "such a model cannot be computed layer by layer here",
                )
            columns[..., 0] = count
            integers = handed.float().view(torch.int32) if facts.dtype == "float" else handed.to(torch.int32)
            columns[..., 1 : 1 + count] = integers.view(*states.shape[:-1], count)
        return torch.cat([states, columns.view(states.dtype)], -1)

    def handed(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Extract the tensor (1, T, …) that the previous layer passed on for one sequence, from its rows (1, T, W)."""
        facts = self.facts.handed
        if facts is None:
            return None
        columns = self._extra_columns(rows)
        if not (count := int(columns[0, 0, 0])):
            return None
        values = columns[..., 1 : 1 + count]
        if facts.dtype == "float":
            return values.contiguous().view(torch.float32).to(self.dtype)
        return values.to(getattr(torch, facts.dtype))

    def tokens(self, rows: torch.Tensor) -> torch.Tensor | None:
        """The token ids (…) int64 of rows (…, W), if the model's layers get them."""
        return self._extra_columns(rows)[..., -1].long() if self.facts.tokens else None

    def _extra_columns(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[..., self.hidden :].contiguous().view(torch.int32)

    def final(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute the input (T, H) of the head from the rows (T, W) that leave the last layer."""
        states = rows[:, : self.hidden].to(device=self.device, dtype=self.dtype)
        return self.skeleton.end(states.unsqueeze(0))[0]

    def head(self) -> torch.Tensor:
        """The output matrix (vocabulary, H) in the model's dtype."""
        return read_weight(self.checkpoint, self.facts.head.removesuffix(".weight"), self.device).to(self.dtype)

    def logits(self, products: torch.Tensor) -> torch.Tensor:
        """The logits (T, V) that the model makes of the products (T, V) of `final` and `head`."""
        if self._keeps_products is None:
            small = products[:1].unsqueeze(0)
            self._keeps_products = self.skeleton.logits(small) is small
        return products if self._keeps_products else self.skeleton.logits(products.unsqueeze(0))[0]

    @contextlib.contextmanager
    def layer(self, number: int, stored: Checkpoint | None = None, *, experts: bool = True) -> Iterator[DecoderLayer]:
        """A decoder layer with its weights, which are freed when the block ends.

        Args:
            stored: where its tensors are read, if not in the model's own checkpoint.
            experts: False leaves the routed experts' parameters on the meta device: the layer is then good for
                `attend` and `route`.
        """
        module, modules = self.skeleton.layer(number), self.facts.modules
        left_out = list(modules.idle)
        if number not in self.facts.dense:
            require_gate(module.get_submodule(modules.experts), self.facts, number)
            left_out += [] if experts else [f"{modules.experts}.{name}" for name in self.facts.expert_parameters]
        weights = layer_weights(stored or self.checkpoint, self.facts, number, self.device, self.dtype, experts=experts)
        # What transformers makes of some of a layer's tensors takes their place.
        parts = {name for names in self.facts.modules.converted.values() for name in names if name in weights}
        converted = self.skeleton.convert({self.facts.layer(number, name): weights.pop(name) for name in parts})
        prefix = f"{self.skeleton.path}.{number}."
        weights |= {name.removeprefix(prefix): weight for name, weight in converted.items()}
        for path, table in self.facts.tables(number).items():
            files = (stored and stored.files) or self.checkpoint.files
            assert files is not None, "the model's own checkpoint is a folder's, or was read from one; see `origin`"
            names = [self.facts.layer(number, name) for name in table.tensors]
            scale = table.scale and self.facts.layer(number, table.scale)
            module.set_submodule(path, TableRows(files, names, scale, self.device, self.dtype))
        load_layer(module, weights, self.facts, left_out)
        del weights  # otherwise what `release_experts` releases would live here until the block ends
        module.requires_grad_(False)
        stack = contextlib.ExitStack()
        if number not in self.facts.dense and weighs_inputs(routed := module.get_submodule(modules.experts)):
            stack.enter_context(replaced_experts(routed, of_chosen_rows(routed)))
        try:
            kind = self.facts.of_layer(number)
            yield DecoderLayer(number, module, kind.halves, kind.alone)
        finally:
            stack.close()
            module.to("meta")  # frees the weights even if someone still references the module

    def release_experts(self, layer: DecoderLayer) -> None:
        """Free the weights of a layer's routed experts; it has to be one with experts."""
        layer.module.get_submodule(self.facts.modules.experts).to("meta")

    def inputs(self, layer: DecoderLayer, states: torch.Tensor) -> dict[str, Any]:
        """The keyword arguments of transformers' layer for sequences of one length, from their rows (B, T, W)."""
        call, rows = self.skeleton.calls(states.shape[1])[layer.number], states.to(self.device, self.dtype)
        handed = self.handed(rows) if call.handed else None
        return call.of(rows[..., : self.hidden].contiguous(), handed, self.tokens(rows))

    @torch.no_grad()
    def attend(self, layer: DecoderLayer, states: torch.Tensor) -> torch.Tensor:
        """The first half of a layer: the residual stream after attention; the states themselves if it has no halves.

        They are of one sequence (T, H), or of several of one length (B, T, H); the result has the same shape.
        """
        if not layer.halves:
            return states.to(device=self.device, dtype=self.dtype)
        with replaced_forward(layer.module.get_submodule(self._block), _zeros):
            return self._whole(layer, states)

    @torch.no_grad()
    def route(self, layer: DecoderLayer, entering: torch.Tensor) -> MoeInputs:
        """Compute the inputs of a layer's experts without running them. `entering` as for `finish`."""
        with self._experts_called(layer) as calls, replaced_experts(self._experts(layer), _zeros):
            self._second_half(layer, entering)
        return capture_moe_inputs(*calls[0])

    @torch.no_grad()
    def finish(self, layer: DecoderLayer, entering: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The second half of a layer, with its own routing.

        Args:
            entering: what `attend` leaves: (T, H), rows of any sequences; for a layer without halves those of one
                sequence, or (B, T, H) of several of one length.

        Returns:
            The output in the same shape; and the chosen experts (rows, K) int64, None in a layer without experts.
        """
        if layer.number in self.facts.dense:
            return self._second_half(layer, entering), None
        with self._experts_called(layer) as calls:
            return self._second_half(layer, entering), calls[0][1]

    def run(self, layer: DecoderLayer, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One sequence through both halves of a layer: output (T, H), chosen experts (T, K) int64 or None."""
        return self.finish(layer, self.attend(layer, states))

    @contextlib.contextmanager
    def _experts_called(self, layer: DecoderLayer) -> Iterator[list[tuple[torch.Tensor, ...]]]:
        """The states, indices and weights of each call of a layer's experts within the block."""
        calls: list[tuple[torch.Tensor, ...]] = []

        def called(experts: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
            calls.append(arguments_of(experts, args, kwargs))

        hook = self._experts(layer).register_forward_pre_hook(called, with_kwargs=True)
        try:
            yield calls
        finally:
            hook.remove()

    def _experts(self, layer: DecoderLayer) -> torch.nn.Module:
        return layer.module.get_submodule(self.facts.modules.experts)

    @property
    def _block(self) -> str:
        """The path of a layer's MoE block, or of the MLP in a layer without experts."""
        return self.facts.modules.experts.rpartition(".")[0]

    def _whole(self, layer: DecoderLayer, states: torch.Tensor) -> torch.Tensor:
        """transformers' call of the layer with rows (T, W) or (B, T, W); the result has the same shape."""
        rows = states.view(-1, *states.shape[-2:])
        output = layer.module(**self.inputs(layer, rows))
        handed = None if self.facts.handed is None else output[self.facts.handed.entry]
        return self.row(first(output).flatten(2), handed, self.tokens(rows)).view_as(states)

    def _second_half(self, layer: DecoderLayer, entering: torch.Tensor) -> torch.Tensor:
        if not layer.halves:
            return self._whole(layer, entering)
        residual = entering.to(device=self.device, dtype=self.dtype)
        assert self.facts.modules.norm is not None, "a layer in halves has a norm"
        norm, block = (layer.module.get_submodule(path) for path in (self.facts.modules.norm, self._block))
        output: torch.Tensor = block(norm(residual.unsqueeze(0)))
        return residual + output[0]


def _zeros(states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Stands for a MoE block, or for the experts in it, and adds nothing."""
    return torch.zeros_like(states)


def load_layer(
    layer: torch.nn.Module, weights: Mapping[str, torch.Tensor], facts: Architecture, left_out: Collection[str] = ()
) -> None:
    """Give a decoder layer its weights by transformers' names, all but those `left_out` and no other.

    Raises:
        ArchitectureError: the layer does not have one, needs another, or has another shape for it.
    """
    about = f"the facts of {facts.model_type}"
    given = dict(weights)
    for name in facts.expert_parameters if facts.identities else ():
        full = f"{facts.modules.experts}.{name}"
        if full in given:  # of fewer experts: the class has room for those without matrices, and never reads it
            layer.get_submodule(facts.modules.experts).register_parameter(
                name, torch.nn.Parameter(given.pop(full), requires_grad=False)
            )
            left_out = [*left_out, full]
    try:
        missing, unknown = layer.load_state_dict(given, strict=False, assign=True)
    except RuntimeError as failure:
        reason = " ".join(str(failure).split()).removeprefix("Error(s) in loading state_dict for ")
        raise ArchitectureError(about, f"transformers' layer has other shapes ({reason})") from None
    if unknown:
        raise ArchitectureError(
            about,
            f"transformers' layer has no place for {unknown[0]}",
            "if the model computes without it, name it among the unread",
        )
    missing = [name for name in missing if name not in left_out]
    if missing:
        raise ArchitectureError(
            about, f"transformers' layer needs {missing[0]}", "name it among its tensors or linears"
        )


def require_gate(experts: torch.nn.Module, facts: Architecture, number: int) -> None:
    """An ArchitectureError if experts compute another product than act(gate) * up, and the facts do not say so.

    The Hessian of w2 is computed from that product, and the scale between w3 and w2 is exact for it alone.
    """
    if facts.of_layer(number).own_gate or "gate" not in facts.expert_linears or not hasattr(experts, "_apply_gate"):
        return
    products = LARGE * torch.randn(64, 16, generator=torch.Generator().manual_seed(0))  # a clamp shows in large ones
    plain, own = (gate_of(experts, own)(products) for own in (False, True))
    if not (own - plain).abs().max() < EXACT * plain.abs().max():
        raise ArchitectureError(
            f"the facts of {facts.model_type}",
            f"experts of {type(experts).__name__} do not compute act(gate) * up but a product of their own, of which "
            "these facts know nothing",
            "such a model cannot be quantized with them",
        )
