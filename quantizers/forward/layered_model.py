"""A model of which one decoder layer exists at a time.

transformers' own layer is built on the meta device, where it has no memory, given its weights, run, and
sent back. The forward pass of a layer, rotary embedding included, is
transformers' own: only the routed experts are intercepted, where they are called with
`(hidden_states, top_k_index, top_k_weights)`, the interface that all of its MoE models share.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from quantizers.architectures.architecture import Architecture, Sizes, transformers_config
from quantizers.system.errors import CheckpointError

from .recorded import Recorded
from .weights import layer_weights, read_weight

if TYPE_CHECKING:
    from quantizers.checkpoint.reader import Checkpoint


class _Recorder(torch.nn.Module):
    """Stands in for the experts: keeps what they were called with and returns zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Recorded | None = None

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.seen = Recorded(hidden, chosen, weight.float())
        return torch.zeros_like(hidden)


class LayeredModel:
    """A checkpoint that is run layer by layer.

    Args:
        checkpoint: source or candidate, in any format that weights.py reads.
        facts, sizes: its architecture.
        device: where layers are materialised.
        dtype: of the forward pass; float32 on a CPU, bfloat16 on an accelerator.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        facts: Architecture,
        sizes: Sizes,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        import transformers

        self.checkpoint, self.facts, self.sizes = checkpoint, facts, sizes
        self.device, self.dtype = device, dtype
        model_class = getattr(transformers, facts.model_class)
        config = model_class.config_class(**transformers_config(facts, checkpoint.config))
        config._attn_implementation = "sdpa"  # causal without a mask; eager attention with mask None is not
        # One grouped matmul for all experts on an accelerator; on a CPU the plain loop is faster.
        config._experts_implementation = "eager" if device.type == "cpu" else "grouped_mm"
        self.config = config
        # Layers are made one at a time, when they are needed: of a long model even the empty ones take memory.
        short = copy.deepcopy(config)
        short.num_hidden_layers = 1
        with torch.device("meta"):
            inner = model_class(short).model
        self.layer_class = type(inner.layers[0])
        # inv_freq is computed, not loaded, so on the meta device it would stay empty.
        self.rotary = type(inner.rotary_emb)(config=config).to(device)
        self.final_norm = inner.norm
        self.final_norm.load_state_dict({"weight": self._plain(facts.final_norm)}, assign=True)

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
    def layer(self, number: int) -> Iterator[torch.nn.Module]:
        """The decoder layer with its weights; they are freed when the block ends."""
        with torch.device("meta"):
            module: torch.nn.Module = self.layer_class(self.config, number).eval()
        module.load_state_dict(
            layer_weights(self.checkpoint, self.facts, self.sizes, number, self.device, self.dtype),
            assign=True,
        )
        module.requires_grad_(False)
        try:
            yield module
        finally:
            module.to("meta")  # whoever still holds the module holds no weights

    def inputs(self, states: torch.Tensor) -> dict[str, Any]:
        """What transformers' model hands its layers: one sequence (T, H) as keyword arguments."""
        hidden = states.to(device=self.device, dtype=self.dtype).unsqueeze(0)
        positions = torch.arange(states.shape[0], device=self.device).unsqueeze(0)
        return {
            "hidden_states": hidden,
            "position_ids": positions,
            "position_embeddings": self.rotary(hidden, position_ids=positions),
            "attention_mask": None,
        }

    @torch.no_grad()
    def run(self, layer: torch.nn.Module, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One sequence through a layer with natural routing: states (T, H), and choices (T, K) int64."""
        experts = layer.get_submodule(self.facts.modules.experts)
        choices: list[torch.Tensor] = []
        hook = experts.register_forward_pre_hook(lambda _, args: choices.append(args[1]))
        try:
            output: torch.Tensor = layer(**self.inputs(states))
        finally:
            hook.remove()
        return output[0], choices[0]

    @torch.no_grad()
    def record(self, layer: torch.nn.Module, states: torch.Tensor) -> Recorded:
        """One sequence up to the experts: their input, and the router's choice. The experts do not run."""
        path, _, name = self.facts.modules.experts.rpartition(".")
        parent = layer.get_submodule(path)
        experts, recorder = getattr(parent, name), _Recorder()
        setattr(parent, name, recorder)
        try:
            layer(**self.inputs(states))
        finally:
            setattr(parent, name, experts)
        assert recorder.seen is not None
        return recorder.seen

    @torch.no_grad()
    def final(self, states: torch.Tensor) -> torch.Tensor:
        """The final norm of states (T, H)."""
        normed: torch.Tensor = self.final_norm(states.to(device=self.device, dtype=self.dtype))
        return normed
