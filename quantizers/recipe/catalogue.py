"""The table of shipped recipes, and the text of a new recipe for a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantizers.architectures.families import published_models
from quantizers.system.errors import InputError, did_you_mean
from quantizers.system.shipped import shipped

from .portable import is_hub_id
from .read import read_recipe, shipped_recipe
from .schema import Experts


def rows() -> list[dict[str, str]]:
    """One row for every shipped recipe, sorted by name."""
    table = []
    for path in sorted(shipped("recipes").glob("*.yaml")):
        recipe, _ = read_recipe(str(path))
        name = Path(recipe.calibration_set).stem
        tokens = recipe.calibration_tokens
        experts = recipe.experts
        table.append(
            {
                "name": path.stem,
                "source": recipe.source.model,
                "calibration": name if tokens is None else f"{name}, {tokens:,} tokens",
                "experts": f"{_size(experts)}, {experts.engine}",
                "about": path.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip(),
            }
        )
    return table


def _size(experts: Experts) -> str:
    if experts.budget is not None:
        return f"2 to 8 bits, {experts.budget} in all"
    return ", ".join(experts.scheme.words)


def copied(name: str) -> str:
    """A shipped recipe's text for another folder: relative paths become bare names (sets) or full paths (models)."""
    text = shipped_recipe(name).read_text(encoding="utf-8")
    return text.replace("../calibration/", "").replace("../models/", f"{shipped('models')}/")


@dataclass(frozen=True)
class Chosen:
    """Parts of a new recipe that are not defaults: its purpose, the experts' size, and limits that suit it.

    `asks` is not in it: the options with which `quantize plan` says whether its output fits.
    """

    about: str = ""
    experts: str = """\
  bits: 4                              # 2 | 3 | 4 | 5 | 6 | 8
  group_size: 32                       # weights under one scale: 32 | 64 | 128; smaller is better and larger on disk
  # budget: 125GiB                     # instead of these two: the shards' size; both are then chosen for each layer
"""
    limits: str = "max_increase: 0.02, max_kl: 0.05"
    asks: str = ""


def new_recipe(model: str, chosen: Chosen = Chosen(), *, accept_quantized: bool = False) -> str:
    """A commented recipe for a model on the Hub, or for a checkpoint folder; the Hub is not asked whether it has it.

    Raises InputError if `model` is neither a folder nor a Hub id.
    """
    if not Path(model).is_dir() and not is_hub_id(model):
        hint = did_you_mean(model, published_models())
        raise InputError(model, f"neither a checkpoint folder nor a Hub id (owner/name){hint}", "correct it")
    source = str(Path(model).resolve()) if Path(model).is_dir() else model
    accepted = ""
    if accept_quantized:
        accepted = (
            "  accept_quantized: true               # of experts with 4 bits or fewer: distances are from these\n"
        )
    return f"""\
# {source}: as published, but for the routed experts, which become integers.
{chosen.about}source:
  model: {source}
  revision: main                       # a branch, tag or commit
  trust_remote_code: false             # tokenizer: may run code of its own; nothing else from the checkpoint ever does
{accepted}calibration: software-engineer         # a shipped set, or a path relative to this file
# calibration: {{set: software-engineer, tokens: 131072}}   # a subsample, drawn evenly over its categories
experts:
{chosen.experts}  engine: gram                         # gram | llmcompressor: the library's own AWQ, as a reference
  awq: {{grid: 20, duo_scaling: true}}   # the scale search; or false; `fold: false` leaves norms and routers unchanged
  routed_weight: 0.9                   # 0: all tokens count alike; 1: only those the router sends
  scales: mse                          # mse | minmax
  rounding: gptq                       # gptq | nearest
# attention: bf16                      # of an FP8 source, for SGLang on Ampere; or fp8 | fp8-block of one in 16 bits
# kv_cache: fp8                        # scales with which servers cache keys and values in FP8
verify:                                # exit code 3 when one fails; the output is completed nevertheless
  coverage: {{min_routed_tokens: 1, max_uncovered: 0.01}}
  perplexity: {{data: held-out, {chosen.limits}}}   # relative; nats
  # stop: {{max_hidden_error: 0.2}}      # stop after the first layer that is worse, without finishing the output
"""
