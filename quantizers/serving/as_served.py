"""A model computed as a server's kernels would compute it on a kind of card: the figures of `--as-served`.

The rules are in kernels.py. Everything runs in bfloat16, as servers do; within a decoder layer each linear module, and
each matrix of the routed experts, multiplies the weights and activations that the kernel on that card would, with
float32 sums, which are rounded to bfloat16. Logits are rounded too.

Source and candidate are both computed so. That predicts how large KL(source || candidate) will be there, and what the
card alone does to the source, but no single log-probability of a server: where an activation lies between two FP8
codes, the last bit of a sum decides, and then perhaps an expert.

Legend: T tokens, K experts chosen per token, H hidden, I width of an expert, R rows, C columns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.experts_call import replaced_experts
from quantizers.architectures.gates import Gate, gate_of
from quantizers.architectures.matrices import bias_of
from quantizers.architectures.skeleton import replaced_forward
from quantizers.checkpoint.reader import CONFIG, Checkpoint
from quantizers.formats import e8m0, nvfp4
from quantizers.formats.dequantization import stored_format, stored_matrix
from quantizers.formats.format import ForeignFormat, Format
from quantizers.formats.fp8 import LARGEST, Fp8Blocks, block_size, to_fp8
from quantizers.formats.nvfp4 import INPUT_SCALE
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.recipe.cards import Card
from quantizers.system.errors import CheckpointError

from .kernels import WHERE, Activations, Kernel, Where, kernel

DTYPE = torch.bfloat16
Rounding = Activations | Tensor  # a tensor is NVFP4's global scale of the activations
GROUP, BLOCK = 128, 128
SMALLEST_SCALE = 1 / (LARGEST * 512)  # of activations; vLLM's _FP8_MIN_SCALING_FACTOR
SMALLEST_PEAK = 1e-4  # of a block of weights whose scale becomes a power of two; per_block_cast_to_fp8


# The numbers that kernels multiply -----------------------------------------------------------------------------------


def power_of_two(scale: Tensor) -> Tensor:
    """The power of two at or above each scale: E8M0."""
    return torch.exp2(torch.ceil(torch.log2(scale)))


def to_nvfp4(x: Tensor, whole: Tensor) -> Tensor:
    """x (…, C) rounded to E2M1, with an E4M3 scale for every 16 and the global scale `whole` (1,); float32.

    As compressed-tensors does it for `dynamic: local`.
    """
    grouped = x.unflatten(-1, (-1, nvfp4.GROUP))
    scale = nvfp4.nearest_e4m3(whole * (grouped.abs().amax(-1, keepdim=True) / nvfp4.LARGEST_E2M1)).float() / whole
    return nvfp4.nearest_e2m1_(grouped / scale).mul_(scale).flatten(-2)


def rounded_activations(x: Tensor, how: Rounding) -> Tensor:
    """The activations (…, C) that a kernel multiplies, float32."""
    x = x.float()
    if isinstance(how, Tensor):
        return to_nvfp4(x, how)
    if how == "bfloat16":
        return x
    if how == "int8 per token":
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-7) / 127
        return (x / scale).round_().mul_(scale)
    if how == "FP8 per token":
        return to_fp8(x, (x.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE))
    columns = x.shape[-1]
    grouped = torch.nn.functional.pad(x, (0, -columns % GROUP)).unflatten(-1, (-1, GROUP))
    scale = grouped.abs().amax(-1, keepdim=True) / LARGEST
    if how == "FP8 per 128, power of two":
        scale = power_of_two(scale)
    return to_fp8(grouped, scale.clamp(min=SMALLEST_SCALE)).flatten(-2)[..., :columns]


def blocks_to_powers_of_two(weight: Tensor) -> Tensor:
    """A weight (R, C) rounded once more to FP8, in blocks of 128 x 128 whose scales are powers of two."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # (R / 128, 128, C / 128, 128)
    scale = power_of_two(blocks.abs().amax((1, 3), keepdim=True).clamp(min=SMALLEST_PEAK) / LARGEST)
    return to_fp8(blocks, scale).flatten(2, 3).flatten(0, 1)[:rows, :columns]


