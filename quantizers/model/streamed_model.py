"""A model of which only one decoder layer is in memory at a time.

A layer is built with transformers' class on the meta device, where it needs no memory. It gets its weights, runs,
and goes back to the meta device.

A layer runs in two halves. The first, `attend`, is the layer without its MoE block: the residual stream after
attention, a batch of sequences at a time. The second, `finish`, is norm, router and experts, added to that. It treats
every token alone, so it takes any rows of any sequences together; and if only norm, router and experts change, as they
do when a layer is quantized, the first half need not run again. Both are made of transformers' own modules. Only the
call of the routed experts is intercepted, with arguments `(hidden_states, top_k_index, top_k_weights)`, which all
MoE models in transformers share.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.rotary import transformers_config
from quantizers.architectures.sizes import Sizes
from quantizers.formats.dequantization import read_weight
from quantizers.formats.tensor_names import FUSED
from quantizers.system.errors import ArchitectureError, CheckpointError

from .layer_weights import layer_weights
from .moe_inputs import MoeInputs, capture_moe_inputs

if TYPE_CHECKING:
    from quantizers.checkpoint.reader import Checkpoint


class _StandIn(torch.nn.Module):
    """Replaces the MoE block, or the experts in it: keeps the arguments and returns zeros."""

    seen: tuple[torch.Tensor, ...]

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        self.seen = arguments
        return torch.zeros_like(arguments[0])


class StreamedModel:
    """A checkpoint that is run layer by layer.

    Args:
        checkpoint: source or candidate, in any format that formats/dequantization.py reads; the tensors outside the
            layers suffice if the layers' own are given to `layer`.
        facts, sizes: its architecture.
        device: the device on which layers run.
        dtype: dtype of the forward pass: float32 on a CPU, bfloat16 on an accelerator.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        facts: Architecture,
        sizes: Sizes,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.checkpoint, self.facts, self.sizes = checkpoint, facts, sizes
        self.device, self.dtype = device, dtype
        model_class = class_of(facts)
        config = model_class.config_class(**transformers_config(facts, checkpoint.config, sizes))
        config._attn_implementation = "sdpa"  # causal even with mask None; eager attention is not
        # One grouped matmul for all experts on an accelerator; on a CPU the plain loop is faster.
        config._experts_implementation = "eager" if device.type == "cpu" else "grouped_mm"
        self.config = config
        # Build only one layer here, the others when they are needed: in a deep model even empty layers take memory.
        short = copy.deepcopy(config)
        short.num_hidden_layers = 1
        with torch.device("meta"):
            inner = model_class(short).model
        self.layer_class: Callable[..., torch.nn.Module] = type(inner.layers[0])
        # inv_freq is computed, not loaded, so it would stay empty on the meta device.
        self.rotary = type(inner.rotary_emb)(config=config).to(device)
        self.final_norm = inner.norm
        # A copy, since a view would keep the buffer of all non-layer tensors.
        self.final_norm.load_state_dict({"weight": self._plain(facts.final_norm).clone()}, assign=True)

    def _plain(self, name: str) -> torch.Tensor:
        info = self.checkpoint.require(name, "a tensor outside the layers")
        tensor = self.checkpoint.tensor(info.name)
        if not bool(torch.isfinite(tensor.float()).all()):
            raise CheckpointError(f"{info.file}: {name} holds a NaN or infinity; download this shard again")
        return tensor.to(device=self.device, dtype=self.dtype)

    def embedding(self) -> torch.Tensor:
        """The embedding table (vocabulary, H) in the model's dtype."""
        return self._plain(self.facts.embedding)

    def head(self) -> torch.Tensor:
        """The output matrix (vocabulary, H) in the model's dtype."""
        return read_weight(self.checkpoint, self.facts.head.removesuffix(".weight"), self.device).to(self.dtype)

    @contextlib.contextmanager
    def layer(
        self, number: int, stored: Checkpoint | None = None, *, experts: bool = True
    ) -> Iterator[torch.nn.Module]:
        """A decoder layer with its weights, which are freed when the block ends.

        Args:
            stored: where its tensors are read; None for the model's own checkpoint.
            experts: False leaves the routed experts' parameters on the meta device: the layer is then good for
                `attend` and `route`.
        """
        with torch.device("meta"):
            module: torch.nn.Module = self.layer_class(self.config, number).eval()
        left_out: list[str] = []
        if number not in self.sizes.dense:
            require_plain_experts(module.get_submodule(self.facts.modules.experts), self.facts)
            left_out = [] if experts else [f"{self.facts.modules.experts}.{name}" for name in FUSED]
        weights = layer_weights(
            stored or self.checkpoint, self.facts, self.sizes, number, self.device, self.dtype, experts=experts
        )
        load_layer(module, weights, self.facts, left_out)
        del weights  # otherwise what `release_experts` releases would live here until the block ends
        module.requires_grad_(False)
        try:
            yield module
        finally:
            module.to("meta")  # frees the weights even if someone still references the module

    def release_experts(self, layer: torch.nn.Module) -> None:
        """Free the weights of a layer's routed experts; it has to be one with experts."""
        layer.get_submodule(self.facts.modules.experts).to("meta")

    def inputs(self, states: torch.Tensor) -> dict[str, Any]:
        """The keyword arguments that transformers' model passes to its layers for sequences of one length (B, T, H)."""
        hidden = states.to(device=self.device, dtype=self.dtype)
        positions = torch.arange(states.shape[1], device=self.device).unsqueeze(0)
        return {
            "hidden_states": hidden,
            "position_ids": positions,
            "position_embeddings": self.rotary(hidden, position_ids=positions),
            "attention_mask": None,
        }

    @torch.no_grad()
    def attend(self, layer: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
        """The first half of a layer: the residual stream after attention.

        Args:
            states: of one sequence (T, H), or of several of one length (B, T, H); the result has the same shape.
        """
        with _replaced(layer, self._block, _StandIn()):
            output: torch.Tensor = layer(**self.inputs(states.view(-1, *states.shape[-2:])))
        return output.view_as(states)

    @torch.no_grad()
    def route(self, layer: torch.nn.Module, residual: torch.Tensor) -> MoeInputs:
        """What the experts of a layer are called with; they do not run.

        Args:
            residual: (T, H), rows of the residual stream after attention, of any sequences.
        """
        experts = _StandIn()
        with _replaced(layer, self.facts.modules.experts, experts):
            self._moe(layer, residual.to(device=self.device, dtype=self.dtype))
        return capture_moe_inputs(*experts.seen)

    @torch.no_grad()
    def finish(self, layer: torch.nn.Module, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The second half of a layer, with its own routing.

        Args:
            residual: (T, H), rows of the residual stream after attention, of any sequences.

        Returns:
            The layer's output (T, H), and the chosen experts (T, K) int64; None in a layer without experts.
        """
        residual = residual.to(device=self.device, dtype=self.dtype)
        experts = getattr(layer.get_submodule(self._block), self.facts.modules.experts.rpartition(".")[2], None)
        if experts is None:
            return residual + self._moe(layer, residual), None
        choices: list[torch.Tensor] = []
        hook = experts.register_forward_pre_hook(lambda _, args: choices.append(args[1]))
        try:
            return residual + self._moe(layer, residual), choices[0]
        finally:
            hook.remove()

    def run(self, layer: torch.nn.Module, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One sequence through both halves of a layer: output (T, H), chosen experts (T, K) int64 or None."""
        return self.finish(layer, self.attend(layer, states))

    @property
    def _block(self) -> str:
        """The path of a layer's MoE block, or of the MLP in a layer without experts."""
        return self.facts.modules.experts.rpartition(".")[0]

    def _moe(self, layer: torch.nn.Module, residual: torch.Tensor) -> torch.Tensor:
        """What the MoE block, or the MLP of a dense layer, adds to the residual stream, (T, H)."""
        norm, block = (layer.get_submodule(path) for path in (self.facts.modules.norm, self._block))
        output: torch.Tensor = block(norm(residual.unsqueeze(0)))
        return output[0]

    @torch.no_grad()
    def final(self, states: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to states (T, H)."""
        normed: torch.Tensor = self.final_norm(states.to(device=self.device, dtype=self.dtype))
        return normed


@contextlib.contextmanager
def _replaced(layer: torch.nn.Module, path: str, other: torch.nn.Module) -> Iterator[None]:
    """Replace the module at `path` by another within the block."""
    parent_path, _, name = path.rpartition(".")
    parent = layer.get_submodule(parent_path)
    replaced = getattr(parent, name)
    setattr(parent, name, other)
    try:
        yield
    finally:
        setattr(parent, name, replaced)


def class_of(facts: Architecture) -> Any:
    """transformers' class of the whole model.

    Raises:
        ArchitectureError: transformers has none of this name.
    """
    import transformers

    model_class = getattr(transformers, facts.model_class, None)
    if not hasattr(model_class, "config_class"):
        raise ArchitectureError(
            f"the facts of {facts.model_type}: model_class: transformers {transformers.__version__} has no "
            f"{facts.model_class}; give one that computes this model"
        )
    return model_class


def load_layer(
    layer: torch.nn.Module,
    weights: Mapping[str, torch.Tensor],
    facts: Architecture,
    left_out: Collection[str] = (),
) -> None:
    """Give a decoder layer its weights, every one of them and no other.

    Args:
        weights: by transformers' names, see layer_weights.py.
        left_out: those that the layer has and is not to be given now.

    Raises:
        ArchitectureError: the layer does not have one, needs another, or has another shape for it.
    """
    about = f"the facts of {facts.model_type}"
    try:
        missing, unknown = layer.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as failure:
        reason = " ".join(str(failure).split()).removeprefix("Error(s) in loading state_dict for ")
        raise ArchitectureError(f"{about}: transformers' layer has other shapes ({reason})") from None
    if unknown:
        raise ArchitectureError(
            f"{about}: transformers' layer has no place for {unknown[0]}; if the model computes without it, add its "
            "published name to modules.without"
        )
    missing = [name for name in missing if name not in left_out]
    if missing:
        raise ArchitectureError(
            f"{about}: transformers' layer needs {missing[0]}; name it among its tensors or linears, or take it out of "
            "modules.without"
        )


def require_plain_experts(experts: torch.nn.Module, facts: Architecture) -> None:
    """Refuse experts that compute anything else than act(gate) * up, for example a clamped product.

    The Hessian of w2 is computed from that product, and the scale between w3 and w2 is exact for it alone.

    Raises:
        ArchitectureError: transformers' class has a product of its own.
    """
    gate = getattr(type(experts), "_apply_gate", None)
    if gate is not None and gate.__module__ != "transformers.integrations.moe":
        raise ArchitectureError(
            f"the facts of {facts.model_type}: experts of {type(experts).__name__} do not compute act(gate) * up but a "
            "product of their own, which this program does not know; such a model cannot be quantized with it"
        )
