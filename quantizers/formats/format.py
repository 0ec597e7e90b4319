"""A stored format is one object, in one file of this room: planner, solver, writer, audit, report and servers ask it.

    fp8.py              FP8 with a scale per block or per row
    plain.py            BF16, F16 or F32
    packed_integers.py  INT2 to INT8 with a scale per group
    nvfp4.py            FP4 with an FP8 scale per group
    mxfp8.py            FP8 with a power of two per group
    mxfp4.py            FP4 with a power of two per group
    modelopt.py         NVFP4 of ModelOpt's files
    awq_gptq.py         files of AutoAWQ, GPTQ and AutoRound, as they are read
    foreign.py          whatever else other programs write, as it is read

A matrix (R, C) is stored as several tensors, called by the last part of their names, the quantized numbers first. What
experts can be quantized to is an `ExpertFormat`: a file of this room that defines one is enough, with its `name` in
`Format` of the recipe's schema, and its kernels in quantizers/serving/kernels.py.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import Spec, TensorInfo

if TYPE_CHECKING:
    import torch

# Legend: R rows (outputs), C columns (inputs), g group size, E experts

Grid = int | Literal["e2m1"]  # what is rounded to: the bits of symmetric integers, or E2M1; see solve/grid.py
Parts = tuple[tuple[str, Spec], ...]  # the tensors of a matrix, by the last part of their names
INTEGERS = "int"  # the name of the format that is meant where none is named
# Keys of a recipe's experts.
NAME = "format"
BITS = "bits"
GROUP_SIZE = "group_size"
ACTIVATIONS = "activations"
PACKED, SCALE = "weight_packed", "weight_scale"  # last names of tensors
SCALES = ("weight_scale_inv", SCALE, "scale")  # those of scales of groups or blocks; the last is DeepSeek-V4's


class Format(ABC):
    """A way to store a matrix. Subclasses are frozen dataclasses: two formats with the same fields are equal."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """The key under which servers' kernels for it are listed, see quantizers/serving/kernels.py."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The kind in words, such as `FP8 in blocks`."""


