"""Linear layers quantized by AutoAWQ, GPTQ or AutoRound: unsigned integers packed into int32, inputs along the rows.

    AutoAWQ    qweight int32 (C, R/8)       eight outputs per int32, in the order 0, 2, 4, 6, 1, 3, 5, 7
    GPTQ       qweight int32 (C·b/32, R)    32/b inputs per int32, in order
    both       qzeros  int32 (n, R·b/32)    zero points, packed along the outputs; AutoAWQ's in its own order
               scales  float (n, R)         usually FP16
    GPTQ       g_idx   int32 (C,)           optional: the group of each input; default: input c is in group c // g

    weight[r, c] = (code[c, r] - zero[group(c), r]) * scale[group(c), r]

Computed in float32 from the stored scales, where it is exact. A GPTQ file of version 1 stores `zero - 1` modulo 2^b,
one of version 2 `zero`. Their quantization_config:

    quant_method  layout                                                 overrides for single modules
    awq           version: gemm
    gptq          checkpoint_format: gptq (version 1) or gptq_v2         dynamic: regular expressions, `-:` excludes
    auto-round    packing_format: a key of AUTO_ROUND                    extra_config: names, or regular expressions

Keys as AutoAWQ 0.2, AutoGPTQ 0.7, GPTQModel 5 and AutoRound 0.15 write them. GPTQModel takes the first override that
`re.match`es; AutoRound the module's name, then `re.search` of each key with a special character; vLLM does the same.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from quantizers.checkpoint.reader import CONFIG, Checkpoint
from quantizers.checkpoint.safetensors_header import FLOATING
from quantizers.system.errors import CheckpointError

from .format import ForeignFormat
from .packed_integers import Integers

if TYPE_CHECKING:
    import torch

    from quantizers.checkpoint.safetensors_header import TensorInfo

# Legend: R rows (outputs), C columns (inputs), b bits, g group size, n = ⌈C / g⌉ groups

Layout = Literal["awq", "gptq"]
# By the name of a layout: its kind, and the number to add to each stored zero point.
AUTO_ROUND: dict[object, tuple[Layout, int]] = {
    "auto_round:auto_gptq": ("gptq", 1), "auto_round:gptq": ("gptq", 1),
    "auto_round:gptqmodel": ("gptq", 0), "auto_round": ("gptq", 0),
    "auto_round:auto_awq": ("awq", 0), "auto_round:awq": ("awq", 0),
}  # fmt: skip
# By quant_method: the keys that may hold the layout's name, the known names, and the default.
METHODS: dict[str, tuple[tuple[str, ...], dict[object, tuple[Layout, int]], str]] = {
    "awq": (("version", "checkpoint_format", "format"), {"gemm": ("awq", 0)}, "gemm"),
    "gptq": (("checkpoint_format", "format"), {"gptq": ("gptq", 1), "gptq_v2": ("gptq", 0)}, "gptq"),
    "auto-round": (("packing_format",), AUTO_ROUND, "auto_round:auto_gptq"),
}
BITS: dict[Layout, tuple[int, ...]] = {"awq": (4,), "gptq": (4, 8)}
UNQUANTIZED_BITS = 16  # AutoRound writes this for a module that it does not quantize
SPECIAL = re.compile(r"[*+?^$()\[\]{}|\\]")
Form = tuple[int, int]  # bits and group size of a module; group -1 is a whole column


@dataclass(frozen=True)
class Packing:
    """Packing of a checkpoint's integers."""

    layout: Layout
    zero_offset: int  # to add to a stored zero point: 1 in version 1 of GPTQ
    form: Form  # of a module without an override
    in_order: bool  # the config promises inputs in the order of their groups (`desc_act: false`)
    overrides: tuple[tuple[str, Form | None], ...]  # by regular expressions, matched from the start of a module's name

    def of(self, module: str) -> Form | None:
        """Bits and group size of a module; None if it is not quantized."""
        return next((form for pattern, form in self.overrides if re.match(pattern, module)), self.form)


def is_awq_or_gptq(config: Mapping[str, Any]) -> bool:
    """Whether config.json declares one of these formats."""
    section = config.get("quantization_config")
    return isinstance(section, Mapping) and section.get("quant_method") in [*METHODS]  # which may be unhashable


