"""Prepare a recipe on this machine, before any long computation: open the source, or its headers, and make the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for, known, published_config
from quantizers.checkpoint.loaded_tensors import layer_names, with_tables
from quantizers.checkpoint.reader import (
    CONFIG,
    INDEX,
    SINGLE,
    Checkpoint,
    locate,
    open_folder,
    read_config,
    read_json,
)
from quantizers.checkpoint.safetensors_header import Spec, printed
from quantizers.formats.fp8 import declared_block
from quantizers.formats.stored_matrices import architecture_of, quantized_matrices
from quantizers.formats.tensor_names import split_fused, split_fused_experts
from quantizers.formats.unsupported import ACCEPT, ALREADY, FEW_BITS, four_bit_keys, refuse_unquantizable
from quantizers.hooks import hook
from quantizers.recipe.cards import Card
from quantizers.recipe.read import (
    Change,
    facts_location,
    given_at,
    read_recipe,
    set_file,
    set_location,
    source_location,
)
from quantizers.recipe.schema import Recipe
from quantizers.system.errors import ArchitectureError, CheckpointError, RecipeError
from quantizers.system.extras import lacking

from .allocation import Allocation, allocation
from .assign_actions import expected_tensors, make_plan
from .plan import Plan

TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")
HEADERS: Literal["headers"] = "headers"  # of a model on the Hub, which are asked for


@dataclass(frozen=True)
class Job:
    """A recipe with its source and its plan."""

    recipe: Recipe
    path: Path
    facts: Architecture
    config: dict[str, Any]
    plan: Plan
    source: Checkpoint | None  # the Hub may have its shards; None if the plan was made without headers
    basis: str  # what the plan was made from, as text for users
    allocation: Allocation | None = None  # of a recipe with a budget; the plan uses the best uniform scheme until then
    location: str = ""  # where the source is: a folder, or a Hub id
    facts_file: Path | None = None  # the user's file that `facts` was read from; None for built-in facts
    # Cards that the experts' format asks for by itself, and of which of the plan's formats no kernel is known there.
    left_out: Mapping[Card, str] = field(default_factory=dict)

    @property
    def opened(self) -> Checkpoint:
        """The source of a job that is to be run."""
        assert self.source is not None
        return self.source

    @property
    def as_served(self) -> tuple[Card, ...]:
        """The cards on which source and output are measured."""
        return tuple(card for card in self.recipe.as_served if card not in self.left_out)

    @property
    def integers(self) -> set[tuple[int, int, bool]]:
        """Bits, group size, and whether scales may be negative, of all integers that a run may write."""
        schemes = self.allocation.candidates if self.allocation else self.plan.schemes
        return {(scheme.bits, scheme.group_size, self.recipe.experts.signed) for scheme in schemes if scheme.by_kernel}


def prepare(
    name: str,
    offline_facts: bool = False,
    hub: bool = False,
    source_folder: Path | None = None,
    *,
    facts_file: Path | None = None,
    changes: Sequence[Change] = (),
    sets_first: bool = False,
    stream: bool = False,
    commits: Mapping[str, str] = MappingProxyType({}),
    any_sets: bool = False,
    cache: Path | None = None,
) -> Job:
    """Read a recipe, find and check its source, and make the plan.

    Args:
        name: a recipe's path or shipped name.
        offline_facts: if the source's shards are not on this machine, plan from its config.json, from the built-in
            facts, or from the headers on the Hub.
        hub: with `offline_facts`, prefer the headers on the Hub to the built-in architecture spec.
        source_folder, facts_file, changes: instead of the source, the facts and the settings that the recipe names.
        sets_first: before a source is downloaded, load the recipe's sets, with its tokenizer alone.
        stream: leave the source's shards on the Hub.
        commits: with `stream`, those that models had when a run was begun, by `model@revision`.
        any_sets: whether sets may be missing, which the caller reports.
        cache: the folder for what is downloaded; None for the Hub's cache.

    Raises:
        InputError: the recipe, a set or the source is wrong.
    """
    recipe, path = read_recipe(name, changes)
    if recipe.experts.engine == "llmcompressor" and (lack := lacking("llmcompressor")):
        raise RecipeError(given_at(("experts", "engine"), path, changes), lack[0], f"{lack[1]}, or take gram")
    for set_name in () if any_sets else sets_of(recipe):
        set_file(set_name, path)
    location = source_location(recipe, path) if source_folder is None else given_folder(source_folder)
    facts_file = facts_file or facts_location(recipe, path)
    source: Checkpoint | None = None
    offline = _without_headers(location, recipe, hub, facts_file) if offline_facts else None
    if isinstance(offline, tuple):
        config, where = offline
        basis = config_name = where
    else:
        if "/" not in location:  # as a published recipe has it of a folder: others beside it may be other models
            raise CheckpointError(
                given_at(("source", "model"), path, changes),
                f"{printed(location)} is neither a folder beside the recipe nor a Hub id (owner/name)",
                "give --source DIR if it is elsewhere, or correct it",
            )
        if sets_first and not Path(location).is_dir() and cached_folder(location, recipe.source.revision) is None:
            _load_sets(location, recipe, path)
        revision = commits.get(f"{location}@{recipe.source.revision}", recipe.source.revision)
        headers = offline == HEADERS
        source = _open_source(location, recipe, revision, stream=stream or headers, headers=headers, cache=cache)
        config = source.config
        where = str(source.folder)
        config_name = str(source.folder / CONFIG)
        basis = f"the headers of {where}"
        if headers:
            basis = f"the headers of {location} on the Hub, commit {source.revision}"
    if source:
        facts = architecture_of(source, facts_file)
        source = split_fused_experts(source, facts)
        tensors = {tensor: Spec(info.dtype, info.shape) for tensor, info in source.tensors.items()}
    else:
        of_class = None if facts_file or config.get("model_type") in known() else _of_class(config, config_name)
        facts = architecture_for(config, config_name, facts_file, of_class)
        tensors = split_fused(of_class or expected_tensors(facts, config, where), facts, where)
    plan = make_plan(
        facts,
        tensors,
        recipe.experts,
        where,
        declared_block(config, config_name),
        recipe.attention,
        kv_cache=recipe.kv_cache == "fp8",
        matrices=quantized_matrices(source.tensors if source else tensors, config, where),
    )
    few = [form for form in plan.source_experts if form.weight_bits <= FEW_BITS]
    if few and not _accepted(recipe):
        raise CheckpointError(where, f"its experts are stored as {few[0]}: {ALREADY}", ACCEPT)
    if recipe.source.accept_quantized and not few and not any(four_bit_keys(config)):
        stored = " and ".join(map(str, plan.source_experts))
        raise RecipeError(
            given_at(("source", "accept_quantized"), path, changes),
            f"has no effect on experts that are stored as {stored}",
            "remove the key",
        )
    choices = None
    if recipe.experts.by_budget:
        key = "budget" if recipe.experts.budget is not None else "bits_per_weight"
        choices = allocation(plan, facts, recipe.experts, given_at(("experts", key), path, changes))
        plan = plan.with_schemes(choices.best_uniform())
    left_out = _unknown_cards(plan, recipe)
    for card, words in left_out.items():
        if recipe.verify and recipe.verify.as_served:
            raise RecipeError(
                given_at(("verify", "as_served"), path, changes), f"{card}: {words} there", "remove this card"
            )
    return Job(recipe, path, facts, config, plan, source, basis, choices, location, facts_file, left_out)


def _unknown_cards(plan: Plan, recipe: Recipe) -> dict[Card, str]:
    """The cards to be measured on for which a kernel is not known, with the first format that lacks one, in words."""
    unknown_kernel = hook("unknown_kernel")
    words = {card: unknown_kernel(plan, card) for card in recipe.as_served if unknown_kernel}
    return {card: text for card, text in words.items() if text}


def _accepted(recipe: Recipe) -> bool:
    """Whether experts may have 4 bits or fewer in the source."""
    return recipe.source.accept_quantized or recipe.experts.convert is not None


def _of_class(config: dict[str, Any], where: str) -> dict[str, Spec]:
    """The tensors that the class of a config.json, whose path is `where`, would write."""
    from quantizers.architectures.class_tensors import class_tensors  # takes seconds: transformers is imported with it

    try:
        return {name: Spec(header.dtype, header.shape) for name, header in class_tensors(config).items()}
    except ArchitectureError as failure:
        raise ArchitectureError(where, failure.without_remedy, failure.remedy) from None


def parts_of_run(
    job: Job, done: int = 0, passing: Sequence[int | None] | None = None, again: Sequence[int] = ()
) -> list[list[str]]:
    """The names of the tensors that a run reads of its source together, in its order.

    Args:
        done: finished layers.
        passing: passthrough parts that are not written yet; None for all.
        again: finished layers that are read once more.
    """
    passing = job.plan.passthrough_parts if passing is None else passing
    outside = (None, *(part for part in passing if part is not None))

    def of_layer(number: int) -> list[list[str]]:
        return with_tables(job.opened, job.facts, {number: layer_names(job.opened, job.facts, number)})

    return [
        *([action.source for action in job.plan.of_layer(part)] for part in outside),
        *(part for number in (*again, *range(done, job.facts.num_layers)) for part in of_layer(number)),
    ]


def _open_source(
    location: str, recipe: Recipe, revision: str, *, stream: bool, headers: bool, cache: Path | None
) -> Checkpoint:
    """The source; for its `headers` alone no file is downloaded that they do not need."""
    patterns = (CONFIG, INDEX) if headers else ()
    folder, remote = locate(location, revision, stream=stream, patterns=patterns, cache=cache)
    if not (folder / CONFIG).is_file():
        raise CheckpointError(location if remote else folder, "has no config.json", "give a checkpoint folder")
    # Before the shards, whose dtypes may be unknown here.
    where = f"{location}: {CONFIG}" if remote else str(folder / CONFIG)
    refuse_unquantizable(read_config(folder), where, accepted=_accepted(recipe))
    return open_folder(folder, recipe.source.model, revision, remote=remote)


def sets_of(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """The names of a recipe's sets, with the sources that are left out of each."""
    if recipe.calibration is None:
        return {}
    perplexity = recipe.verify and recipe.verify.perplexity
    return {recipe.calibration_set: recipe.calibration_without} | ({perplexity.data: ()} if perplexity else {})