class ForeignFormat(Format):
    """A format of another program, of which a matrix can only be read as a whole."""

    @abstractmethod
    def read(self, checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor:
        """A module's weight (R, C) in float32 on `device`; what is not finite is left in.

        Raises:
            CheckpointError: a tensor is missing, or has a wrong dtype or shape.
        """


class RowFormat(Format):
    """A format of which any rows can be read. Its name for people is `str`: `FP8 block 128x128`."""

    @property
    @abstractmethod
    def weight_bits(self) -> int:
        """Bits of a weight, without its share of the scale."""

    @classmethod
    @abstractmethod
    def stored(cls, checkpoint: Checkpoint, module: str) -> StoredMatrix | None:
        """A module's matrix, from headers, if it is stored in this format.

        Raises:
            CheckpointError: it is, but its tensors do not belong together.
        """

    @property
    def edges(self) -> tuple[int, int]:
        """Rows and columns that share a scale; 1 and 1 where there are none, or one for a row."""
        return (1, 1)

    @abstractmethod
    def parts(self, shape: tuple[int, ...]) -> Parts:
        """The tensors of a matrix (R, C)."""

    def specs(self, module: str, shape: tuple[int, ...]) -> dict[str, Spec]:
        """The tensors of a module's matrix (R, C), by their full names."""
        return {f"{module}.{part}": spec for part, spec in _cached_parts(self, shape)}

    @abstractmethod
    def unpack(self, parts: Sequence[torch.Tensor], columns: int) -> torch.Tensor:
        """The numbers (r, C) of some rows, from their parts (see `StoredMatrix.band`), on the parts' device."""


@cache
def _cached_parts(form: RowFormat, shape: tuple[int, ...]) -> Parts:
    return form.parts(shape)


class QuantizedFormat(RowFormat):
    """A format that config.json declares in a config group of compressed-tensors."""

    @property
    @abstractmethod
    def group_name(self) -> str:
        """The end of the name of its config group."""

    @abstractmethod
    def config_group(self) -> dict[str, Any]:
        """`format`, `weights` and `input_activations` of its config group, as compressed-tensors writes them."""

    @classmethod
    @abstractmethod
    def of_config_group(cls, weights: Mapping[str, Any], inputs: Any) -> Self | None:
        """The format that `weights` and `input_activations` of a config group declare; None if it is another.

        Zero points are not looked at: they are beside the same tensors.
        """


def arguments(bits: int, kind: str, strategy: str, dynamic: bool | str = False, **more: Any) -> dict[str, Any]:
    """A scheme's arguments as compressed-tensors has them."""
    fixed = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": dynamic}
    return fixed | more


class ExpertFormat(QuantizedFormat):
    """A format that experts can be quantized to.

    Attributes:
        name: in a recipe, as `experts.format`.
        keys: those of a recipe's experts that belong to it: of `bits`, `group_size`, `activations`, `scales_sign`, and
            `budget`, which stands for whatever chooses bits and group size.
        bits, group_size: of a weight, and how many columns share a scale.
        unknown_on: cards (of the recipe's `as_served`) of whose kernels for it nothing is known.
    """

    name: ClassVar[str]
    keys: ClassVar[frozenset[str]]
    bits: int
    group_size: int
    unknown_on: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            _BY_NAME[cls.name] = cls

    @classmethod
    @abstractmethod
    def of_keys(cls, keys: Mapping[str, Any]) -> Self:
        """The format with the keys of a recipe's experts, or of `as_dict`."""

    @classmethod
    @abstractmethod
    def of_experts(cls, checkpoint: Checkpoint, modules: Sequence[str]) -> Self | None:
        """The format of some experts' matrices, by the first that is whole; None if they are stored in another."""

    @property
    def weight_bits(self) -> int:
        """Its bits."""
        return self.bits

    @property
    def edges(self) -> tuple[int, int]:
        """A group of a row."""
        return (1, self.group_size)

    @property
    @abstractmethod
    def activations(self) -> int:
        """Bits of the numbers that servers multiply weights with."""

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """Grid that weights are rounded to."""

    @property
    @abstractmethod
    def coarse_scales(self) -> bool:
        """Whether scales are too coarse to be divided and rounded again after the weights were rounded."""

    @property
    def input_scales(self) -> bool:
        """Whether each matrix has a stored scale of its inputs."""
        return False

    @property
    def measured_on(self) -> tuple[str, ...]:
        """Cards on which an output is measured as served without being asked for."""
        return ()

    @property
    def by_kernel(self) -> bool:
        """Whether our kernels round to it on a GPU."""
        return isinstance(self.grid, int)

    @property
    @abstractmethod
    def bits_per_weight(self) -> float:
        """Bits of a stored weight and its share of the scale."""

    @abstractmethod
    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """The first part of the matrices with these codes, int8 (…, R, C); see `LayerResult`."""

    def pack_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """The scales to store for those of `LayerResult`, (…, R, C / g) bfloat16."""
        return scale.contiguous()

    def fits(self, columns: int, parallel: int = 1) -> bool:
        """Whether groups divide so many columns over so many GPUs."""
        return columns % (self.group_size * parallel) == 0

    @property
    @abstractmethod
    def short(self) -> str:
        """Its name without the group size."""

    @property
    @abstractmethod
    def words(self) -> tuple[str, ...]:
        """Its name, and its group size in words where that is no part of the name."""

    @property
    @abstractmethod
    def in_words(self) -> str:
        """Description of the storage format, for the model card."""

    @property
    def group_name(self) -> str:
        """The end of the name of its config group, where there are several."""
        return f"int{self.bits}_group{self.group_size}"

    @property
    def as_dict(self) -> dict[str, int | str]:
        """For report.json."""
        return {BITS: self.bits, GROUP_SIZE: self.group_size, NAME: self.name, ACTIVATIONS: self.activations}

    def __lt__(self, other: ExpertFormat) -> bool:
        return self._rank < other._rank

    @property
    def _rank(self) -> tuple[int, int, str, int]:
        return self.bits, self.group_size, self.name, self.activations


# Registry ------------------------------------------------------------------------------------------------------------

_BY_NAME: dict[str, type[ExpertFormat]] = {}


@cache
def expert_formats() -> Mapping[str, type[ExpertFormat]]:
    """The formats that experts can be quantized to, by their names in a recipe: all that files of this room define.

    Integers are last: what is stored in no other format is taken for them, whose messages say what is wrong.
    """
    for file in pkgutil.iter_modules(importlib.import_module(__package__).__path__):
        importlib.import_module(f"{__package__}.{file.name}")
    return dict(sorted(_BY_NAME.items(), key=lambda item: (item[0] == INTEGERS, item[0])))


def format_of(keys: Mapping[str, Any]) -> ExpertFormat:
    """The format that a recipe's experts, or a row of report.json, name; integers where they name none."""
    return expert_formats()[keys.get(NAME, INTEGERS)].of_keys(keys)


def format_of_experts(checkpoint: Checkpoint, modules: Sequence[str]) -> ExpertFormat:
    """The format of some experts' matrices, by the first that is whole.

    Raises:
        CheckpointError: they are in no format that experts can be quantized to.
    """
    for candidate in expert_formats().values():
        if (form := candidate.of_experts(checkpoint, modules)) is not None:
            return form
    raise AssertionError("what is stored in no other format is taken for integers")


def names_with(key: str) -> str:
    """The names of the formats that a key of a recipe's experts belongs to, for messages."""
    return " or ".join(name for name, form in expert_formats().items() if key in form.keys)


# As stored -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix (R, C) of a checkpoint, in a format of which any rows can be read."""

    form: RowFormat
    parts: tuple[str, ...]  # the last names of the tensors with the matrix's rows, the quantized numbers first
    shape: tuple[int, int]

    def band(self, parts: Sequence[torch.Tensor], first: int, last: int) -> list[torch.Tensor]:
        """The parts of rows `first` to `last`, both multiples of a block's rows or the matrix's end."""
        height = self.form.edges[0]
        scales = [scale[first // height : math.ceil(last / height)] for scale in parts[1:2]]
        return [parts[0][first:last], *scales, *parts[2:]]  # a third belongs to the whole matrix

    def numbers(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows (r, C) from their parts, on the parts' device: a product in float32, or a plain weight as it is."""
        return self.form.unpack(parts, self.shape[1])


def first_part(checkpoint: Checkpoint, module: str, names: Sequence[str]) -> TensorInfo | None:
    """The header entry of the first of a module's tensors with one of these last names; None if there is none."""
    for name in names:
        if (info := checkpoint.tensors.get(f"{module}.{name}")) is not None:
            return info
    return None


def weight_schemes(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The `weights` entry of every config group in config.json."""
    section = config.get("quantization_config")
    groups = section.get("config_groups") if isinstance(section, Mapping) else None
    groups = groups.values() if isinstance(groups, Mapping) else ()
    schemes = (group.get("weights") for group in groups if isinstance(group, Mapping))
    return [weights for weights in schemes if isinstance(weights, Mapping)]
