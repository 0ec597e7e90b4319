"""Which of several calibration sets is better, and which sources of a set are: `quantizers.compare` and `why`."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from quantizers.calibration.load_set import load_set, print_notes
from quantizers.calibration.samples import CalibrationData, category_names, digest_of, identity
from quantizers.calibration.set import read_set
from quantizers.commands import options as opt
from quantizers.device.determinism import ordered
from quantizers.device.devices import choose_device, use_threads
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.eval.coverage.routing import Routed
from quantizers.eval.fidelity.scoring import HeldOut, held_out
from quantizers.output.journal import begun_with, refuse_changes
from quantizers.pipeline.fingerprint import deciding
from quantizers.pipeline.inputs import refuse_library
from quantizers.pipeline.options import Options
from quantizers.planning.job import Job, prepare
from quantizers.recipe.read import Change, changes_of, find_set, fixed_bits, set_location
from quantizers.recipe.schema import CoverageGate
from quantizers.system.errors import CalibrationError, InputError
from quantizers.system.files import ready_folder
from quantizers.system.interrupts import interruptible

from .coverage_change import labels
from .estimate import ERROR
from .figures import NOTES, MeasuredSet, Scored, comparison, decided, set_figures, source_effects
from .lanes import LaneFigures, measure_lanes

Draws = Annotated[int, opt.Option("of each set; draw n is the set with its seed increased by n", min=1)]
Tokens = Annotated[
    int | None,
    opt.Option("calibration tokens of a draw; the recipe's, or else the whole set, by default", min=1),
]
Layers = Annotated[
    str | None,
    opt.Option("quantize the first N layers alone, which is quicker; the others are the source's", "first:N"),
    "`first:N` to quantize the first N layers alone; the others keep the source's experts",
]
HeldOutSet = Annotated[str | Path | None, opt.Option("held-out set; the recipe's by default", "SET")]
Work = Annotated[
    str | Path | None,
    opt.Option("folder for states and a journal; an interrupted comparison resumes from it", "DIR"),
    "folder for states and a journal, from which an interrupted comparison resumes; a temporary one by default",
]


@dataclass(frozen=True)
class SetComparison:
    """The result of `compare` or `why`.

    Attributes:
        figures: what `quantize compare --json` prints, a SetComparison; or of `quantize calibration why`,
            SourceEffects. Empty in ranks except 0.
    """

    figures: dict[str, Any]


@opt.documented
def compare(
    recipe: Annotated[opt.Recipe, "recipe whose source, experts and held-out set are used"],
    sets: Annotated[
        Sequence[str | Path],
        opt.Option("a calibration set: a file, or the name of a shipped one; two or more", "SET", ("--calibration",)),
    ],
    *,
    draws: Draws = 5,
    at_most: Annotated[
        int | None,
        opt.Option("while a pair of sets is undecided, draw as many again, up to these; keeps the error rate", min=1),
        "as long as a pair is undecided, draw as many again, up to these. Each look has an equal share of the "
        "probability of error (Bonferroni)",
    ] = None,
    tokens: Tokens = None,
    layers: Layers = None,
    data: HeldOutSet = None,
    source: opt.Source = None,
    settings: opt.Settings = (),
    device: opt.Device = "auto",
    device_memory: opt.DeviceMemory = None,
    work: Work = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    dist: opt.Dist = SINGLE_PROCESS,
) -> SetComparison:
    """Find out which calibration set gives the better output, whichever samples are drawn from it.

    Every set is drawn several times. The recipe's model is quantized with each draw, all in one pass over its source,
    and measured on the held-out texts; nothing is written.

    Raises:
        InputError: something that was given is wrong; a line for each set that is.
        QuantizeError: the model's states are not finite, or there is no room for them.
        Interrupted: by a signal.
    """

    if len(sets) < 2:
        raise InputError("", "give two sets or more, each with --calibration")
    most = draws if at_most is None else at_most
    if most < draws:
        raise InputError(f"--at-most {most}", f"is less than --draws {draws}", "give more, or leave it out")
    looks = -(-most // draws)
    for name in map(str, sets):
        if "=" in name and not Path(name).exists():
            raise InputError(
                f"--calibration {name}", "is no calibration set", f"write --set {name} to change the recipe"
            )
    files = [find_set(str(name)) for name in sets]
    for number, file in enumerate(files):
        if file.resolve() in [earlier.resolve() for earlier in files[:number]]:
            raise InputError(f"--calibration {file}", "is given twice", "give each set once")
    with _asked(
        recipe,
        files,
        tokens=tokens,
        layers=layers,
        data=data,
        source=source,
        settings=settings,
        device=device,
        device_memory=device_memory,
        work=work,
        trust_remote_code=trust_remote_code,
        dist=dist,
    ) as asked:
        drawn = [list[CalibrationData]() for _ in files]
        lanes = [list[LaneFigures]() for _ in files]
        verify = asked.job.recipe.verify
        for look in range(looks):
            numbers = range(look * draws, min((look + 1) * draws, most))
            now = [[asked.load(file, number) for number in numbers] for file in files]
            figures, scored = asked.measure(f"draws-{look}", now)
            drawn = [[*before, *more] for before, more in zip(drawn, now, strict=True)]
            lanes = [[*before, *more] for before, more in zip(lanes, figures, strict=True)]
            called = labels([data[0].name for data in drawn], files)
            measured = [
                asked.measured_set(label, file, data, lane_figures)
                for label, file, data, lane_figures in zip(called, files, drawn, lanes, strict=True)
            ]
            result = comparison(measured, scored, (verify and verify.coverage) or CoverageGate(), ERROR / looks)
            if decided(result["pairs"]):
                break
        of_looks = (
            f"{look + 1} of at most {looks} looks; each has an error of {ERROR / looks:.3g}, so that all together "
            f"have one of {ERROR:.2g} at most (Bonferroni)"
        )
        result |= {"looks": looks, "error": ERROR / looks}
        return asked.result(measured, scored, result, of_looks if looks > 1 else "")


def why(
    set_: Annotated[str | Path, opt.Argument("a set's file, or the name of a shipped set", "SET")],
    recipe: Annotated[
        str | Path, opt.Option("recipe whose source, experts and held-out set are used", "RECIPE")
    ] = "tiny-minimax-m2-fp8-int4",
    *,
    draws: Draws = 5,
    **options: Any,
) -> SetComparison:
    """Find out which sources of a calibration set help, which hurt, and which make no difference.

    Each source's samples are taken out of the same draws of the set, and nothing takes their place. `options` are the
    keyword-only arguments of `_asked`, and errors those of `compare`.
    """

    file = find_set(str(set_))
    with _asked(recipe, [file], **options) as asked:
        drawn = [asked.load(file, number) for number in range(draws)]
        names = list(dict.fromkeys(sample.source for data in drawn for sample in data.samples))
        if len(names) < 2:
            raise InputError(file, f"all its samples are of {names[0]}", "a set of several sources can be asked about")

        def without(name: str) -> list[CalibrationData]:
            kept = [tuple(sample for sample in data.samples if sample.source != name) for data in drawn]
            if not all(kept):
                raise InputError(file, f"a draw without {name} holds no sample", "draw more --tokens")
            return [replace(data, samples=few, digest=digest_of(few)) for data, few in zip(drawn, kept, strict=True)]

        cut = [without(name) for name in names]
        (of_whole, *of_cut), scored = asked.measure("draws-0", [drawn, *cut])
        whole = asked.measured_set(drawn[0].name, file, drawn, of_whole)
        left_out = []
        for name, fewer, lanes in zip(names, cut, of_cut, strict=True):
            rest = asked.measured_set(name, file, fewer, lanes)
            samples = [a - b for a, b in zip(whole.samples, rest.samples, strict=True)]
            tokens = [a - b for a, b in zip(whole.tokens, rest.tokens, strict=True)]
            left_out.append(replace(rest, samples=samples, tokens=tokens))
        asked.notes.append(NOTES["fewer"])
        result = {"set": set_figures(whole, scored), "sources": source_effects(whole, left_out, scored)}
        return asked.result([whole], scored, result)


@dataclass(frozen=True)
class _Asked:
    """Inputs and settings that both commands share."""

    job: Job
    held: HeldOut
    tokens: int | None
    tokens_by: str  # what says how many
    quantized: int  # how many layers are
    device: torch.device
    limit: int | None  # bytes of device memory
    work: Path
    check: Callable[[], None]
    trust_remote_code: bool
    dist: ProcessGroup
    notes: list[str] = field(default_factory=list)  # what a reader should know of the sets, filled as they are loaded

    def load(self, file: Path, draw: int) -> CalibrationData:
        """One draw of a set, the same in all processes."""

        data = None
        if self.dist.is_main:
            data = load_set(
                file,
                self.job.opened.folder,
                self.trust_remote_code,
                self.tokens,
                draw=draw,
                run=self.work / "calibration",
                positions=self.job.facts.positions,
                tokens_by=self.tokens_by,
            )
            if draw == 0:
                print_notes(data, str(file))
        drawn: CalibrationData = self.dist.broadcast_object(data)
        held = {text.tokens.numpy().tobytes() for text in self.held.texts}
        shared = sum(sample.tokens.astype("int64").tobytes() in held for sample in drawn.samples)
        if shared and draw == 0:
            self.notes.append(f"{file}: {shared} of its texts are held-out texts too, so its KL is too small")
        return drawn

    def measure(self, folder: str, sets: Sequence[Sequence[CalibrationData]]) -> tuple[list[list[LaneFigures]], Scored]:
        """Measure each draw of each set; draws with the same texts are measured once."""

        lanes = {_texts_of(data): data for draws in sets for data in draws}
        work = self.work / folder
        texts = self.held.texts
        draws = list(lanes.values())
        work.mkdir(parents=True, exist_ok=True)
        if self.dist.is_main:
            settings = deciding(self.job, None, self.device) | {
                "calibration": [identity(data.samples) for data in draws],
                "held_out": self.held.identity,
                "quantized": self.quantized,
            }
            refuse_changes(work, settings, self.work, "lanes.json", anew="give another --work")
            passes = "one pass" if len(draws) == 1 else f"{len(draws)} draws in one pass"
            print(f"{passes} over {self.job.opened.name}, on {len(texts)} texts", file=sys.stderr, flush=True)
        self.dist.barrier()
        options = Options(work, self.device, self.limit, dist=self.dist)
        nll, measured = measure_lanes(self.job, draws, texts, self.quantized, options, self.check)
        by_texts = dict(zip(lanes, measured, strict=True))
        figures = [[by_texts[_texts_of(data)] for data in draws_of_set] for draws_of_set in sets]
        facts = self.job.facts
        choices = np.array([len(text.tokens) * facts.top_k * len(facts.moe_layers) for text in texts], dtype=float)
        return figures, Scored(texts, nll, choices)

    def measured_set(
        self, label: str, file: Path, draws: Sequence[CalibrationData], lanes: Sequence[LaneFigures]
    ) -> MeasuredSet:
        """The draws of one set together."""

        names = tuple(sorted({sample.category for data in draws for sample in data.samples}))
        tokens = np.zeros(len(names), dtype=np.int64)
        layers = tuple(number for number in self.job.facts.moe_layers if number < self.quantized)
        counts = np.zeros((len(layers), len(names), self.job.facts.num_experts), dtype=np.int64)
        for data, lane in zip(draws, lanes, strict=True):
            rows = [names.index(name) for name in category_names(data.samples)]
            counts[:, rows] += np.stack(lane.routed)
            for sample in data.samples:
                tokens[names.index(sample.category)] += len(sample.tokens)
        none = np.zeros_like(counts)
        arrays = {key: np.stack([getattr(lane, key) for lane in lanes]) for key in ("kl", "top1", "nll", "same")}
        return MeasuredSet(
            label,
            draws[0].name,
            str(file),
            [len(data.samples) for data in draws],
            [sum(len(sample.tokens) for sample in data.samples) for data in draws],
            len({_texts_of(data) for data in draws}),
            **arrays,
            hidden_error=np.array([lane.hidden_error for lane in lanes]),
            routed=Routed(names, tokens, layers, counts, none, none),
        )

    def result(
        self, sets: Sequence[MeasuredSet], scored: Scored, figures: dict[str, Any], note: str = ""
    ) -> SetComparison:
        """Result that a command prints in rank 0; empty in other ranks."""

        quantized, depth = self.quantized, self.job.facts.num_layers
        of_part = (
            f"Only the first {quantized} of {depth} layers are quantized, the others are the source's: KL is of these."
        )
        notes = [of_part if quantized < depth else "", *self.notes, NOTES["power"], NOTES["holm"]]
        about = {
            "model": self.job.recipe.source.model,
            "evaluated_on": self.held.about.as_dict(),
            "solved_layers": quantized,
            "layers": depth,
            "draws": sets[0].draws,
            "tokens": self.tokens,
            "texts": scored.rows,
            "notes": list(filter(None, [*notes, *_draw_warnings(sets, self.tokens), note])),
        }
        return SetComparison(about | figures if self.dist.is_main else {})


@contextlib.contextmanager
def _asked(
    recipe: str | Path,
    files: Sequence[Path],
    *,
    tokens: Tokens = None,
    layers: Layers = None,
    data: HeldOutSet = None,
    source: opt.Source = None,
    settings: opt.Settings = (),
    device: opt.Device = "auto",
    device_memory: opt.DeviceMemory = None,
    work: Work = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    dist: opt.Dist = SINGLE_PROCESS,
) -> Iterator[_Asked]:
    """Read and check everything, and lend a folder to work in."""
    if work is not None and dist.is_main:
        ready_folder(Path(work), "--work")
    _refuse_wrong_sets(files)
    changes = changes_of(settings)
    _refuse_unused(changes, tokens, data)
    place = Path(source) if source is not None else None
    job = dist.in_turn(lambda: prepare(str(recipe), source_folder=place, changes=changes))
    gate = job.recipe.verify.perplexity if job.recipe.verify else None
    faults = []
    if job.allocation:
        same = f"compare with the same: {fixed_bits(job.path, changes)}"
        faults.append(InputError(job.path, "a budget chooses other bits for each set", same))
    if job.recipe.experts.convert is not None:
        faults.append(InputError(job.path, "converts, so that no set decides anything", "give a recipe that quantizes"))
    elif data is None and gate is None:
        faults.append(InputError(job.path, "has no verify.perplexity, so no held-out texts", "give --data held-out"))
    if faults:
        raise InputError.several(faults)
    held_out_file = set_location(gate.data, job.path) if data is None and gate else find_set(str(data), "held-out")

    refuse_library(job, dist)
    trusted = trust_remote_code or job.recipe.source.trusts_tokenizer
    read = print_notes(load_set(held_out_file, job.opened.folder, trusted), "held out") if dist.is_main else None
    held = held_out(dist.broadcast_object(read), job.opened, job.facts, trusted)
    quantized = _first(layers, job.facts.num_layers, min(job.facts.moe_layers))
    begun = begun_with(Path(work) / "draws-0", "lanes.json") if work else {}
    use_threads(job.facts, dist.broadcast_object(begun.get("threads")), dist)
    advice = "give the same command again" + (" to resume" if work else "; with --work DIR it would resume")
    scratch = tempfile.TemporaryDirectory() if work is None else contextlib.nullcontext(str(work))
    with scratch as folder, interruptible(advice) as interrupt, ordered():
        of_rank_0: str = dist.broadcast_object(folder)  # which other machines do not see
        yield _Asked(
            job,
            held,
            tokens or job.recipe.calibration_tokens,
            "--tokens" if tokens else "calibration.tokens",
            quantized,
            choose_device(device, dist),
            device_memory,
            Path(folder if dist.node else of_rank_0),
            dist.watch(interrupt),
            trusted,
            dist,
        )
        dist.barrier()
        if dist.local_rank == 0:
            for made in (*Path(folder).glob("draws-*"), Path(folder) / "calibration"):
                shutil.rmtree(made, ignore_errors=True)


def _refuse_unused(changes: Sequence[Change], tokens: int | None, data: str | Path | None) -> None:
    """Refuse changes of keys that a comparison does not read, or in whose place another option stands."""
    instead = {"verify.perplexity.data": data is not None and "--data", "calibration.tokens": tokens and "--tokens"}
    for change in changes:
        if option := instead.get(".".join(change.place)):
            raise InputError(change.shown, f"{option} says this", "give one of them")
        if change.place[0] == "calibration" and change.place != ("calibration", "tokens"):
            raise InputError(change.shown, "the sets that are compared are named by themselves", "leave it out")


def _refuse_wrong_sets(files: Sequence[Path]) -> None:
    """Read all sets, and raise a CalibrationError with a line for each fault."""

    faults = []
    for file in files:
        try:
            read_set(file)
        except CalibrationError as fault:
            faults.append(fault)
    if faults:
        raise CalibrationError.several(faults)


def _first(layers: str | None, depth: int, dense: int) -> int:
    """Number of layers to quantize, of `depth`: all, or N of `first:N`; the first `dense` layers have no experts."""
    if layers is None:
        return depth
    given = re.fullmatch(r"first:(\d+)", layers)
    if given is None or not dense < int(given[1]) <= depth:
        raise InputError(f"--layers {layers}", f"is not first:N with N from {dense + 1} to {depth}", "correct it")
    return int(given[1])


def _texts_of(data: CalibrationData) -> tuple[str, ...]:
    """Sorted digests of a draw's samples: equal for draws with the same texts."""

    return tuple(sorted(digest_of([sample]) for sample in data.samples))


def _draw_warnings(sets: Sequence[MeasuredSet], tokens: int | None) -> list[str]:
    """Warnings where the result does not generalise to other draws."""
    if sets[0].draws == 1:
        return ["With one draw of each set, intervals cover the texts alone; another draw may decide otherwise."]
    whole = [measured.label for measured in sets if measured.different == 1]
    remedy = f"ask for fewer --tokens than {tokens:,}" if tokens else "give --tokens N to draw a part of it"
    return [
        f"{label}: every draw is the whole set, so its interval covers the texts alone; {remedy}" for label in whole
    ]