def _load_sets(location: str, recipe: Recipe, path: Path) -> None:
    """Load the sets of a recipe, so that their faults are known, and their rows kept, before a long download."""
    from quantizers.calibration.load_set import load_set

    tokenizer, _ = locate(location, recipe.source.revision, patterns=TOKENIZER_FILES)
    for name, without in sets_of(recipe).items():
        load_set(set_location(name, path), tokenizer, recipe.source.trusts_tokenizer, without=without)


def given_folder(folder: Path) -> str:
    """The folder given with --source, as an absolute path; CheckpointError if there is none."""
    if not folder.is_dir():
        raise CheckpointError(f"--source {folder}", "no such folder", "give the folder of the source model")
    return str(folder.resolve())


def _without_headers(
    location: str, recipe: Recipe, hub: bool, facts_file: Path | None
) -> tuple[dict[str, Any], str] | Literal["headers"] | None:
    """config.json and basis of a source whose headers are not on this machine, or that the Hub is to be asked for them.

    None if they are here, or if `location` is neither a folder nor a Hub id. With the user's own facts the built-in
    config.json is not this model's: then the Hub is asked.
    """
    folder = Path(location)
    config_file = folder / CONFIG
    if config_file.is_file() and not any(folder.glob("*.safetensors")):
        config = read_config(folder)
        refuse_unquantizable(config, str(config_file), accepted=_accepted(recipe))
        return config, f"{config_file} alone, without shards"
    if folder.is_dir() or (cached_folder(location, recipe.source.revision) is not None and not hub):
        return None
    built_in = None if hub or facts_file is not None else published_config(location)
    if built_in is not None and built_in.get("model_type") in known():
        return built_in, f"the built-in architecture spec of {location} (its files are not on this machine)"
    if built_in is not None:
        counted = "what this does not load is not counted"
        return built_in, f"config.json of {location} as kept here, and its class; {counted}"
    is_hub_id = not location.startswith((".", "/", "~")) and location.count("/") == 1
    return HEADERS if is_hub_id else None  # `locate` reports what is neither


def cached_folder(model: str, revision: str) -> Path | None:
    """Find a model with all its shards in the Hub's cache; None if it is incomplete.

    Planning may have cached only the index.
    """
    from huggingface_hub import constants

    if not (Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}").is_dir():
        return None  # before an import that takes a quarter of a second
    from huggingface_hub import try_to_load_from_cache

    index, single = (try_to_load_from_cache(model, name, revision=revision) for name in (INDEX, SINGLE))
    if not isinstance(index, str):
        return Path(single).parent if isinstance(single, str) else None
    folder, shards = Path(index).parent, read_json(Path(index)).get("weight_map")
    whole = isinstance(shards, dict) and all((folder / str(name)).exists() for name in shards.values())
    return folder if whole else None