@dataclass(frozen=True)
class AwqGptq(ForeignFormat):
    """One of these formats, as it is read."""

    kind: ClassVar[str] = Integers.kind
    description: ClassVar[str] = Integers.description

    @staticmethod
    def has(checkpoint: Checkpoint, module: str) -> bool:
        """Whether a module is stored so."""
        return f"{module}.qweight" in checkpoint.tensors

    def read(self, checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor:
        """The weight (R, C) float32."""
        return dequantize_awq_gptq(checkpoint, module, device)


def dequantize_awq_gptq(checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor:
    """A module's weight (R, C) in float32 on `device`, from its qweight, qzeros, scales and g_idx.

    Raises:
        CheckpointError: a tensor is missing, or they fit neither each other nor quantization_config.
    """
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.entrypoints.convert import AutoAWQConverter

    where = f"{checkpoint.folder / CONFIG}: quantization_config"
    packing = read_packing(checkpoint.config["quantization_config"], where)
    declared = packing.of(module)
    parts = ("qweight", "qzeros", "scales")
    infos = [checkpoint.require(f"{module}.{part}", "part of a quantized layer") for part in parts]
    if declared is None:
        raise CheckpointError(infos[0].file, f"{infos[0].name} is present, but {where} excludes this layer")
    if f"{module}.weight" in checkpoint.tensors:
        raise CheckpointError(
            infos[0].file, f"{infos[0].name} and a plain weight are both present", "the checkpoint is ambiguous"
        )
    bits = declared[0]
    rows, columns, group = _shape(infos, packing.layout, declared, where)
    qweight, qzeros, scales = (checkpoint.tensor(info.name).to(device) for info in infos)
    if packing.layout == "awq":
        codes, zeros = AutoAWQConverter.reverse_awq_order(*AutoAWQConverter.unpack_awq(qweight, qzeros, bits), bits)
        codes, zeros = codes & 15, zeros & 15
    else:
        half = 1 << (bits - 1)  # the library unpacks to signed integers
        codes = unpack_from_int32(qweight, bits, torch.Size((columns, rows)), packed_dim=0).int() + half
        zeros = unpack_from_int32(qzeros, bits, torch.Size((len(scales), rows)), packed_dim=1).int() + half
        zeros = (zeros + packing.zero_offset) % (1 << bits)
    groups = torch.arange(columns) // group
    if f"{module}.g_idx" in checkpoint.tensors:
        groups = _stored_groups(checkpoint, module, groups, len(scales), packing.in_order)
    groups = groups.to(device)
    weight: torch.Tensor = (codes.float() - zeros.float()[groups]) * scales.float()[groups]  # (C, R)
    return weight.T.contiguous()


def _shape(infos: list[TensorInfo], layout: Layout, form: Form, where: str) -> tuple[int, int, int]:
    """R, C and g, from qweight, qzeros and scales that fit each other and the config."""
    (qweight, qzeros, scales), (bits, size) = infos, form
    per_int = 32 // bits
    if all(len(info.shape) == 2 and all(info.shape) for info in infos):
        rows, awq = scales.shape[1], layout == "awq"
        columns = qweight.shape[0] * (1 if awq else per_int)
        group = columns if size == -1 else size
        outputs = (qweight.shape[1] * (per_int if awq else 1), qzeros.shape[1] * per_int)
        fit = outputs == (rows, rows) and qzeros.shape[0] == scales.shape[0] == math.ceil(columns / group)
        if fit and qweight.dtype == qzeros.dtype == "I32" and scales.dtype in FLOATING:
            return rows, columns, group
    stored = ", ".join(f"{info.name.rpartition('.')[2]} {info.dtype} {list(info.shape)}" for info in infos)
    raise CheckpointError(
        f"{qweight.file}: {qweight.name.rpartition('.')[0]}",
        f"{stored} do not match {where}: {bits} bits in groups of {size}",
    )


def _stored_groups(
    checkpoint: Checkpoint, module: str, default: torch.Tensor, count: int, in_order: bool
) -> torch.Tensor:
    """The group of each column, int64 (C,), from g_idx; `default` is the order without it."""
    info = checkpoint.tensors[f"{module}.g_idx"]
    stored = checkpoint.tensor(info.name).cpu().long()
    if stored.shape != default.shape or bool((stored < 0).any()) or bool((stored >= count).any()):
        raise CheckpointError(info.file, f"{info.name} must give each of {len(default)} inputs one of {count} groups")
    if in_order and not stored.equal(default):
        raise CheckpointError(
            info.file,
            f"{info.name} is out of order, but {CONFIG}: quantization_config.desc_act is false",
            "set desc_act to true if the checkpoint was quantized with it",
        )
    return stored


def read_packing(section: Mapping[str, Any], where: str) -> Packing:
    """Parse a quantization_config whose quant_method is one of METHODS; `where` is its file and key, for messages.

    Raises:
        CheckpointError: one line that names the unsupported key.
    """
    layout, zero_offset = _layout(section, where)
    bits_key, group_key = (
        new if new in section else old for new, old in (("w_bit", "bits"), ("q_group_size", "group_size"))
    )
    bits, group = section.get(bits_key), section.get(group_key)
    if type(bits) is not int or bits not in BITS[layout]:
        raise _unsupported(section, where, bits_key, " or ".join(map(str, BITS[layout])))
    if not _is_group(group):
        raise _unsupported(section, where, group_key, "a positive number or -1")
    _refuse_all_but_integers(section, where)
    in_order = section["quant_method"] == "gptq" and section.get("desc_act") is False
    form = (bits, int(group or -1))
    return Packing(layout, zero_offset, form, in_order, tuple(_overrides(section, where, layout, form)))


def _unsupported(section: Mapping[str, Any], where: str, key: str, only: str) -> CheckpointError:
    return CheckpointError("", f"{where}.{key} is {reprlib.repr(section.get(key))}", f"only {only} is supported")


def _refuse_all_but_integers(keys: Mapping[str, Any], where: str) -> None:
    for key, only in (("pack_dtype", "int32"), ("data_type", "int"), ("adapter", None), ("lora", None)):
        if keys.get(key) and keys[key] != only:
            raise _unsupported(keys, where, key, only or "a checkpoint without one")


def _is_group(size: object) -> bool:
    return type(size) is int and (size == -1 or size > 0)


def _layout(section: Mapping[str, Any], where: str) -> tuple[Layout, int]:
    if section.get("is_marlin_format"):  # AutoGPTQ's; such a file has no checkpoint_format
        raise _unsupported(section, where, "is_marlin_format", "the format gptq")
    keys, known, default = METHODS[section["quant_method"]]
    key = next((key for key in keys if section.get(key) is not None), keys[0])
    named = section.get(key, default)
    name = named.lower() if isinstance(named, str) else None  # AutoAWQ also wrote GEMM
    if name not in known:
        raise CheckpointError(
            "",
            f"{where}.{key} is {reprlib.repr(named)}, another packing; only {' or '.join(map(str, known))} is "
            "supported",
            "save the checkpoint in that format",
        )
    return known[name]


def _overrides(section: Mapping[str, Any], where: str, layout: Layout, form: Form) -> Iterator[tuple[str, Form | None]]:
    for key in ("dynamic", "extra_config"):
        given = section.get(key) or {}
        if not isinstance(given, Mapping):
            raise CheckpointError("", f"{where}.{key} is {reprlib.repr(given)}", "an object is needed")
        parsed = []
        for name, keys in given.items():
            excluded = keys is False or name.startswith("-:")
            override = None if excluded else _override(keys, f"{where}.{key}[{reprlib.repr(name)}]", layout, form)
            parsed.append((name.removeprefix("-:").removeprefix("+:"), override))
        if key == "extra_config":
            names = [(rf"{re.escape(name)}\Z", override) for name, override in parsed]
            parsed = [*names, *((f".*?(?:{name})", override) for name, override in parsed if SPECIAL.search(name))]
        for pattern, override in parsed:
            try:
                re.compile(pattern)
            except re.error as failure:
                problem = f"{reprlib.repr(pattern)} is not a regular expression ({failure.msg})"
                raise CheckpointError(f"{where}.{key}", problem) from None
            yield pattern, override


def _override(keys: Any, where: str, layout: Layout, form: Form) -> Form | None:
    """Apply the keys of an override to a form; None if its modules are not quantized."""
    if not isinstance(keys, Mapping):
        raise CheckpointError("", f"{where} is {reprlib.repr(keys)}", "an object is needed")
    bits, group = keys.get("bits", form[0]), keys.get("group_size", form[1])
    if type(bits) is int and bits >= UNQUANTIZED_BITS:
        return None
    if type(bits) is not int or bits not in BITS[layout] or not _is_group(group):
        raise CheckpointError(
            "", f"{where} is {reprlib.repr(keys)}", f"only {' or '.join(map(str, BITS[layout]))} bits are supported"
        )
    _refuse_all_but_integers(keys, where)
    return bits, group
