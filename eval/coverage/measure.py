"""`quantize coverage`: reads the arguments, then streams a model over one calibration set or two."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.planning.job import given_folder
from quantizers.recipe.changes import Change
from quantizers.recipe.read import facts_location, read_recipe, set_location, source_location
from quantizers.recipe.schema import CoverageGate
from quantizers.system.errors import InputError, did_you_mean
from quantizers.system.package_data import find, shipped_names

if TYPE_CHECKING:
    import torch

    from quantizers.calibration.samples import CalibrationData

    from .routing import Routed


@dataclass(frozen=True)
class Question:
    """A model, the sets to stream over it, the gates, and the file with the user's own facts if there is one.

    Attributes:
        tokens: how many to draw from the recipe's set; None to stream all of every set.
    """

    model: str
    revision: str
    trust_remote_code: bool
    sets: tuple[Path, ...]
    rule: CoverageGate
    where: str
    own: Path | None = None
    tokens: int | None = None


def question_of(
    recipe: str | None,
    model: str | None,
    data: str | None,
    compare: tuple[str, str] | None,
    *,
    min_routed_tokens: int | None,
    max_uncovered: float | None,
    source: Path | None = None,
    own: Path | None = None,
    trust_remote_code: bool = False,
    changes: Sequence[Change] = (),
) -> Question:
    """Combine the arguments: a recipe, of which `model` and `data` may replace parts, or `model` and `data` alone.

    Args:
        source: folder of the recipe's model on this machine.
        own: a file with the user's own facts, instead of the one that the recipe may name for its own model.
        trust_remote_code: whether the tokenizer may run code of its own, whatever the recipe says.
        changes: settings that are given instead of those in the recipe.

    Raises:
        InputError: something is missing, or given twice.
    """
    rule, parsed, path = CoverageGate(), None, None
    if recipe is not None:
        parsed, path = read_recipe(recipe, changes)
        if min_routed_tokens is not None or max_uncovered is not None:
            raise InputError(
                f"{path}: holds the gates; leave out --min-routed-tokens and --max-uncovered, or change it with --set "
                "verify.coverage.min_routed_tokens=N"
            )
        rule = (parsed.verify and parsed.verify.coverage) or rule
    elif changes:
        raise InputError(f"{changes[0].shown}: changes a recipe; give one, or leave it out")
    else:
        given = {"min_routed_tokens": min_routed_tokens, "max_uncovered": max_uncovered}
        rule = rule.model_copy(update={key: value for key, value in given.items() if value is not None})
    if source is not None and (model is not None or recipe is None):
        raise InputError("--source says where a recipe's model lies; give a recipe and no --model with it")
    if (compare or data) and any(change.place[0] == "calibration" for change in changes):
        raise InputError("--data and --compare name the sets; leave out --calibration and --set calibration")
    if compare and data:
        raise InputError("--compare names both sets; leave out --data")
    if model is None and parsed is None:
        raise InputError("give a recipe, or --model with --data")
    sets = [find(name, "calibration") for name in (compare or ([data] if data else []))]
    tokens = None
    if not sets:
        if parsed is None or path is None:
            raise InputError("--data is missing; name a calibration set, such as embedded")
        sets, tokens = [set_location(parsed.calibration_set, path)], parsed.calibration_tokens
    for file in sets:
        if not file.is_file():
            hint = did_you_mean(file.name, shipped_names("calibration"))
            raise InputError(f"{file}: no such set{hint}; give a file, or the name of a shipped set such as embedded")
    if model is not None or parsed is None or path is None:
        return Question(str(model), "main", trust_remote_code, tuple(sets), rule, str(path or model), own, tokens)
    location = source_location(parsed, path) if source is None else given_folder(source)
    revision, trusted = parsed.source.revision, trust_remote_code or parsed.source.trusts_tokenizer
    own = own or facts_location(parsed, path)
    return Question(location, revision, trusted, tuple(sets), rule, str(path), own, tokens)


def measure_coverage(
    question: Question, device: torch.device, work: Path, dist: ProcessGroup = SINGLE_PROCESS
) -> dict[str, Any]:
    """The report on one set; see `eval.coverage.tables.report`."""
    from .tables import report

    routed, (data,) = _stream(question, device, work, dist)
    found = {"model": question.model, "set": data.name} | report(routed.part("0:"), question.rule)
    return found | ({"drawn": asdict(data.drawn)} if data.drawn else {})


def compare_coverage(
    question: Question, device: torch.device, work: Path, dist: ProcessGroup = SINGLE_PROCESS
) -> dict[str, Any]:
    """What the second set wins and loses compared with the first; see `eval.coverage.compare.compare_counts`."""
    from .compare import SIDES, compare_counts, labels

    routed, sets = _stream(question, device, work, dist)
    comparison = compare_counts(routed.part("0:"), routed.part("1:"), question.rule)
    names = [data.name for data in sets]
    called = zip(SIDES, names, question.sets, labels(names, question.sets), strict=True)
    for side, name, file, label in called:
        comparison[side] |= {"name": name, "file": str(file), "label": label}
    return {"model": question.model} | comparison


def _stream(
    question: Question, device: torch.device, work: Path, dist: ProcessGroup
) -> tuple[Routed, list[CalibrationData]]:
    """Stream all sets in one pass; the categories of set n get the prefix `n:`."""
    from quantizers.architectures.families import architecture_for
    from quantizers.architectures.sizes import sizes_of
    from quantizers.calibration.load_set import load_set
    from quantizers.calibration.samples import token_tensors
    from quantizers.checkpoint.reader import open_checkpoint
    from quantizers.device.devices import forward_dtype, use_threads
    from quantizers.formats.tensor_names import readable
    from quantizers.forward.layered_model import LayeredModel
    from quantizers.system.progress import progress

    from .gates import check_floors
    from .routing import count_routes

    checkpoint = dist.in_turn(lambda: open_checkpoint(question.model, question.revision))
    where = str(checkpoint.folder / "config.json")
    facts = architecture_for(checkpoint.config, where, question.own)
    sizes = sizes_of(facts, checkpoint.config, where)
    named = readable(checkpoint, facts)  # first, for reading the sets may take long
    trusted = question.trust_remote_code
    own = (
        [load_set(file, checkpoint.folder, trusted, question.tokens) for file in question.sets]
        if dist.is_main
        else None
    )
    loaded: list[CalibrationData] = dist.broadcast_object(own)
    for data in loaded:
        check_floors(question.rule, [sample.category for sample in data.samples], question.where)
    sequences = [tokens for data in loaded for tokens in token_tensors(data, sizes["vocabulary"])]
    categories = [f"{n}:{sample.category}" for n, data in enumerate(loaded) for sample in data.samples]
    use_threads(sizes)
    model = LayeredModel(named, facts, sizes, device, forward_dtype(device))
    shown = progress("streaming", sizes["layers"]) if dist.is_main else nullcontext(lambda _: None)
    with shown as step:
        return count_routes(model, sequences, categories, work, step, dist), loaded
