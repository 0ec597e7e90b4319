"""The proof that a model is computed as transformers computes it, layer by layer; see docs/explanation/proof.md.

Two short random sequences go through transformers' own call of a layer, each alone, and as this program runs them. A
difference refuses the model: with a wrong mask, window, rotary embedding or residual, states are of the same size and
look right. The routed experts are left out in both ways, so that a layer can be proven without their weights.
"""

from __future__ import annotations

import contextlib

import torch

from quantizers.architectures.experts_call import replaced_experts
from quantizers.architectures.roles import example_of, weighted
from quantizers.architectures.skeleton import differing_arguments, first
from quantizers.system.errors import ArchitectureError

from .layer_forward import padded, unpadded
from .streamed_model import DecoderLayer, StreamedModel

LENGTHS = [48, 31]  # of the two sequences
SIZE = 0.1  # of their states: small beside what a layer adds to them, so that this is seen
# Of a layer's largest change of a state. Measured: 4e-7 and 6e-3 at most where a layer is computed rightly, and 0.4 or
# more without its window or rotation, or with another norm.
BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.1}


class Proof:
    """The proof of one model; an ArchitectureError if its forward passes arguments that depend on the tokens."""

    def __init__(self, model: StreamedModel) -> None:
        self.model, generator = model, torch.Generator().manual_seed(1)
        tokens = [torch.randint(model.facts.vocab_size, (1, n), generator=generator) for n in LENGTHS]
        self._calls = [model.skeleton.calls_with(row.to(model.device)) for row in tokens]
        states = SIZE * torch.randn(sum(LENGTHS), model.hidden, generator=generator)
        self._states = states.to(model.device, model.dtype)
        self._handed: list[torch.Tensor | None] = [None, None]
        if model.facts.handed is not None:
            self._handed = [example_of(model.facts.handed, length, model.dtype).to(model.device) for length in LENGTHS]
        alone = zip(self._states.split(LENGTHS), self._handed, tokens, strict=True)
        self._rows = [model.row(states, handed, row[0]) for states, handed, row in alone]
        for calls, length in zip(self._calls, LENGTHS, strict=True):
            for argument in differing_arguments(calls, model.skeleton.calls(length)):
                raise ArchitectureError(
                    model.checkpoint.name,
                    f"{argument}, as {model.facts.model_class} passes it, depends on the tokens, not on their number "
                    "alone; such a model cannot be computed layer by layer here",
                    "give another model",
                )

    @torch.no_grad()
    def of_layer(self, layer: DecoderLayer) -> float:
        """The largest difference of the two ways through a layer, as a part of the largest change of a state by it.

        Of its weights those of its experts are not needed.

        Raises:
            ArchitectureError: it is beyond `BOUND`, or not a number.
        """
        model, bound = self.model, BOUND[self.model.dtype]
        with contextlib.ExitStack() as stack:
            if layer.number not in model.facts.dense:
                experts = layer.module.get_submodule(model.facts.modules.experts)
                stack.enter_context(replaced_experts(experts, weighted))
            alone = list(zip(self._calls, self._handed, self._states.split(LENGTHS), strict=True))
            own = [(calls[layer.number].of(states.unsqueeze(0), handed), states) for calls, handed, states in alone]
            expected = torch.cat([first(layer.module(**call)).view_as(states) for call, states in own])
            if layer.alone:
                left = torch.cat([model.run(layer, rows)[0] for rows in self._rows])
            else:
                left = model.attend(layer, padded(torch.cat(self._rows), LENGTHS))
                left = model.finish(layer, unpadded(left, LENGTHS) if layer.halves else left)[0]
                left = left if layer.halves else unpadded(left, LENGTHS)
        ours = left[:, : model.hidden]
        difference = float((ours - expected).abs().max() / (expected - self._states).abs().max())
        if not difference <= bound:
            raise ArchitectureError(
                f"{model.checkpoint.name}: layer {layer.number}",
                f"its output is not that of transformers' own call: {difference:.2g} of its largest change of a state "
                f"apart, {bound:g} is allowed; this model would be computed wrongly and is refused",
                "give another model",
            )
        return difference
