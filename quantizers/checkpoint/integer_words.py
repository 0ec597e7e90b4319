"""Linear layers as AutoAWQ and GPTQ store them: unsigned integers in 32-bit words, inputs along the rows.

    AutoAWQ    qweight int32 (C, R/8)       eight outputs in a word, in the order 0, 2, 4, 6, 1, 3, 5, 7
    GPTQ       qweight int32 (C·b/32, R)    32/b inputs in a word, in their order
    both       qzeros  int32 (n, R·b/32)    zero points, packed along the outputs; AutoAWQ's in the same order
               scales  float (n, R)         FP16 as a rule
    GPTQ       g_idx   int32 (C,)           optional: the group of each input; without it, input c has group c // g

    weight[r, c] = (code[c, r] - zero[group(c), r]) * scale[group(c), r]

This is computed in float32 from the stored scales, where it is exact. Kernels compute it in the model's 16 bits, and
round it to them. A GPTQ file of the first version holds `zero - 1` modulo 2^b, one of the second version `zero`.

compressed-tensors unpacks the words: AutoAWQ's with its AutoAWQConverter, GPTQ's as its own, along the other axis.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from quantizers.system.errors import CheckpointError

from .integer_words_config import Words, read_words
from .reader import CONFIG, Checkpoint

if TYPE_CHECKING:
    import torch

    from .safetensors_header import TensorInfo

# Legend: R rows (outputs), C columns (inputs), b bits, g group size, n = ⌈C / g⌉ groups

PARTS = ("qweight", "qzeros", "scales", "g_idx")
FLOATING = ("F16", "BF16", "F32")


def words_weight(checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor:
    """A module's weight (R, C) in float32 on `device`, from its qweight, qzeros, scales and g_idx.

    Raises:
        CheckpointError: a tensor is missing, or they belong neither together nor to quantization_config.
    """
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.entrypoints.convert import AutoAWQConverter

    words = words_of(checkpoint)
    declared = words.of(module)
    infos = [checkpoint.require(f"{module}.{part}", "a part of a quantized layer") for part in PARTS[:3]]
    if declared is None or f"{module}.weight" in checkpoint.tensors:
        other = "lies beside its weight" if declared else f"is there, though {_where(checkpoint)} leaves this layer out"
        raise CheckpointError(f"{infos[0].file}: {infos[0].name} {other}; nobody can say which of the two holds")
    bits, size = declared
    rows, columns, group = _shape(checkpoint, infos, words, bits, size)
    qweight, qzeros, scales = (checkpoint.tensor(info.name).to(device) for info in infos)
    if words.layout == "awq":
        codes, zeros = AutoAWQConverter.reverse_awq_order(*AutoAWQConverter.unpack_awq(qweight, qzeros, bits), bits)
        codes, zeros = codes & 15, zeros & 15
    else:
        half = 1 << (bits - 1)  # the library takes codes for signed ones
        codes = unpack_from_int32(qweight, bits, torch.Size((columns, rows)), packed_dim=0).int() + half
        zeros = unpack_from_int32(qzeros, bits, torch.Size((len(scales), rows)), packed_dim=1).int() + half
        zeros = (zeros + words.missing) % (1 << bits)
    groups = _groups(checkpoint, module, columns, group, len(scales), words.in_order).to(device)
    weight: torch.Tensor = (codes.float() - zeros.float()[groups]) * scales.float()[groups]  # (C, R)
    return weight.T.contiguous()


def words_of(checkpoint: Checkpoint) -> Words:
    """How a checkpoint's integers are stored.

    Raises:
        CheckpointError: see `read_words`.
    """
    return read_words(checkpoint.config["quantization_config"], _where(checkpoint))


def _where(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.folder / CONFIG}: quantization_config"


def _shape(checkpoint: Checkpoint, infos: list[TensorInfo], words: Words, bits: int, size: int) -> tuple[int, int, int]:
    """R, C and g; refuses tensors that do not fit each other or the section.

    Args:
        infos: of qweight, qzeros and scales.
        size: g as the section says it, -1 for a whole column.
    """
    qweight, qzeros, scales = infos
    in_word = 32 // bits
    if all(len(info.shape) == 2 and all(info.shape) for info in infos):
        rows, packed = scales.shape[1], words.layout == "awq"
        columns = qweight.shape[0] * (1 if packed else in_word)
        group = columns if size == -1 else size
        outputs = (qweight.shape[1] * (in_word if packed else 1), qzeros.shape[1] * in_word)
        fit = outputs == (rows, rows) and qzeros.shape[0] == scales.shape[0] == math.ceil(columns / group)
        if fit and qweight.dtype == qzeros.dtype == "I32" and scales.dtype in FLOATING:
            return rows, columns, group
    found = ", ".join(f"{info.name.rpartition('.')[2]} {info.dtype} {list(info.shape)}" for info in infos)
    raise CheckpointError(
        f"{qweight.file}: {qweight.name.rpartition('.')[0]}: {found} are not the {bits} bits in groups of {size} that "
        f"{_where(checkpoint)} promises"
    )


def _groups(checkpoint: Checkpoint, module: str, columns: int, group: int, count: int, in_order: bool) -> torch.Tensor:
    """The group of each column, int64 (C,)."""
    import torch

    natural = torch.arange(columns) // group
    info = checkpoint.tensors.get(f"{module}.g_idx")
    if info is None:
        return natural
    stored = checkpoint.tensor(info.name).cpu().long()
    if stored.shape != natural.shape or bool((stored < 0).any()) or bool((stored >= count).any()):
        raise CheckpointError(f"{info.file}: {info.name} must give each of {columns} inputs one of {count} groups")
    if in_order and not torch.equal(stored, natural):
        raise CheckpointError(
            f"{info.file}: {info.name} is out of order, though {_where(checkpoint)}.desc_act is false: some programs "
            "honour it and some do not; set desc_act to true if the checkpoint was made with it"
        )
    return stored
