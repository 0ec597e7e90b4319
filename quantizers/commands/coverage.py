"""The tokens that the router sends to each expert, for one calibration set or two: `quantizers.coverage`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup, rank_0_progress
from quantizers.output.journal import refuse_unfinished
from quantizers.planning.job import given_folder
from quantizers.recipe.read import (
    Change,
    changes_of,
    facts_location,
    find_set,
    read_recipe,
    set_location,
    source_location,
)
from quantizers.recipe.schema import CoverageGate
from quantizers.system.errors import InputError, OutputError
from quantizers.system.files import json_finite, write_json, write_text

if TYPE_CHECKING:
    import torch

    from quantizers.calibration.samples import CalibrationData


@dataclass(frozen=True)
class Question:
    """A model, the sets to stream over it, the gates, and what names them in messages.

    Attributes:
        tokens: how many to draw from the recipe's set; None to stream all of every set.
        without: sources of the recipe's set that are left out.
        saliency: whether the experts are scored too; of one set only.
    """

    model: str
    revision: str
    trust_remote_code: bool
    sets: tuple[Path, ...]
    rule: CoverageGate
    where: str
    facts_file: Path | None = None
    tokens: int | None = None
    without: tuple[str, ...] = ()
    saliency: bool = False


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
    saliency: bool = False,
    output: str | Path | None = None,
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
        saliency: score the experts by what they contribute (REAP), over all texts and by category.
        output: with `saliency`, a folder for the figures and lists of experts, see `eval.coverage.saliency.lists`.
        min_routed_tokens, max_uncovered: without a recipe, the gate: 1 token, and 0.01 of the experts by default.
        device: cpu, cuda, cuda:N, or auto (the first GPU if there is one).
        work: scratch folder for activations; a temporary one by default.
        trust_remote_code: allow custom tokenizer code.
        dist: the processes that share the work; each of them calls this.

    Raises:
        InputError: something is missing, given twice, or wrong.
    """
    from eval.coverage.saliency import lists
    from quantizers.device.determinism import ordered
    from quantizers.device.devices import choose_device

    for name in (source, model):
        if name is not None:
            refuse_unfinished(Path(name))
    changes = changes_of(settings, calibration)
    if source is not None and (model is not None or recipe is None):
        raise InputError("--source says where a recipe's model lies; give a recipe and no --model with it")
    if (compare or data) and any(change.place[0] == "calibration" for change in changes):
        raise InputError("--data and --compare name the sets; leave out --calibration and --set calibration")
    if compare and data:
        raise InputError("--compare names both sets; leave out --data")
    if compare and saliency:
        raise InputError("--saliency scores experts on one set; leave out --compare")
    if output is not None and not saliency:
        raise InputError(f"--output {output}: is for the files of --saliency; give that too, or leave it out")
    given = {"min_routed_tokens": min_routed_tokens, "max_uncovered": max_uncovered}
    gates = {key: value for key, value in given.items() if value is not None}
    sets = tuple(find_set(str(name)) for name in compare or ([data] if data else []))
    own = Path(facts) if facts is not None else None
    question = Question(str(model), "main", trust_remote_code, sets, CoverageGate(), str(model), own, saliency=saliency)
    if recipe is not None:
        question = _with_recipe(question, str(recipe), changes, source, of_its_source=model is None)
        if gates:
            raise InputError(
                f"{question.where}: holds the gates; leave out --min-routed-tokens and --max-uncovered, or change it "
                "with --set verify.coverage.min_routed_tokens=N"
            )
    elif changes:
        raise InputError(f"{changes[0].shown}: changes a recipe; give one, or leave it out")
    elif model is None:
        raise InputError("give a recipe, or --model with --data")
    elif not sets:
        raise InputError("--data is missing; name a calibration set, such as embedded")
    else:
        question = replace(question, rule=question.rule.model_copy(update=gates))
    files = Path(output) if output is not None and dist.is_main else None
    if files is not None:
        try:
            files.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise OutputError(f"--output {files}: cannot be made a folder ({failure.strerror}); give another") from None
    if work is not None:
        Path(work).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as folder, ordered():
        figures = measure_coverage(question, choose_device(device, dist), Path(folder), dist)
    if files is not None:
        write_json(files / "saliency.json", json_finite(figures))
        for name, text in lists(figures).items():
            write_text(text, files / name)
    return Coverage(figures if dist.is_main else {})


