"""The tokens that the router sends to each expert, for one calibration set or two: `quantizers.coverage`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.output.journal import refuse_unfinished
from quantizers.planning.job import given_folder
from quantizers.recipe.changes import Change, changes_of
from quantizers.recipe.read import facts_location, find_set, read_recipe, set_location, source_location
from quantizers.recipe.schema import CoverageGate
from quantizers.system.errors import InputError

if TYPE_CHECKING:
    import torch

    from eval.coverage.routing import Routed
    from quantizers.calibration.samples import CalibrationData


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


@dataclass(frozen=True)
class Coverage:
    """The result of `coverage`.

    Attributes:
        figures: what `quantize coverage --json` prints; empty in ranks except 0.
    """

    figures: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether every gate passed; a comparison has none."""
        return all(gate["passed"] for gate in self.figures.get("gates", ()))


def coverage(
    recipe: str | Path | None = None,
    *,
    source: str | Path | None = None,
    calibration: str | Path | None = None,
    settings: Mapping[str, Any] | Sequence[str] = (),
    facts: str | Path | None = None,
    model: str | Path | None = None,
    data: str | Path | None = None,
    compare: tuple[str | Path, str | Path] | None = None,
    min_routed_tokens: int | None = None,
    max_uncovered: float | None = None,
    device: str = "auto",
    work: str | Path | None = None,
    trust_remote_code: bool = False,
    dist: ProcessGroup = SINGLE_PROCESS,
) -> Coverage:
    """Count the tokens routed to each expert, without quantizing.

    Args:
        recipe: recipe whose source, calibration set and gates are used.
        source, calibration, settings: of the recipe, as in `quantizers.run`.
        facts: the user's own architecture spec.
        model: without a recipe, or instead of its source: a checkpoint's folder or Hub id.
        data: without a recipe, or instead of its set: a calibration set.
        compare: two sets: experts whose share of tokens grows or shrinks, newly covered or no longer covered.
        min_routed_tokens, max_uncovered: without a recipe, the gate: 1 token, and 0.01 of the experts by default.
        device: cpu, cuda, cuda:N, or auto (the first GPU if there is one).
        work: scratch folder for activations; a temporary one by default.
        trust_remote_code: allow custom tokenizer code.
        dist: the processes that share the work; each of them calls this.

    Raises:
        InputError: something is missing, given twice, or wrong.
    """
    from quantizers.device.determinism import ordered
    from quantizers.device.devices import choose_device

    for name in (source, model):
        if name is not None:
            refuse_unfinished(Path(name))
    question = question_of(
        str(recipe) if recipe is not None else None,
        str(model) if model is not None else None,
        str(data) if data is not None else None,
        compare and (str(compare[0]), str(compare[1])),
        min_routed_tokens=min_routed_tokens,
        max_uncovered=max_uncovered,
        source=Path(source) if source is not None else None,
        own=Path(facts) if facts is not None else None,
        trust_remote_code=trust_remote_code,
        changes=changes_of(settings, calibration),
    )
    if work is not None:
        Path(work).mkdir(parents=True, exist_ok=True)
    answer = compare_coverage if compare else measure_coverage
    with tempfile.TemporaryDirectory(dir=work) as folder, ordered():
        figures = answer(question, choose_device(device, dist), Path(folder), dist)
    return Coverage(figures if dist.is_main else {})


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
        trust_remote_code: whether the tokenizer may run code of its own, even if the recipe does not say so.
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
    tokens = None
    if compare or data:
        sets = [find_set(name) for name in compare or (str(data),)]
    elif parsed is None or path is None:
        raise InputError("--data is missing; name a calibration set, such as embedded")
    else:
        sets, tokens = [set_location(parsed.calibration_set, path)], parsed.calibration_tokens
        if not sets[0].is_file():
            raise InputError(f"{path}: {sets[0]}: no such calibration set; correct the path")
    if model is not None or parsed is None or path is None:
        return Question(str(model), "main", trust_remote_code, tuple(sets), rule, str(path or model), own, tokens)
    location = source_location(parsed, path) if source is None else given_folder(source)
    revision, trusted = parsed.source.revision, trust_remote_code or parsed.source.trusts_tokenizer
    own = own or facts_location(parsed, path)
    return Question(location, revision, trusted, tuple(sets), rule, str(path), own, tokens)


def measure_coverage(
    question: Question, device: torch.device, work: Path, dist: ProcessGroup = SINGLE_PROCESS
) -> dict[str, Any]:
    """The report on one set; see `eval.coverage.summary.report`."""
    from eval.coverage.summary import report

    routed, (data,) = _stream(question, device, work, dist)
    found = {"model": question.model, "set": data.name} | report(routed.part("0:"), question.rule)
    return found | ({"drawn": asdict(data.drawn)} if data.drawn else {})


def compare_coverage(
    question: Question, device: torch.device, work: Path, dist: ProcessGroup = SINGLE_PROCESS
) -> dict[str, Any]:
    """What the second set wins and loses compared with the first; see `eval.coverage.compare.compare_counts`."""
    from eval.coverage.compare import SIDES, compare_counts, labels

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
    from eval.coverage.routing import count_routes
    from eval.coverage.summary import check_floors
    from quantizers.architectures.families import architecture_for
    from quantizers.architectures.sizes import sizes_of
    from quantizers.calibration.load_set import load_set
    from quantizers.calibration.samples import token_tensors
    from quantizers.checkpoint.reader import open_checkpoint
    from quantizers.device.devices import forward_dtype, use_threads
    from quantizers.formats.tensor_names import published_names
    from quantizers.forward.layered_model import LayeredModel
    from quantizers.system.progress import progress

    checkpoint = dist.in_turn(lambda: open_checkpoint(question.model, question.revision))
    where = str(checkpoint.folder / "config.json")
    facts = architecture_for(checkpoint.config, where, question.own)
    sizes = sizes_of(facts, checkpoint.config, where)
    named = published_names(checkpoint, facts)  # first, for reading the sets may take long
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
