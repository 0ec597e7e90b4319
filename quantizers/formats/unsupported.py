"""Checkpoints that are refused by their config.json: unsupported formats, sources in 4 bits, swapped arguments.

All are refused with a CheckpointError of one line, which names the key or the sign, and the remedy. (GGUF files are
refused in checkpoint/reader.py.) A source in 4 bits would only get worse, so that a recipe must accept it; candidates
of `verify`, `eval` and `stitch` may have them:

    gpt-oss                      quantization_config.quant_method: mxfp4
    Kimi-K2-Thinking and later   a config group of compressed-tensors whose weights have num_bits: 4
    DeepSeek-V4                  expert_dtype: fp4
    GPTQ, AWQ, AutoRound         quantization_config.bits: 4
    NVFP4, bitsandbytes          quant_algo: NVFP4, load_in_4bit: true
"""

from __future__ import annotations

import contextlib
import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from quantizers.checkpoint.reader import CONFIG, EVALUATE_GGUF, GIVE_ORIGINAL, Checkpoint, read_json
from quantizers.checkpoint.safetensors_header import printed
from quantizers.system.errors import CheckpointError, InputError
from quantizers.system.output_files import REPORT

from .awq_gptq import is_awq_or_gptq, read_packing
from .declared import group_forms
from .fp8 import declared_block
from .modelopt import MODELOPT, algorithm_problems

SECTION, QUARK = "quantization_config", "quark"
SUPPORTED = (
    "dense", "float-quantized", "int-quantized", "mixed-precision", "mxfp4-pack-quantized", "mxfp8-quantized",
    "naive-quantized", "nvfp4-pack-quantized", "pack-quantized",
)  # fmt: skip
# quant_method of formats that are read; mxfp8 is MiniMax-M3's, and mxfp4 gpt-oss's.
METHODS = ("compressed-tensors", "fp8", "mxfp4", "mxfp8", MODELOPT, QUARK)
# By quant_method: what to do instead.
INSTEAD = {
    "gguf": EVALUATE_GGUF,
    "exl2": f"evaluate it with exllamav2's test_inference.py --eval_dataset; {GIVE_ORIGINAL}",
    "exl3": f"evaluate it with exllamav3's eval/model_diff.py; {GIVE_ORIGINAL}",
    "bitsandbytes": "load it with transformers, save model.dequantize() with save_pretrained, and give that folder",
}
OTHERWISE = f"evaluate it with the program that made it; {GIVE_ORIGINAL}"
MLX = f"evaluate it with mlx-lm; {GIVE_ORIGINAL}"


def refuse_unsupported(config: Mapping[str, Any], where: str) -> None:
    """Refuse a checkpoint in a format that this program cannot read, by its config.json, whose path is `where`."""
    section = config.get(SECTION)
    mlx = config.get("quantization")
    if isinstance(mlx, Mapping) and {"bits", "group_size"} <= mlx.keys() and "quant_method" not in (section or {}):
        raise CheckpointError(where, "quantization is MLX's, which is not supported", MLX)
    if is_awq_or_gptq(config):
        read_packing(config[SECTION], f"{where}: {SECTION}")
    elif isinstance(section, Mapping):
        for problem, remedy in _problems(section):
            raise CheckpointError(f"{where}: {SECTION}", problem, remedy)