def _with_recipe(
    question: Question, name: str, changes: Sequence[Change], source: str | Path | None, *, of_its_source: bool
) -> Question:
    """The question with a recipe's gates, and with its set and source where no others are given.

    What the recipe says of its source, the revision, trust and facts, holds for that alone.
    """
    recipe, path = read_recipe(name, changes)
    told: dict[str, Any] = {"where": str(path), "rule": (recipe.verify and recipe.verify.coverage) or question.rule}
    if not question.sets:
        file = set_location(recipe.calibration_set, path)
        if not file.is_file():
            raise InputError(f"{path}: {file}: no such calibration set; correct the path")
        told |= {"sets": (file,), "tokens": recipe.calibration_tokens, "without": recipe.calibration_without}
    if of_its_source:
        told |= {
            "model": source_location(recipe, path) if source is None else given_folder(Path(source)),
            "revision": recipe.source.revision,
            "trust_remote_code": question.trust_remote_code or recipe.source.trusts_tokenizer,
            "facts_file": question.facts_file or facts_location(recipe, path),
        }
    return replace(question, **told)


def measure_coverage(
    question: Question, device: torch.device, work: Path, dist: ProcessGroup = SINGLE_PROCESS
) -> dict[str, Any]:
    """The report on one set, see `eval.coverage.summary.report`; or what the second of two sets wins and loses compared
    with the first, see `eval.coverage.compare.compare_counts`.
    """
    from eval.coverage.compare import SIDES, compare_counts, labels
    from eval.coverage.routing import count_routes
    from eval.coverage.saliency import saliency
    from eval.coverage.summary import check_floors, report
    from quantizers.architectures.families import architecture_for
    from quantizers.architectures.sizes import sizes_of
    from quantizers.calibration.load_set import load_set, said
    from quantizers.calibration.samples import token_tensors
    from quantizers.checkpoint.reader import open_checkpoint
    from quantizers.device.devices import forward_dtype, use_threads
    from quantizers.formats.tensor_names import published_names
    from quantizers.model.streamed_model import StreamedModel

    checkpoint = dist.in_turn(lambda: open_checkpoint(question.model, question.revision))
    where = str(checkpoint.folder / "config.json")
    facts = architecture_for(checkpoint.config, where, question.facts_file, checkpoint.tensors)
    sizes = sizes_of(facts)
    named = published_names(checkpoint, facts)  # first, for reading the sets may take long
    load = partial(
        load_set,
        tokenizer=checkpoint.folder,
        trust_remote_code=question.trust_remote_code,
        tokens=question.tokens,
        without=question.without,
        positions=sizes.positions,
    )
    read = [said(load(file)) for file in question.sets] if dist.is_main else None
    loaded: list[CalibrationData] = dist.broadcast_object(read)
    for data in loaded:
        check_floors(question.rule, [sample.category for sample in data.samples], question.where)
    sequences = [tokens for data in loaded for tokens in token_tensors(data, sizes["vocabulary"])]
    # All sets in one pass: the categories of set n get the prefix `n:`.
    categories = [f"{n}:{sample.category}" for n, data in enumerate(loaded) for sample in data.samples]
    use_threads(sizes)
    model = StreamedModel(named, facts, sizes, device, forward_dtype(device))
    with rank_0_progress("streaming", sizes["layers"], 0, lambda: None, dist) as step:
        routed = count_routes(model, sequences, categories, work, step, dist, norms=question.saliency)
    names = [data.name for data in loaded]
    if len(loaded) == 1:
        one = routed.part("0:")
        found = {"model": question.model, "set": names[0]} | report(one, question.rule)
        if question.saliency:
            paths = (f"{model.skeleton.path}.{number}.{facts.modules.experts}" for number in one.layers)
            found["saliency"] = saliency(one, [path.rpartition(".")[0] for path in paths])
        return found | ({"drawn": asdict(loaded[0].drawn)} if loaded[0].drawn else {})
    comparison = compare_counts(routed.part("0:"), routed.part("1:"), question.rule)
    for side, name, file, label in zip(SIDES, names, question.sets, labels(names, question.sets), strict=True):
        comparison[side] |= {"name": name, "file": str(file), "label": label}
    return {"model": question.model} | comparison