def multiplied_weight(stored: Checkpoint, module: str, rules: Kernel, device: torch.device) -> Tensor:
    """The weight (R, C) that a kernel multiplies, float32 on the device."""
    matrix = stored_matrix(stored, module)
    if isinstance(matrix, ForeignFormat):
        weight = matrix.read(stored, module, device)
    else:
        parts = [stored.tensor(f"{module}.{part}").to(device) for part in matrix.parts]
        if rules.scales == "bfloat16":
            parts[1:] = [e8m0.numbers(scale).to(DTYPE).float() for scale in parts[1:]]
        weight = matrix.numbers(parts).float()
    if rules.scales == "power of two":
        weight = blocks_to_powers_of_two(weight)
    return weight.to(DTYPE).float() if rules.weights == "bfloat16" else weight


# Modules -------------------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, how: Rounding) -> Tensor:
    """x (…, C) in bfloat16 times a weight (R, C) in float32, as a kernel computes it: (…, R) in bfloat16."""
    bias = None if bias is None else bias.float()
    return torch.nn.functional.linear(rounded_activations(x, how), weight, bias).to(x.dtype)


def routed_experts(
    weight: Callable[[int, int], tuple[Tensor, Rounding]],
    gate: Gate,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    *,
    matrices: int = 3,
    experts: int | None = None,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The routed experts of a layer: Σ over the chosen ones of weights · w2(gate(w1 x, w3 x)), (T, H) in bfloat16.

    Args:
        weight: the weight of an expert's matrix, by the numbers of both, and what becomes of its activations.
        x: (T, H) bfloat16. chosen, weights: (T, K).
        matrices: of an expert. experts: those with matrices, if others return what they read.
        biases: of w1 above w3 (E, 2I), and of w2 (E, H).
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        if experts is not None and expert >= experts:  # one without matrices
            total.index_add_(0, rows, x[rows].float() * weights[rows, places, None].float())
            continue
        *first, (w2, how_then) = (weight(expert, matrix) for matrix in range(matrices))
        bias, bias_then = (None, 0.0) if biases is None else (biases[0][expert], biases[1][expert].float())
        products = linear(x[rows], torch.cat([matrix for matrix, _ in first]), bias, first[0][1])
        h = gate(products.float().mT).mT.to(x.dtype)
        output = (rounded_activations(h, how_then) @ w2.mT + bias_then) * weights[rows, places, None].float()
        total.index_add_(0, rows, output.to(x.dtype).float())  # rounded once, with its weight
    return total.to(x.dtype)


def _another_block(checkpoint: Checkpoint, block: tuple[int, int]) -> CheckpointError:
    return CheckpointError(
        checkpoint.folder / CONFIG,
        f"FP8 in blocks of {block[0]} x {block[1]}, and only those of {BLOCK} x {BLOCK} are known as served",
        "leave as_served out, or give `as_served: []`",
    )


class ServedModel(StreamedModel):
    """A streamed model on a kind of card.

    Its linear modules that are `exact`, by their names within a layer, are not simulated beyond bfloat16, because
    transformers holds them otherwise than as one matrix. Raises a CheckpointError for FP8 blocks of another size, which
    vLLM's kernels do not take.
    """

    def __init__(self, checkpoint: Checkpoint, facts: Architecture, device: torch.device, card: Card) -> None:
        # The second as MXFP8 declares it.
        if (block := block_size(checkpoint)) not in ((BLOCK, BLOCK), (1, e8m0.GROUP)):
            raise _another_block(checkpoint, block)
        super().__init__(checkpoint, facts, device, DTYPE)
        self.card = card
        kinds = {tuple(facts.of_layer(number).linears): number for number in range(facts.num_layers)}
        layers = [(names, self.skeleton.layer(number)) for names, number in kinds.items()]
        self.exact = {name for names, layer in layers for name in names if self._module(layer, name) is None}

    @contextlib.contextmanager
    def layer(self, number: int, stored: Checkpoint | None = None, *, experts: bool = True) -> Iterator[DecoderLayer]:
        """A decoder layer whose modules multiply what the card's kernels do; see `StreamedModel.layer`.

        The experts' weights are dequantized one expert at a time, each time they are used.
        """
        files = stored or self.checkpoint
        with super().layer(number, stored, experts=False) as layer, contextlib.ExitStack() as stack:
            for name in self.facts.of_layer(number).linears:
                if (module := self._module(layer.module, name)) is not None:
                    weight, how = self._multiplied(files, "linear", self.facts.layer(number, name), module.weight.shape)
                    stack.enter_context(
                        replaced_forward(module, partial(linear, weight=weight, bias=module.bias, how=how))
                    )
            if experts and number not in self.facts.dense:
                stack.enter_context(replaced_experts(self._experts(layer), self._routed(layer, files)))
            yield layer

    def _module(self, layer: torch.nn.Module, name: str) -> Any:
        path = self.facts.in_transformers(f"{name}.weight").removesuffix(".weight")
        module = dict(layer.named_modules(remove_duplicate=False)).get(path)
        return module if isinstance(module, torch.nn.Linear) else None

    def _multiplied(
        self, files: Checkpoint, where: Where, module: str, shape: Sequence[int]
    ) -> tuple[Tensor, Rounding]:
        """The weight (R, C) that the card's kernel multiplies, and what becomes of its activations."""
        form = stored_format(files, module)
        if isinstance(form, Fp8Blocks) and form.edges != (BLOCK, BLOCK):
            raise _another_block(files, form.edges)
        rules = kernel(self.card, where, form, tuple(shape))
        how: Rounding = rules.activations
        if how == "NVFP4":
            how = files.tensor(f"{module}.{INPUT_SCALE}").to(self.device)
        return multiplied_weight(files, module, rules, self.device), how

    def _routed(self, layer: DecoderLayer, files: Checkpoint) -> Callable[..., Tensor]:
        facts, number = self.facts, layer.number
        experts: Any = self._experts(layer)
        gate, bias = gate_of(experts, facts.of_layer(number).own_gate), bias_of(experts, **facts.modules.layout)
        biases = None if bias is None else (bias, experts.down_proj_bias.data)
        others: dict[str, Any] = {"matrices": len(facts.matrices), "experts": facts.num_experts, "biases": biases}

        def weight(expert: int, matrix: int) -> tuple[Tensor, Rounding]:
            name = facts.matrices[matrix]
            shape = facts.expert_linears[name].shape
            return self._multiplied(files, "experts", facts.expert(number, expert, name), shape)

        return lambda *args, **kwargs: routed_experts(weight, gate, *args, *kwargs.values(), **others)

    def logits(self, products: Tensor) -> Tensor:
        """The logits (T, V), rounded to bfloat16 as a server's head leaves them."""
        return super().logits(products.to(DTYPE).float())


# Words ----------------------------------------------------------------------------------------------------------------


def kernels_of(model: StreamedModel, checkpoint: Checkpoint, experts: Format | None = None) -> dict[str, str]:
    """The kernel for each kind of matrix of a checkpoint on a ServedModel's card, in words, and what is not simulated.

    `experts` are stored so, if otherwise than in the checkpoint.
    """
    assert isinstance(model, ServedModel), "the model is computed on a card"
    facts, card = model.facts, model.card
    kernels = dict.fromkeys(sorted(model.exact), "bfloat16 alone is simulated")
    for number in range(facts.num_layers):
        modules = {facts.layer(number, name): shape for name, shape in facts.of_layer(number).linears.items()}
        matrices = facts.matrices if number not in facts.dense else ()
        routed = {facts.expert(number, 0, matrix): facts.expert_linears[matrix].shape for matrix in matrices}
        for module, shape in (modules | routed).items():
            where: Where = "experts" if module in routed else "linear"
            form = experts if where == "experts" and experts else stored_format(checkpoint, module)
            kernels[f"{WHERE[where]} in {form.description}"] = str(kernel(card, where, form, shape))
    return kernels