def _problems(section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    method = section.get("quant_method", "compressed-tensors")
    if method == MODELOPT:
        yield from algorithm_problems(section)
    elif method == QUARK:
        yield from _quark_problems(section)
    elif method not in METHODS:
        instead = INSTEAD.get(method.lower(), OTHERWISE) if isinstance(method, str) else OTHERWISE
        yield f"quant_method is {reprlib.repr(method)}, which is not supported", instead
    groups = section.get("config_groups")
    formats = [section.get("format")]
    if isinstance(groups, Mapping):
        formats += [group.get("format") for group in groups.values() if isinstance(group, Mapping)]
    for name in formats:
        if name is not None and name not in SUPPORTED:
            yield f"format {reprlib.repr(name)} is not one of {', '.join(SUPPORTED)}", OTHERWISE
    if section.get("transform_config"):
        yield "transform_config rotates activations at run time, which is not supported", OTHERWISE
    sparsity = section.get("sparsity_config") or {}
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        yield f"sparsity_config has format {reprlib.repr(sparsity['format'])}, which is not supported", OTHERWISE


def _quark_problems(section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Whether AMD's Quark wrote anything but MXFP4: see mxfp4.py."""
    whole = section.get("global_quant_config")
    weight = whole.get("weight") if isinstance(whole, Mapping) else None
    wanted = {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0"}
    if not isinstance(weight, Mapping) or not wanted.items() <= weight.items():
        yield "Quark's global_quant_config.weight is no MXFP4 (dtype fp4, group_size 32, scale_format e8m0)", OTHERWISE


FEW_BITS = 4
ALREADY = "this model already has weights of 4 bits or fewer, so there is nothing to quantize"
RELEASE = "give the model's FP8 or BF16 release"
ACCEPT = (
    f"{RELEASE}; or, to have its experts in fewer bits, source.accept_quantized: true in the recipe (quantize new "
    "--accept-quantized)"
)
BITS = ("bits", "w_bit", "num_bits")
SWITCHES = ("load_in_4bit", "_load_in_4bit")
# Keys with a format's name; of dtypes, not those of the KV cache or of activations.
NAMED = re.compile(r"quant_method|quant_algo|format|fmt|(torch_|.*(expert|weight).*)?dtype")
FOUR_BIT_NAME = re.compile(r"(fp|float|int|nf|w)_?4(?!\d)", re.IGNORECASE)  # mxfp4, float4_e2m1, int4, W4A16, nf4
INNER = ("text_config", SECTION, "config_groups", "weights")  # sections that say how weights are stored


def refuse_four_bits(config: Mapping[str, Any], where: str) -> None:
    """Refuse a source whose weights have 4 bits or fewer, by its config.json, whose path is `where`."""
    for sign in four_bit_keys(config):
        remedy = RELEASE
        with contextlib.suppress(CheckpointError):  # accepted, it would be refused for this
            refuse_unquantizable(config, where, accepted=True)
            remedy = ACCEPT
        raise CheckpointError(where, f"{sign}: {ALREADY}", remedy)


def refuse_unquantizable(config: Mapping[str, Any], where: str, *, accepted: bool = False) -> None:
    """Refuse a source that cannot be quantized by its config.json, whose path is `where`.

    Args:
        accepted: whether the recipe accepts weights of 4 bits or fewer.
    """
    if not accepted:
        refuse_four_bits(config, where)
    if is_awq_or_gptq(config):
        raise CheckpointError(
            where,
            f"{SECTION}.quant_method is {config[SECTION]['quant_method']!r}: these weights are integers already",
            RELEASE,
        )
    refuse_unsupported(config, where)
    declared_block(config, where)  # for its errors
    if (config.get(SECTION) or {}).get("quant_method") == "compressed-tensors":
        group_forms(config, where)


def four_bit_keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Each key that declares weights of 4 bits or fewer, with its value; those of inner sections included."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and (key in INNER or prefix.endswith("config_groups.")):
            yield from four_bit_keys(value, f"{name}.")
        named = isinstance(value, str) and NAMED.fullmatch(key) and FOUR_BIT_NAME.search(value)
        few = type(value) is int and key in BITS and 1 <= value <= FEW_BITS
        if named or few or (value is True and key in SWITCHES):
            yield f"{printed(name)} is {reprlib.repr(value)}"


def refuse_swapped_arguments(source: Checkpoint, candidate: Checkpoint, remedy: str) -> None:
    """Refuse a source that was quantized, with a candidate that was not; the remedy is what to give instead.

    Two quantized checkpoints may be compared in either order, and so may two that are not: FP8 and its BF16 copy.
    """
    sign = _quantized_by(source)
    if sign is not None and _quantized_by(candidate) is None:
        raise CheckpointError(
            source.name,
            f"is given as the source, but {sign}, and {candidate.name} shows no such sign",
            f"they are the wrong way round: {remedy}",
        )


def _quantized_by(checkpoint: Checkpoint) -> str | None:
    """Evidence that a checkpoint was quantized from another; None if there is none."""
    with contextlib.suppress(InputError):  # there is no report, or it is damaged
        if "seal" in read_json(checkpoint.folder / REPORT):
            return f"its {REPORT} says that this program made it"
    if is_awq_or_gptq(checkpoint.config):
        return f"its {CONFIG} says quant_method: {checkpoint.config[SECTION]['quant_method']}"
    return next((f"its {CONFIG} says {sign}" for sign in four_bit_keys(checkpoint.config)), None)
