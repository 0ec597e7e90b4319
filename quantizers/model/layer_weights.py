"""The weights of one decoder layer by transformers' names: checked, and dequantized without rounding in between.

That all is finite is checked once for a layer, with one synchronisation; only if something is not are its modules read
again, one by one, to name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, product

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import Matrix, split_first
from quantizers.checkpoint.reader import Checkpoint
from quantizers.device.devices import is_accelerator
from quantizers.formats.dequantization import is_finite, read_weight, refuse_bias, stored_matrix, unchecked_weight
from quantizers.formats.format import ForeignFormat, StoredMatrix
from quantizers.system.errors import CheckpointError

# Legend: E experts, c experts of a batch, R rows, C columns, H hidden size, I width of an expert

# Bytes in float32 of the rows that a CPU dequantizes at a time: in its cache, and in the heap. If matrices are smaller,
# those of several experts together, on a GPU too: a call of torch would cost more than its work.
BAND = 2**21


# Whether a tensor is finite, a bool on its device; and a function that reads it again and names it where it is not.
Checks = list[tuple[torch.Tensor, Callable[[], object]]]


def require_finite(checks: Checks) -> None:
    """Make deferred checks with one synchronisation; the error is that of the first tensor that was not finite."""
    if checks and not bool(torch.stack([finite for finite, _ in checks]).all()):
        for _, read_again in checks:
            read_again()
        raise AssertionError("a tensor was not finite, and is now")
    checks.clear()


@dataclass
class ExpertWeights:
    """The matrices of a layer's routed experts, dequantized batch by batch.

    Attributes:
        stored: where the layer's tensors are read, on the CPU or on `device`. They must stay valid until
            `require_finite` has been called.
        dtype: of the result. The product of integers and scales is float32, rounded to `dtype` once.
        checks: gets whether all of it is finite, for one check of this and other things.

    Raises:
        CheckpointError: a tensor is missing, has a wrong dtype or shape, or is a bias that the model would not add.
    """

    stored: Checkpoint
    facts: Architecture
    layer: int
    device: torch.device
    dtype: torch.dtype
    checks: Checks = field(default_factory=list)

    def __post_init__(self) -> None:
        self.experts = self.facts.num_experts
        self.width = self.facts.expert_width
        self.hidden = self.facts.expert_inputs
        self._stored: dict[str, StoredMatrix | ForeignFormat] = {}
        for matrix, expert in product(self.facts.matrices, range(self.experts)):
            module = self.facts.expert(self.layer, expert, matrix)
            stored = self._stored[module] = stored_matrix(self.stored, module)
            if isinstance(stored, StoredMatrix):
                self._require_shape(module, matrix, stored.shape)
            refuse_bias(self.stored, module)

    def batch(self, experts: Sequence[int], interleaved: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Some experts, by their numbers: gate_up (c, 2I, H), w1 above w3, and down (c, H, I); not checked yet.

        Without a gate the first is w3 alone, (c, I, H). Rows of w1 and w3 are `interleaved` where a class wants that.
        """
        matrices = self.facts.matrices
        first = (len(experts), (len(matrices) - 1) * self.width, self.hidden)
        shapes = (first, (len(experts), self.hidden, self.width))
        gate_up, down = (torch.empty(shape, device=self.device, dtype=self.dtype) for shape in shapes)
        first_slots = (gate_up[:, ::2], gate_up[:, 1::2]) if interleaved else split_first(gate_up, len(matrices))
        for matrix, slot in zip(matrices, (*first_slots, down), strict=True):
            done = 0
            for modules in self._together([self.facts.expert(self.layer, expert, matrix) for expert in experts]):
                if len(modules) > 1:
                    self._fill_several(modules, slot[done : done + len(modules)])
                else:
                    self._fill(matrix, modules[0], slot[done])
                done += len(modules)
        return gate_up, down

    def _together(self, modules: Sequence[str]) -> Iterator[list[str]]:
        """Divide modules into runs of those that are stored alike and are dequantized in one call."""

        def kind(module: str) -> tuple[StoredMatrix | ForeignFormat, tuple[str, ...]]:
            stored = self._stored[module]
            parts = stored.parts if isinstance(stored, StoredMatrix) else ()
            return stored, tuple(self.stored.tensors[f"{module}.{part}"].dtype for part in parts)

        for (stored, _), alike in groupby(modules, kind):
            size, run = 1, list(alike)
            # Rows of one matrix under those of another are dequantized alike if each has whole blocks, and no part that
            # belongs to all its rows.
            if (
                isinstance(stored, StoredMatrix)
                and len(stored.parts) < 3
                and not stored.shape[0] % stored.form.edges[0]
            ):
                size = max(BAND // (4 * stored.shape[0] * stored.shape[1]), 1)
            yield from (run[first : first + size] for first in range(0, len(run), size))

    def _fill_several(self, modules: Sequence[str], slots: torch.Tensor) -> None:
        """Dequantize several small matrices (R, C) that are stored alike, as one (c R, C)."""
        stored = self._stored[modules[0]]
        assert isinstance(stored, StoredMatrix)
        parts = [
            torch.cat([self.stored.tensor(f"{module}.{part}") for module in modules]).to(self.device)
            for part in stored.parts
        ]
        numbers = stored.numbers(parts)
        slots.copy_(numbers.unflatten(0, (len(modules), -1)))

        def again() -> None:
            for module in modules:
                read_weight(self.stored, module, self.device)

        self.checks.append((is_finite(numbers), again))

    def _fill(self, matrix: Matrix, module: str, slot: torch.Tensor) -> None:
        """Dequantize one matrix; on a CPU a band of rows at a time, since all of it would be fresh memory."""
        again = partial(read_weight, self.stored, module, self.device)
        stored = self._stored[module]
        if isinstance(stored, ForeignFormat):
            weight = stored.read(self.stored, module, self.device)
            self._require_shape(module, matrix, tuple(weight.shape))
            slot.copy_(weight)
            self.checks.append((is_finite(weight), again))
            return
        parts = [self.stored.tensor(f"{module}.{part}").to(self.device) for part in stored.parts]
        (rows, columns), height = stored.shape, stored.form.edges[0]
        step = rows if is_accelerator(self.device) else max(BAND // (4 * columns * height), 1) * height
        for first in range(0, rows, step):
            band = slot[first : first + step]
            numbers = stored.numbers(stored.band(parts, first, first + len(band)))
            band.copy_(numbers)
            self.checks.append((is_finite(numbers), again))

    def require_finite(self) -> None:
        """Check all batches so far; a CheckpointError if a weight or its scale holds a NaN or infinity."""
        require_finite(self.checks)

    def _require_shape(self, module: str, matrix: Matrix, shape: tuple[int, ...]) -> None:
        needed = (self.hidden, self.width) if matrix == "down" else (self.width, self.hidden)
        if shape != needed:
            raise CheckpointError(
                f"{self.stored.folder}: {module}",
                f"a weight of shape {list(shape)}, but this layer's sizes need {list(needed)}",
                "the checkpoint is of another model than its config.json",
            )


def layer_weights(
    checkpoint: Checkpoint,
    facts: Architecture,
    layer: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    experts: bool = True,
) -> dict[str, torch.Tensor]:
    """Read one decoder layer's parameters, with fused experts, by transformers' names within the layer.

    Returns:
        Norms, attention, router, `….gate_up_proj` (E, 2I, H) and `….down_proj` (E, H, I), or `….up_proj` (E, I, H)
        instead of the first where there is no gate, as the class holds them, in `dtype`, except what the
        family publishes in float32 (a router and its bias) or as integers, which stays so. A dense layer has its MLP
        instead. What transformers converts has its published name, and is as it is stored. Tables of which rows are
        looked up are not among them.

    Raises:
        CheckpointError: as `read_weight`.
    """
    checks: Checks = []
    weights: dict[str, torch.Tensor] = {}
    here = facts.of_layer(layer)
    for name, tensor in here.tensors.items():
        full = facts.layer(layer, name)
        if full in facts.table_parts:
            continue
        if tensor.optional and full not in checkpoint.tensors:
            continue
        stored = checkpoint.tensor(checkpoint.require(full, "a tensor of the layer").name).to(device)
        checks.append((is_finite(stored), partial(_read_again, checkpoint, full)))
        if stored.is_floating_point():
            stored = stored.to(torch.float32 if tensor.dtype == "F32" else dtype)
        weights[facts.in_transformers(name)] = stored
    for name in here.linears:
        full = facts.layer(layer, name)
        weight = unchecked_weight(checkpoint, full, device)
        checks.append((is_finite(weight), partial(read_weight, checkpoint, full, device)))
        weights[facts.in_transformers(f"{name}.weight")] = weight.to(dtype)
        if f"{name}.bias" not in here.tensors:
            refuse_bias(checkpoint, full)
    if experts and layer not in facts.dense:
        routed = ExpertWeights(checkpoint, facts, layer, device, dtype, checks)
        at = facts.modules.experts
        names = (f"{at}.{name}" for name in facts.expert_parameters)
        held = routed.batch(range(routed.experts), facts.modules.interleaved)
        if facts.modules.transposed:
            held = held[0].mT, held[1].mT
        weights |= zip(names, held, strict=True)
    require_finite(checks)
    return weights


def _read_again(checkpoint: Checkpoint, name: str) -> None:
    """Raise an error if a tensor holds a number that is not finite."""
    if not bool(is_finite(checkpoint.tensor(name))):
        file = checkpoint.tensors[name].file
        raise CheckpointError(file, f"{name} holds a NaN or infinity", "download this shard again")
