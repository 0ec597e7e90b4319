"""The whole route with llm-compressor, with the steps that its users take today, for comparison.

FP8 source ─► BF16 copy on disk ─► loaded ─► `oneshot` ─► saved ─► stitched with the source's FP8 attention.

The router is in the AWQ mapping (without it the result is a different, worse model). The copy is loaded as
float32, because matmuls on a CPU are faster in float32 than in bfloat16.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.config_class import config_of
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.formats.fp8 import ROWS, block_size, stored_form
from quantizers.recipe.schema import Awq, Experts
from quantizers.solve.llmcompressor_engine import quiet_library
from quantizers.system.errors import InputError

EXPERTS = r"re:.*\.experts\.\d+\..*_proj$"  # routed ones
STEPS = ("convert to BF16", "load", "oneshot", "save", "stitch")


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@quiet_library()
def library_route(
    source: Checkpoint,
    facts: Architecture,
    tokens: Sequence[torch.Tensor],
    experts: Experts,
    work: Path,
    *,
    own: Path | None = None,
) -> dict[str, Any]:
    """Take the whole route.

    Args:
        tokens: token ids, one sequence (T,) int64 per batch.
        experts: `bits`, `group_size` and `awq` are used.
        work: an empty folder; the output of each step stays there, the stitched checkpoint in `stitched`.
        own: the file that `facts` was read from, if it is the user's own.

    Returns:
        seconds by step, bytes written by step, and the folder of the result.
    """
    from quantizers.repair.stitch import stitch_experts

    folders = {name: work / name for name in ("bf16", "saved", "stitched")}
    seconds: dict[str, float] = {}
    started = time.perf_counter()

    def lap(step: str) -> None:
        nonlocal started
        now = time.perf_counter()
        seconds[step], started = now - started, now

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's use of torch and transformers warns
        convert(source, folders["bf16"])
        lap(STEPS[0])
        model = load(folders["bf16"], facts)
        lap(STEPS[1])
        assert isinstance(experts.awq, Awq)
        oneshot(model, tokens, [awq_modifier(experts.awq), quantization_modifier(experts)])
        lap(STEPS[2])
        model.save_pretrained(folders["saved"], save_compressed=True)
        lap(STEPS[3])
        stitch_experts(
            source.folder, folders["saved"], folders["stitched"], repair_router=True, facts=own, device="cpu"
        )
        lap(STEPS[4])
    return {
        "seconds": seconds,
        "bytes": {name: folder_bytes(folder) for name, folder in folders.items()},
        "folder": folders["stitched"],
    }


def convert(source: Checkpoint, folder: Path) -> None:
    """The copy in BF16; of a source that is not FP8, as it is."""
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer, convert_checkpoint

    class Dequantizer(FP8BlockDequantizer):
        """Makes weights contiguous: for one that is not a multiple of the block, compressed-tensors 0.19 returns a
        view, which it then cannot save.
        """

        def process(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: tensor.contiguous() for name, tensor in super().process(tensors).items()}

    if stored_form(source.tensors, block_size(source)) == ROWS:
        raise InputError(
            source.folder, "FP8 with a scale per row is not converted here", "give a model with a scale per block"
        )
    modules = sorted(
        {name.removesuffix(".weight_scale_inv") for name in source.tensors if name.endswith(".weight_scale_inv")}
    )
    if not modules:
        shutil.copytree(source.folder, folder)
        return
    converter = Dequantizer(targets=modules, weight_block_size=block_size(source), dtype=torch.bfloat16)
    convert_checkpoint(source.folder, folder, converter)


def load(folder: Path, facts: Architecture) -> Any:
    """The model in float32, by transformers."""
    import transformers

    config = config_of(getattr(transformers, facts.model_class), open_folder(folder).config)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)


def awq_modifier(awq: Awq) -> Any:
    """The library's AWQ, with the router in the mapping; where `awq` folds nothing, between w3 and w2 alone."""
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier

    gate, up, down = (EXPERTS.replace(".*_proj", f"{name}_proj") for name in ("gate", "up", "down"))
    of_norm = AWQMapping("re:.*post_attention_layernorm$", ["re:.*mlp.gate$", gate, up])
    return AWQModifier(
        mappings=[*([of_norm] if awq.fold else []), AWQMapping(up, [down])],
        n_grid=awq.grid,
        duo_scaling=awq.duo_scaling,
    )


def integers(experts: Experts, **more: Any) -> dict[str, Any]:
    """The library's groups of modules, for integers of the experts; `more` are further keys of its weights."""
    weights = {"num_bits": experts.bits, "type": "int", "symmetric": True, "strategy": "group", **more}
    return {"experts": {"targets": [EXPERTS], "weights": weights | {"group_size": experts.group_size}}}


def quantization_modifier(experts: Experts) -> Any:
    """Rounding of the experts to integers, to nearest."""
    from llmcompressor.modifiers.quantization import QuantizationModifier

    return QuantizationModifier(config_groups=integers(experts))


def oneshot(model: Any, tokens: Sequence[torch.Tensor], modifiers: list[Any]) -> None:
    """The library's calibration of a model with some modifiers."""
    import llmcompressor
    from llmcompressor.core import create_session
    from llmcompressor.pipelines.cache import IntermediatesCache
    from torch.utils.data import DataLoader

    rows: Any = [{"input_ids": sequence} for sequence in tokens]
    # 0.14 pins without asking, which torch refuses on a CPU alone.
    unpinned = patch.object(IntermediatesCache, "pin_memory", lambda *_: None)
    with create_session(), nullcontext() if torch.accelerator.is_available() else unpinned:
        llmcompressor.oneshot(model=model, processor=object(), dataset=DataLoader(rows, batch_size=1), recipe=modifiers)
