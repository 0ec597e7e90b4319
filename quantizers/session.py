"""What a recipe means on this machine: the source opened, the plan made, data found, device chosen.

Everything here happens before anything long starts, so that whatever is wrong is said at once.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .architecture import Architecture, Sizes, architecture_for, published_config, sizes_of
from .checkpoint import Checkpoint, block_size, declared_block, open_folder, read_json, resolve
from .errors import CheckpointError, InputError
from .plan import Plan, Spec, expected_tensors, make_plan
from .recipe import Recipe, read_recipe, set_location, source_location

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Job:
    """A recipe whose source has been found and whose plan has been made.

    Attributes:
        source: the opened checkpoint; None where the plan comes from the kept facts.
        basis: in words, what the plan was made from.
        block: rows and columns of the source's FP8 blocks; None where its attention is not FP8.
    """

    recipe: Recipe
    path: Path
    facts: Architecture
    sizes: Sizes
    config: dict[str, Any]
    plan: Plan
    source: Checkpoint | None
    basis: str
    block: tuple[int, int] | None


def prepare(name: str, offline_facts: bool = False) -> Job:
    """Read a recipe, find and check its source, make the plan.

    Args:
        name: a recipe's path or shipped name.
        offline_facts: plan from a config.json, or from the architecture's kept facts, where the
            source's shards are not on this machine.

    Raises:
        InputError: one line naming what is wrong and where.
    """
    recipe, path = read_recipe(name)
    for named in (recipe.calibration, recipe.verify and recipe.verify.perplexity and recipe.verify.perplexity.data):
        if named and not set_location(named, path).is_file():
            raise InputError(f"{path}: {named}: no such calibration set; correct the path")
    location = source_location(recipe, path)
    if offline_facts and (found := _without_shards(location, recipe.source.revision)):
        facts, config, basis = found
        sizes = sizes_of(facts, config, basis)
        block = declared_block(config, basis)
        tensors = expected_tensors(facts, sizes, block)
        plan = make_plan(facts, sizes, tensors, recipe.experts, basis, block)
        return Job(recipe, path, facts, sizes, config, plan, None, basis, block)
    folder = resolve(location, recipe.source.revision)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: has no config.json; give a checkpoint folder")
    source = open_folder(folder, recipe.source.model, recipe.source.revision)
    where = str(folder / "config.json")
    facts = architecture_for(source.config, where)
    sizes = sizes_of(facts, source.config, where)
    tensors = {tensor: Spec(info.dtype, info.shape) for tensor, info in source.tensors.items()}
    plan = make_plan(facts, sizes, tensors, recipe.experts, str(folder), block_size(source))
    fp8 = any(action.kind == "rename" for action in plan.actions)
    return Job(
        recipe,
        path,
        facts,
        sizes,
        source.config,
        plan,
        source,
        f"the headers of {folder}",
        block_size(source) if fp8 else None,
    )


def _without_shards(location: str, revision: str) -> tuple[Architecture, dict[str, Any], str] | None:
    """Facts and config for a source whose shards are not here: a lone config.json, or what is kept."""
    folder = Path(location)
    config_file = folder / "config.json"
    if config_file.is_file() and not any(folder.glob("*.safetensors")):
        config = read_json(config_file)
        return architecture_for(config, str(config_file)), config, f"{config_file} alone, without shards"
    if folder.is_dir() or _in_cache(location, revision):
        return None
    kept = published_config(location)
    if kept is None:
        return None
    facts, config = kept
    return facts, config, f"the facts kept for {location} (its files are not on this machine)"


def _in_cache(model: str, revision: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(model, "model.safetensors.index.json", revision=revision), str)
    except HFValidationError:
        return False


def choose_device(name: str) -> torch.device:
    """`auto` is the first GPU where there is one, else the CPU.

    Raises:
        InputError: no such device here.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("not a device that is supported")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as failure:
        raise InputError(f"--device {name}: {str(failure).splitlines()[0]}; give cpu, cuda or cuda:N") from None
    return device


def forward_dtype(device: torch.device) -> torch.dtype:
    """float32 on a CPU, bfloat16 on an accelerator."""
    import torch

    return torch.float32 if device.type == "cpu" else torch.bfloat16


def fingerprint(device: torch.device) -> dict[str, Any]:
    """What of the machine decides bits: device, threads, torch, CPU capability."""
    import torch

    return {
        "device": device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def versions() -> dict[str, str]:
    """Versions of what decided the result."""
    from importlib.metadata import version

    names = ("moe-quantizers", "torch", "transformers", "compressed-tensors", "llmcompressor", "safetensors")
    return {name: version(name) for name in names} | {"python": platform.python_version()}
