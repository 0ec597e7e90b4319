"""The experts of one layer with the inputs that a calibration set gives them, for experiments: `quantizers.layer`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from quantizers.architectures.gates import Gate, gate_of
from quantizers.architectures.matrices import as_stacked
from quantizers.calibration.load_set import load_set, print_notes
from quantizers.calibration.samples import token_tensors
from quantizers.device.determinism import ordered
from quantizers.device.devices import choose_device, forward_dtype, is_accelerator, use_threads
from quantizers.formats.packed_integers import dequantize
from quantizers.model.activation_store import ActivationStore
from quantizers.model.activation_stream import embed
from quantizers.model.layer_forward import attend, finish, observe
from quantizers.model.moe_inputs import MoeInputs, MoeInputStore, capture_moe_inputs, moe_input_store
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.planning.assign_actions import require_group
from quantizers.planning.device_memory import Residents
from quantizers.planning.expert_batches import experts_per_batch, tokens_per_chunk
from quantizers.planning.job import Job, prepare
from quantizers.recipe.read import changes_of, fixed_bits, set_location
from quantizers.recipe.schema import Experts
from quantizers.solve.hessians import blended_hessian, collect_down_hessian, sweep
from quantizers.solve.result import LayerResult
from quantizers.solve.routing_weights import routing_statistics
from quantizers.solve.solver import router_matrix, solve
from quantizers.system.errors import InputError
from quantizers.system.schema import Origin, fit
from quantizers.system.strict_yaml import Place
from quantizers.walk.walk import LayerStep, all_tensors, walk

from . import options as opt
from .arguments import checked


@dataclass(frozen=True)
class Layer:
    """The routed experts of one layer of a source, and the inputs that a calibration set gives them.

    T tokens, K experts chosen for each, E experts, H hidden, I expert width. All tensors are on the device. Weights and
    `x` have the dtype of the forward pass: float32 on a CPU, bfloat16 on a GPU.

    Attributes:
        number: the layer's.
        x: (T, H), what w1 and w3 read, of all tokens one after the other.
        chosen: (T, K) int32, the experts that the router chose.
        weight: (T, K) float32, their routing weights r.
        gate_up: (E, 2I, H), w1 above w3.
        down: (E, H, I), w2.
        gate: from the products of w1 above w3 (…, 2I, T) to h (…, I, T), in new memory.
        settings: the recipe's `experts`.
        norm: (H,) as it is stored, the norm before the experts; None where a fold into it would not be exact.
        offset: added to the stored norm by the model, 0 or 1.
        router: (E, H), or with more rows, where it reads that norm; else None.
        inner: the degree of h in w3's rows; 0 where no scale between w3 and w2 passes through the gate.
    """

    number: int
    x: torch.Tensor
    chosen: torch.Tensor
    weight: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    gate: Gate
    settings: Experts
    norm: torch.Tensor | None
    offset: int
    router: torch.Tensor | None
    inner: int

    def _chunks(self) -> list[MoeInputs]:
        most = tokens_per_chunk(is_accelerator(self.x.device))
        chunks = zip(self.x.split(most), self.chosen.split(most), self.weight.split(most), strict=True)
        return [capture_moe_inputs(x, chosen, weight) for x, chosen, weight in chunks]

    @checked
    def hessian(self, expert: int, of: Literal["x", "h"] = "x") -> torch.Tensor:
        """The Hessian of what an expert's matrices read, float32, blended by the recipe's `routed_weight`.

        Args:
            expert: its number, from 0.
            of: x for that of w1's and w3's inputs, (H, H); h for that of w2's, (I, I), as this layer's own w1 and w3
                give them. `dataclasses.replace(layer, gate_up=…)` asks about others.
        """
        if not 0 <= expert < len(self.down):
            raise InputError("expert", f"should be a number from 0 to {len(self.down) - 1}, not {expert}")
        chunks = self._chunks()
        hidden = self.x.shape[1]
        batch = (expert, expert + 1)
        with ordered():
            routing = routing_statistics(chunks, len(self.down), self.settings.routed_weight, hidden)
            if of == "h":
                gate_up = self.gate_up[slice(*batch)]
                return collect_down_hessian(chunks, routing, gate_up, gate=self.gate, batch=batch).hessian[0]
            of_all, of_routed = sweep(chunks, routing, [batch], hidden, with_all=True)
            return blended_hessian(of_routed[batch], of_all.hessian, routing, batch)[0]

    def solve(self, **changes: Any) -> LayerResult:
        """Quantize the experts as a run does.

        Args:
            changes: keys of the recipe's `experts`, such as `bits=3` or `awq={"fold": False}`; None removes a key.

        Raises:
            InputError: a change is wrong, the engine is not gram, or a fold is asked for that would not be exact.
        """
        keys = self.settings.model_dump(exclude_unset=True) | changes
        given = {key: value for key, value in keys.items() if value is not None}
        origins: dict[Place, Origin] = {(key,): Origin(f"experts.{key}", 0, key) for key in given} | {
            (): Origin("experts", 0)
        }
        settings = fit(given, origins, Experts, InputError)
        if settings.engine != "gram":
            raise InputError(
                f"layer {self.number}", f"the engine {settings.engine} solves whole models only", "use gram"
            )
        fold = settings.awq.fold if settings.awq else False
        if fold and self.norm is None:
            raise InputError(
                f"layer {self.number}: experts.awq.fold", "would not be exact in this family", "leave it out"
            )
        experts, size = len(self.down), self.down.shape[1:]
        require_group(
            settings.scheme, {"the hidden size": size[0], "the experts' width": size[1]}, f"layer {self.number}"
        )
        with ordered():
            return solve(
                self._chunks(),
                lambda experts: (self.gate_up[list(experts)], self.down[list(experts)]),
                norm=None if fold is False else self.norm,
                offset=self.offset,
                router=self.router,
                shape=(experts, size[0]),
                gate=self.gate,
                inner=self.inner,
                settings=settings,
                batch_size=experts_per_batch(is_accelerator(self.x.device), *size),
                residents=Residents(experts, 1, 0),
            )

    def errors(self, solved: LayerResult) -> torch.Tensor:
        """Relative error of each expert's output, (E,) float32: ‖r (ŷ − y)‖ / ‖r y‖ over the tokens routed to it.

        ŷ is computed from the weights as they will be stored, and x as the folded norm gives it; r is the routing
        weight. NaN for an expert without tokens. The tokens are this layer's own, so in-sample for what it solved
        itself; for an error on held-out texts ask the same layer with these: `quantizers.layer(RECIPE, NUMBER,
        calibration="held-out").errors(solved)`.
        """
        smooth = solved.smooth
        errors = []
        for expert in range(len(self.down)):
            tokens, place = (self.chosen == expert).nonzero(as_tuple=True)
            r, x = self.weight[tokens, place], self.x[tokens].float()
            *first, w2 = (
                dequantize(codes[expert : expert + 1], solved.scales[matrix][expert : expert + 1])[0]
                / (solved.global_scales[matrix][expert] if matrix in solved.global_scales else 1)
                for matrix, codes in solved.codes.items()
            )
            wanted = self.down[expert].float() @ self.gate(self.gate_up[expert].float() @ x.mT)
            output = w2 @ self.gate(torch.cat(first) @ (x / smooth).mT)
            errors.append(((output - wanted) * r).norm() / (wanted * r).norm())
        return torch.stack(errors)


@opt.documented
def layer(
    recipe: opt.Recipe,
    number: Annotated[int, "the layer's, from 0; one with experts"],
    *,
    source: opt.Source = None,
    calibration: opt.Calibration = None,
    settings: opt.Settings = (),
    device: opt.Device = "auto",
) -> Layer:
    """Take a calibration set through a source up to one layer, and give that layer's experts with their inputs.

    The layers before it are the source's, so that the inputs are those of a run for the first layer with experts, and
    nearly those for later ones, which in a run read what quantized layers give them. All of it is in memory.

    Raises:
        InputError: something that was given is wrong.
        QuantizeError: an output is not finite.
    """
    changes = changes_of(settings, calibration)
    job = prepare(str(recipe), source_folder=Path(source) if source is not None else None, changes=changes)
    if number not in job.facts.moe_layers:
        layers = job.facts.moe_layers
        raise InputError(
            f"{job.path}: layer {number}", "has no routed experts", f"give one from {layers[0]} to {layers[-1]}"
        )
    if job.recipe.experts.by_budget:
        raise InputError(job.path, "a budget chooses bits for whole models", f"give {fixed_bits(job.path, changes)}")
    use_threads(job.facts)
    with ordered():
        return _captured(job, number, choose_device(device))


def _captured(job: Job, number: int, device: torch.device) -> Layer:
    facts, chosen = job.facts, job.recipe
    model = StreamedModel(job.opened, facts, device, forward_dtype(device))
    data = load_set(
        set_location(chosen.calibration_set, job.path),
        job.opened.folder,
        chosen.source.trusts_tokenizer,
        chosen.calibration_tokens,
        without=chosen.calibration_without,
        positions=facts.positions,
    )
    sequences = token_tensors(print_notes(data), facts.vocab_size)
    lengths = [len(sequence) for sequence in sequences]
    rows = partial(ActivationStore, None, lengths, device=device, chunk=tokens_per_chunk(is_accelerator(device)))
    states = rows(model.row_width, model.dtype)
    embed(model, sequences, states)
    before = {at: names for at, names in all_tensors(model, job.opened).items() if at <= number}
    with walk(job.opened, before, model) as steps:
        for step in steps:
            with step.module() as layer:
                if step.number == number:
                    inputs = moe_input_store(lambda _, width, dtype: rows(width, dtype), facts, model.dtype)
                    observe(model, layer, states, inputs)
                    return _layer(job, step, layer, inputs)
                attend(model, layer, states, states)
                finish(model, layer, states, f"{job.opened.name}: layer {step.number}")
    raise AssertionError("the layer is one of the model's")


def _layer(job: Job, step: LayerStep, layer: DecoderLayer, inputs: MoeInputStore) -> Layer:
    """The experts of a decoder layer, with what they are called with."""
    facts = job.facts
    experts: Any = layer.module.get_submodule(facts.modules.experts)
    router = router_matrix(layer.module, facts)
    fold = None if facts.against_a_fold else facts.norm
    kind = facts.of_layer(step.number)
    gate_up, down = as_stacked(experts, **facts.modules.layout)
    return Layer(
        number=step.number,
        x=inputs.x.flat,
        chosen=inputs.chosen.flat,
        weight=inputs.weight.flat,
        gate_up=gate_up.clone(memory_format=torch.contiguous_format),
        down=down.clone(memory_format=torch.contiguous_format),
        gate=gate_of(experts, kind.own_gate),
        settings=job.recipe.experts,
        norm=step.on_device.tensor(facts.layer(step.number, fold.tensor)).clone() if fold else None,
        offset=facts.norm.offset if facts.norm else 0,
        router=None if router is None else router.clone(),
        inner=kind.inner,
    )
