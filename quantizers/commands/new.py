"""The recipe of a model for the GPUs that will serve it: `quantize new MODEL --vram`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from shlex import quote
from typing import Any

from quantizers.recipe.catalogue import Chosen, new_recipe
from quantizers.system.errors import InputError

from .plan import plan

# Limits of perplexity's increase and of KL by the bits that every layer can have: for few bits they are guesses, twice
# what GGUF files of MiniMax-M2.7 of that size are said to lose (KL 0.19 at 2.4 bits, 0.06 at 3.5).
LIMITS = {2: "max_increase: 0.15, max_kl: 0.4", 3: "max_increase: 0.06, max_kl: 0.12"}
CACHES = {"auto": "in 16 bit", "fp8": "in FP8 (--kv-cache-dtype fp8)"}


def for_gpus(model: str, vram: str, context: int | None) -> Chosen:
    """The largest experts that fit on some GPUs: one scheme of 4 or 8 bits, or else a budget of 2 bits and more.

    Args:
        model: a Hub id, or a folder.
        vram: the GPUs, such as 4x3090.
        context: tokens that must fit; the model's maximum by default.

    Raises:
        InputError: nothing fits, or it is not known how servers divide the model.
    """
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "new.yaml"
        recipe.write_text(new_recipe(model), encoding="utf-8")
        figures = plan(recipe, vram=[vram], context=context).figures
    if "weights" in figures:
        raise InputError(f"--vram {vram}", figures["cards_unknown"], "leave it out")
    (fit,) = figures["fits"]
    place = f"{fit['cards']} at {fit['context']:,} tokens"
    asks = f" --vram {quote(vram)} --context {fit['context']}"
    for kv, cache in CACHES.items():
        whole = [way for way in fit["ways"] if way["budget"][kv] and not way["scheme"].startswith(("INT2", "INT3"))]
        if whole:
            about = f"# For {place}, with a KV cache {cache}.\n"
            return Chosen(about, _uniform(whole[-1]), asks=asks + (" --kv fp8" if kv == "fp8" else ""))
    few = [way for way in fit["ways"] if way["budget"]["fp8"]]  # what fits with 16 bit too is among these
    if not few:
        smallest = f", not even {fit['ways'][0]['scheme']}" if fit["ways"] else ""
        longest = max((way["longest"]["fp8"] for way in fit["ways"]), default=0)
        shorter = f", or --context {longest} at most" if longest else "; they take none, however short the context is"
        raise InputError(f"--vram {vram}", f"nothing fits {place}{smallest}", f"give more GPUs{shorter}")
    mixed = [way for way in few if way["mixture"]["fp8"]]
    best = max(mixed, key=lambda way: int(way["budget"]["fp8"]), default=None)
    # Where no budget is larger than the smallest scheme in every layer, the largest such scheme that fits.
    experts = _budget(best) if best else _uniform(few[-1])
    about = f"# For {place}, with a KV cache {CACHES['fp8']}.\n"
    if best and best["pipeline_parallel"] > 1:
        about += "# It fits if pipeline stages get equal parts: `plan --output DIR --vram` tells after a run.\n"
    about += "# The limits below are guesses: no model of full size was quantized to so few bits yet.\n"
    limits = LIMITS[3 if few[-1]["scheme"].startswith("INT3") else 2]
    return Chosen(about, experts, limits, f"{asks} --kv fp8")


def _uniform(way: dict[str, Any]) -> str:
    bits, group = way["scheme"].removeprefix("INT").split(" group ")
    return f"  bits: {bits}\n  group_size: {group}\n"


def _budget(way: dict[str, Any]) -> str:
    size = way["mixture"]["fp8"]
    line = f"  budget: {size}{' ' * (29 - len(size))}# of all shards; bits and groups are chosen for each layer\n"
    return f"{line}  tensor_parallel: {way['tensor_parallel']}\n"
