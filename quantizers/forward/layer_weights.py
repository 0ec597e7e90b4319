"""The weights of one decoder layer: dequantized, checked, by transformers' names.

A GPU dequantizes the experts of a batch together; FP8 bytes are copied there as FP8. On a CPU everything becomes
float32 without rounding to bfloat16 in between. That all is finite is checked once for a layer, with one
synchronisation; only if something is not are its modules read again, one by one, to name it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import MATRICES, Matrix
from quantizers.architectures.sizes import Sizes
from quantizers.checkpoint.reader import Checkpoint
from quantizers.device.devices import is_accelerator
from quantizers.formats.dequantization import (
    WeightFormat,
    is_finite,
    read_weight,
    refuse_bias,
    unchecked_weight,
    weight_format,
)
from quantizers.system.errors import CheckpointError

# Legend: E experts, c experts of a unit, R rows, C columns, H hidden size, I width of an expert

UNIT = 16  # experts whose matrices an accelerator is given together
TOGETHER = 4  # of these, as many as are dequantized together: float32 in between takes memory that is not planned for
BAND = 2**21  # bytes in float32 of the rows that a CPU dequantizes at a time: in its cache, and in the heap


class FiniteCheck:
    """Deferred checks that tensors are finite: on an accelerator each check is a synchronisation."""

    def __init__(self) -> None:
        self._finite: list[torch.Tensor] = []
        self._read_again: list[Callable[[], object]] = []

    def add(self, finite: torch.Tensor, read_again: Callable[[], object]) -> None:
        """Defer a check.

        Args:
            finite: a bool on the device: whether a tensor is finite.
            read_again: reads that tensor again, and raises an error that names it where it is not.
        """
        self._finite.append(finite)
        self._read_again.append(read_again)

    def require(self) -> None:
        """Make all checks so far; the error is that of the first tensor that was not finite."""
        if self._finite and not bool(torch.stack(self._finite).all()):
            for read_again in self._read_again:
                read_again()
            raise AssertionError("a tensor was not finite, and is now")
        self._finite.clear()
        self._read_again.clear()


class ExpertWeights:
    """The matrices of a layer's routed experts, dequantized unit by unit.

    Args:
        stored: where the layer's tensors are read, on the CPU or on `device`. They must stay valid until
            `require_finite` has been called.
        layer: one with experts.
        device, dtype: of the result. The product of codes and scales is float32, rounded to `dtype` once.
        finite: gets whether all of it is finite, for one look at this and other things.

    Raises:
        CheckpointError: a tensor is missing, has a wrong dtype or shape, or is a bias that the model would not add.
    """

    def __init__(
        self,
        stored: Checkpoint,
        facts: Architecture,
        sizes: Sizes,
        layer: int,
        device: torch.device,
        dtype: torch.dtype,
        finite: FiniteCheck | None = None,
    ) -> None:
        self.stored, self.device, self.dtype = stored, device, dtype
        self.experts, self.width, self.hidden = sizes["experts"], sizes["width"], sizes["hidden"]
        self.modules = {m: [facts.expert(layer, e, m) for e in range(self.experts)] for m in MATRICES}
        self._forms: dict[str, WeightFormat | None] = {}
        self._finite = finite or FiniteCheck()
        for expert in range(self.experts):
            for matrix in MATRICES:
                module = self.modules[matrix][expert]
                form = self._forms[module] = weight_format(stored, module)
                if form is not None:
                    self._require_shape(module, matrix, form.shape)
                refuse_bias(stored, module)

    def unit(self, experts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Some experts, by their numbers: gate_up (c, 2I, H), w1 above w3, and down (c, H, I).

        Whether the numbers are finite is not looked at, see `require_finite`; except in formats of other programs and
        where blocks are partial, which are read module by module.
        """
        gate_up, down = self.empty(len(experts))
        self.fill(experts, gate_up, down)
        return gate_up, down

    def empty(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for so many experts' gate_up and down."""
        shapes = ((count, 2 * self.width, self.hidden), (count, self.hidden, self.width))
        gate_up, down = (torch.empty(shape, device=self.device, dtype=self.dtype) for shape in shapes)
        return gate_up, down

    def fill(self, experts: Sequence[int], gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """As `unit`, into memory that is there."""
        slots = (gate_up[:, : self.width], gate_up[:, self.width :], down)
        for matrix, slot in zip(MATRICES, slots, strict=True):
            modules = [self.modules[matrix][expert] for expert in experts]
            form, together = self._forms[modules[0]], is_accelerator(self.device)
            alike = form is not None and all(self._forms[module] == form for module in modules)
            if form is None or not alike or (together and form.shape[0] % form.block[0]):
                for module, own in zip(modules, slot, strict=True):
                    weight = read_weight(self.stored, module, self.device)
                    self._require_shape(module, matrix, tuple(weight.shape))
                    own.copy_(weight)
            elif together:
                self._fill_together(form, modules, slot)
            else:
                self._fill_in_bands(form, modules, slot)

    def _fill_together(self, form: WeightFormat, modules: list[str], slot: torch.Tensor) -> None:
        """A few matrices one below the other: one copy of each part to the device, one product in float32."""
        for first in range(0, len(modules), TOGETHER):
            some = slice(first, first + TOGETHER)
            parts = [self._below(modules[some], part).to(self.device) for part in form.parts]
            self._put(form, parts, slot[some], modules[some])

    def _below(self, modules: list[str], part: str) -> torch.Tensor:
        tensors = [self.stored.tensor(f"{module}.{part}") for module in modules]
        # As bytes, because not every device lays FP8 together.
        return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)

    def _fill_in_bands(self, form: WeightFormat, modules: list[str], slot: torch.Tensor) -> None:
        """Some rows of a matrix at a time: a whole matrix in float32 would be fresh memory, with its page faults."""
        rows, columns = form.shape
        step = max(BAND // (4 * columns) // form.block[0], 1) * form.block[0]
        for module, own in zip(modules, slot, strict=True):
            parts = [self.stored.tensor(f"{module}.{part}") for part in form.parts]
            for row in range(0, rows, step):
                band = own[row : row + step]
                self._put(form, form.band(parts, row, row + len(band)), band, [module])

    def _put(self, form: WeightFormat, parts: list[torch.Tensor], slot: torch.Tensor, modules: list[str]) -> None:
        self._finite.add(form.fill(parts, slot), partial(self._read_again, modules))

    def _read_again(self, modules: list[str]) -> None:
        for module in modules:
            read_weight(self.stored, module, self.device)  # says which is not finite

    def require_finite(self) -> None:
        """Look at all units so far, with one synchronisation.

        Raises:
            CheckpointError: a weight or its scale holds a NaN or infinity.
        """
        self._finite.require()

    def _require_shape(self, module: str, matrix: Matrix, shape: tuple[int, ...]) -> None:
        needed = (self.hidden, self.width) if matrix == "down" else (self.width, self.hidden)
        if shape != needed:
            raise CheckpointError(
                f"{self.stored.folder}: {module}: a weight of shape {list(shape)}, but this layer's sizes need "
                f"{list(needed)}; the checkpoint is of another model than its config.json"
            )


def layer_weights(
    checkpoint: Checkpoint,
    facts: Architecture,
    sizes: Sizes,
    layer: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    experts: bool = True,
) -> dict[str, torch.Tensor]:
    """Read one decoder layer's parameters, with fused experts, by transformers' names within the layer.

    Args:
        experts: False leaves the routed experts out.

    Returns:
        Norms, attention, router, `….gate_up_proj` (E, 2I, H) and `….down_proj` (E, H, I), in `dtype`, except what the
        family publishes in float32 (a router and its bias), which stays so. A dense layer has its MLP instead.

    Raises:
        CheckpointError: as `read_weight`.
    """
    dense = layer in sizes.dense
    finite = FiniteCheck()
    weights = _outside_experts(checkpoint, facts, layer, device, dtype, finite, dense=dense)
    if experts and not dense:
        routed, count = ExpertWeights(checkpoint, facts, sizes, layer, device, dtype, finite), sizes["experts"]
        gate_up, down = routed.empty(count)
        for first in range(0, count, UNIT):
            some = slice(first, first + UNIT)
            routed.fill(range(count)[some], gate_up[some], down[some])
        weights[f"{facts.modules.experts}.gate_up_proj"] = gate_up
        weights[f"{facts.modules.experts}.down_proj"] = down
    finite.require()
    return weights


def _outside_experts(
    checkpoint: Checkpoint,
    facts: Architecture,
    layer: int,
    device: torch.device,
    dtype: torch.dtype,
    finite: FiniteCheck,
    *,
    dense: bool,
) -> dict[str, torch.Tensor]:
    """All of a layer but its routed experts, see `layer_weights`."""
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in facts.tensors(dense).items():
        full = facts.layer(layer, name)
        if name in facts.modules.without or (tensor.optional and full not in checkpoint.tensors):
            continue
        stored = checkpoint.tensor(checkpoint.require(full, "a tensor of the layer").name).to(device)
        finite.add(is_finite(stored), partial(_read_again, checkpoint, full))
        weights[facts.in_transformers(name)] = stored.to(torch.float32 if tensor.dtype == "F32" else dtype)
    for name in facts.linears(dense):
        if name in facts.modules.without:
            continue
        full = facts.layer(layer, name)
        weight = unchecked_weight(checkpoint, full, device)
        finite.add(is_finite(weight), partial(read_weight, checkpoint, full, device))
        weights[facts.in_transformers(name) + ".weight"] = weight.to(dtype)
        if f"{name}.bias" not in facts.tensors(dense):
            refuse_bias(checkpoint, full)
    return weights


def _read_again(checkpoint: Checkpoint, name: str) -> None:
    """Raise an error if a tensor holds a number that is not finite."""
    if not bool(is_finite(checkpoint.tensor(name))):
        file = checkpoint.tensors[name].file
        raise CheckpointError(f"{file}: {name} holds a NaN or infinity; download this shard again")
