"""Perplexity, KL and routing of finished checkpoints against their source, on a held-out set: `quantizers.evaluate`.

Nothing but files is read, each layer of each checkpoint once, in the same loop as that of a run.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import Own
from quantizers.calibration.load_set import load_set, print_notes
from quantizers.calibration.samples import CalibrationData, identity
from quantizers.checkpoint.loaded_tensors import LoadedTensors, layer_names, load_tensors, outside_names
from quantizers.checkpoint.reader import Checkpoint, open_checkpoint
from quantizers.checkpoint.source_identity import source_stats
from quantizers.device.determinism import ordered
from quantizers.device.devices import choose_device, fingerprint, forward_dtype, use_threads
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup, rank_0_progress
from quantizers.eval.fidelity.comparison import compare, weight_errors
from quantizers.eval.fidelity.figures import Fidelity as FidelityFigures
from quantizers.eval.fidelity.figures import LayerFigures
from quantizers.eval.fidelity.metrics import Measured, Text
from quantizers.eval.fidelity.paired import paired
from quantizers.eval.fidelity.scoring import held_out, score
from quantizers.eval.fidelity.variants import Variants, as_stored, variants_of
from quantizers.formats.fp8 import has_kv_scales
from quantizers.formats.stored_matrices import architecture_of
from quantizers.formats.tensor_names import published_names
from quantizers.formats.unsupported import refuse_swapped_arguments
from quantizers.hooks import required
from quantizers.model.activation_stream import ActivationStream
from quantizers.model.streamed_model import StreamedModel
from quantizers.output.journal import begun_with
from quantizers.output.layer_files import LayerFiles
from quantizers.output.manifest import output_facts, refuse_incomplete
from quantizers.recipe.cards import Card, known_cards
from quantizers.recipe.read import find_set
from quantizers.stitch.write.config_files import remarks_on_config
from quantizers.system.errors import CheckpointError, InputError, OutputError
from quantizers.system.files import json_finite, ready_folder, write_json
from quantizers.system.interrupts import interruptible
from quantizers.system.progress import doing
from quantizers.walk.walk import all_tensors, walk

from . import options as opt

EVALUATION = "evaluation.json"  # in `work`: the settings that an evaluation was started with


@dataclass(frozen=True)
class Fidelity:
    """The figures of one candidate.

    Attributes:
        model: as it was named.
        figures: all figures, an EvaluatedCandidate without its name.
    """

    model: str
    figures: dict[str, Any]

    @property
    def kl(self) -> float:
        """Mean KL(source || candidate), in nats."""
        return float(self.figures["kl"]["mean"])

    @property
    def perplexity(self) -> float:
        """Perplexity of the candidate."""
        return float(self.figures["perplexity"]["candidate"])


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`.

    Attributes:
        source: as it was named.
        candidates: in the order given; none in ranks except 0.
        paired: with several candidates, the differences of each further one to the first, with confidence intervals,
            a PairedCandidate each.
        notes: what a reader should know.
    """

    source: str
    candidates: tuple[Fidelity, ...]
    paired: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `quantize eval --json` prints, an EvalReport."""
        return {
            "source": self.source,
            "candidates": [{"model": candidate.model} | candidate.figures for candidate in self.candidates],
            "notes": list(self.notes),
        } | ({"paired": list(self.paired)} if self.paired else {})


@opt.documented
def evaluate(
    source: Annotated[str | Path, opt.Argument("a folder or Hub id", "SOURCE")],
    candidates: Annotated[
        str | Path | Sequence[str | Path],
        opt.Argument("one or more checkpoints of the same model", "CANDIDATE…"),
        "one or more checkpoints of the same model, in any format that `quantize eval --help` names",
    ],
    data: opt.EvaluationSet,
    *,
    as_served: Annotated[
        Sequence[str],
        opt.Option(
            "measure also as vLLM's kernels on this kind of card compute; may be repeated: "
            "ampere, ada, hopper, hopper-no-e8m0, blackwell, vllm-cpu, or a GPU's name",
            "CARD",
        ),
    ] = (),
    facts: Annotated[opt.Facts, "the user's own architecture spec; the one that a candidate carries by default"] = None,
    device: opt.Device = "auto",
    work: Annotated[
        str | Path | None,
        opt.Option("folder for activations and a journal; an interrupted evaluation resumes from it", "DIR"),
        "folder for activations and a journal, from which an interrupted evaluation resumes; a temporary one by "
        "default",
    ] = None,
    stream: opt.Stream = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    dist: opt.Dist = SINGLE_PROCESS,
) -> Evaluation:
    """Measure perplexity, KL and more of candidates against a source; one layer of each is in memory at a time.

    Raises:
        InputError: a set or checkpoint is wrong, or `work` holds another evaluation.
        QuantizeError: a model's hidden states are not finite.
        Interrupted: by a signal.
    """
    cards = known_cards(as_served)
    if cards:
        required("served_model", "--as-served")
    if work is not None and dist.is_main:
        ready_folder(Path(work), "--work")
    names = [str(source), *map(str, [candidates] if isinstance(candidates, str | Path) else candidates)]
    for name in names:
        refuse_incomplete(Path(name))
    data_set = find_set(str(data), "held-out")
    remote = [stream and not Path(name).expanduser().is_dir() for name in names]
    if stream and not any(remote):
        raise InputError("--stream", "all checkpoints are folders, which are read where they lie", "leave it out")
    opened = dist.in_turn(lambda: [open_checkpoint(n, stream=there) for n, there in zip(names, remote, strict=True)])
    own = Path(facts) if facts is not None else None
    if own is None:
        own = next(filter(None, (output_facts(candidate.folder) for candidate in opened[1:])), None)
        if own is not None and dist.is_main:
            print(f"facts: {own}", file=sys.stderr, flush=True)
    architecture = architecture_of(opened[0], own)
    begun = begun_with(Path(work) / "evaluation", EVALUATION) if work else {}
    use_threads(architecture, dist.broadcast_object(begun.get("threads")), dist)
    advice = "give the same command again" + (" to resume" if work else "; with --work DIR it would resume")
    on = choose_device(device, dist)
    scratch = tempfile.TemporaryDirectory() if work is None else contextlib.nullcontext(work)
    with scratch as folder, interruptible(advice) as interrupt, ordered():
        figures = measure(
            opened[0],
            opened[1:],
            data_set,
            on,
            Path(folder) / "evaluation",
            dist.watch(interrupt),
            trust_remote_code=trust_remote_code,
            dist=dist,
            own=architecture,
            cards=cards,
        )
    differences = [
        paired(figures[0], other, model=name, against=names[1]).as_dict()
        for name, other in zip(names[2:], figures[1:], strict=dist.is_main)
    ]
    results = tuple(
        Fidelity(name, fidelity.as_dict()) for name, fidelity in zip(names[1:], figures, strict=dist.is_main)
    )
    remarks = (as_stored(on), *remarks_on_config(opened[0], architecture))
    return Evaluation(names[0], results, tuple(differences), remarks)


def measure(
    source: Checkpoint,
    candidates: list[Checkpoint],
    data_set: Path,
    device: torch.device,
    work: Path,
    check: Callable[[], None] = lambda: None,
    *,
    trust_remote_code: bool = False,
    dist: ProcessGroup = SINGLE_PROCESS,
    own: Own = None,
    cards: Sequence[Card] = (),
) -> list[FidelityFigures]:
    """Figures of each candidate, with `cards` also as served; none in ranks except 0.

    Args:
        data_set: a calibration set file; tokenized with the source's tokenizer.
        work: a folder for states and the journal, from which an interrupted call resumes; removed at the end.
        check: called between steps; may raise to interrupt.

    Raises:
        CheckpointError: a candidate is another model, in a format that is not read, or what the source was made from.
        OutputError: `work` holds another evaluation.
        QuantizeError: a model's hidden states are not finite, or its perplexity is not a number.
    """
    for candidate in candidates:
        refuse_swapped_arguments(source, candidate, f"give {candidate.name} first, and {source.name} after it")
    facts = architecture_of(source, own)
    opened = [published_names(checkpoint, facts) for checkpoint in (source, *candidates)]
    for candidate in candidates:
        config_path = str(candidate.folder / "config.json")
        if candidate.config.get("model_type") != facts.model_type or not facts.is_of(candidate.config):
            raise CheckpointError(config_path, f"is another model than {source.name}", "give checkpoints of one model")
    read = print_notes(load_set(data_set, source.folder, trust_remote_code), "held out") if dist.is_main else None
    data: CalibrationData = dist.broadcast_object(read)
    held = held_out(data, source, facts, trust_remote_code)
    outside = [load_tensors(checkpoint, outside_names(checkpoint, facts)) for checkpoint in opened]
    if dist.is_main:
        work.mkdir(parents=True, exist_ok=True)
        _same_evaluation(work, opened, data, device, cards)
    dist.barrier()
    streams, variants = _streams(outside, facts, held.texts, work, device=device, cards=cards, check=check, dist=dist)
    entries = through_layers(streams, opened, held.texts, work, check, variants=variants, dist=dist)
    reference, *candidate_streams = streams
    kept = work if dist.node == 0 else None  # other machines have no such folder
    stage = partial(rank_0_progress, check=check, dist=dist)
    pairs = [(reference, stream) for stream in streams] + variants.pairs(reference)
    scores = score(pairs, held.texts, stage, kept, dist)
    if not dist.is_main:
        return []
    shutil.rmtree(work, ignore_errors=True)
    figures = []
    for number, (candidate, stream) in enumerate(zip(candidates, candidate_streams, strict=True), 1):
        on_cards = variants.on_cards(number, reference, scores, held.texts, opened[number])
        cache = variants.with_cache(number, reference, scores, held.texts)
        layers = [entry[number - 1] for entry in entries]
        measured = Measured(scores[reference, reference][0], *scores[reference, stream], layers, on_cards, cache)
        figures.append(held.figures(measured, candidate.name))
    return figures


def _streams(
    outside: Sequence[LoadedTensors],
    facts: Architecture,
    texts: Sequence[Text],
    work: Path,
    *,
    device: torch.device,
    cards: Sequence[Card],
    check: Callable[[], None],
    dist: ProcessGroup,
) -> tuple[list[ActivationStream], Variants]:
    """The texts' states in each checkpoint as stored, the source first; and in other computations of them.

    Args:
        outside: the tensors outside the layers of each checkpoint.
    """
    numbers = count()
    lengths = [len(text.tokens) for text in texts]
    dtype = forward_dtype(device)

    def new(checkpoint: int, model: StreamedModel) -> ActivationStream:
        name, number = outside[checkpoint].name, next(numbers)
        return ActivationStream(name, model, number, lengths, work, durable=True, check=check, dist=dist)

    stored = [new(n, StreamedModel(tensors, facts, device, dtype)) for n, tensors in enumerate(outside)]
    cached = [n for n, tensors in enumerate(outside) if n and has_kv_scales(tensors.config)]
    return stored, variants_of(outside, facts, device, dtype, cards, cached, new)


def through_layers(
    streams: Sequence[ActivationStream],
    opened: Sequence[Checkpoint],
    texts: Sequence[Text],
    work: Path,
    check: Callable[[], None],
    *,
    variants: Variants | None = None,
    dist: ProcessGroup = SINGLE_PROCESS,
) -> list[list[LayerFigures]]:
    """Take texts through all layers of some checkpoints, journaled layer by layer.

    Args:
        streams: of the texts in each checkpoint, the source's first; afterwards they have left the last layer.
        opened: the checkpoints.
        work: an existing folder for states and journal, from which a call resumes.
        variants: other computations of the checkpoints.

    Returns:
        By layer the figures of each candidate, with its `weight_error`; in rank 0.
    """
    source, *candidates = streams
    model = source.model
    journal = LayerFiles(work)
    variants = variants or Variants()
    layers, every = model.facts.num_layers, [*streams, *variants.streams]
    entries: list[list[LayerFigures]] = []
    if dist.is_main:
        entries = [list(map(LayerFigures.model_validate, layer)) for layer in journal.read(layers)]
    done: int = dist.broadcast_object(len(entries))
    for stream in every:
        stream.enter(done, [text.tokens for text in texts])
    tensors = all_tensors(model, opened[0], done)
    with (
        rank_0_progress("evaluating", layers, done, check, dist) as shown,
        walk(opened[0], tensors, model, check=check, dist=dist) as steps,
    ):
        for step in steps:
            with step.module() as layer:
                doing("held-out texts")
                source.advance(layer)
            stored: list[Checkpoint] = [step.on_device]
            compared = []
            for stream, checkpoint in zip(candidates, opened[1:], strict=True):
                files = load_tensors(checkpoint, layer_names(checkpoint, model.facts, step.number))
                errors = None
                if dist.is_main:
                    errors = weight_errors(step.source, files, model.facts, step.number, model.device)
                with stream.model.layer(step.number, files) as layer:
                    stored += [files] if variants else []
                    del files
                    doing("held-out texts")
                    stream.advance(layer)
                doing("comparing")
                routed = step.number not in model.facts.dense
                compared.append(compare(source, stream, texts, routed=routed, dist=dist).changed(weight_error=errors))
            variants.advance(step, stored)
            if dist.is_main:
                entries.append(compared)
                journal.write(step.number, json_finite([figures.as_dict() for figures in compared]))
            for stream in every:
                stream.forget(step.number)
            shown(f"layer {step.number}")
    return entries


def _same_evaluation(
    work: Path, opened: list[Checkpoint], data: CalibrationData, device: torch.device, cards: Sequence[Card]
) -> None:
    """Write the settings that the figures depend on beside the states, or compare them with those already there."""
    settings = {
        "data": identity(data.samples),
        "checkpoints": [source_stats(c) | {"folder": str(c.folder)} for c in opened],
        "machine": fingerprint(device),
        "as_served": list(cards),
    }
    path = work / EVALUATION
    if not path.exists():
        write_json(path, settings)
    elif json.loads(path.read_text()) != json.loads(json.dumps(settings)):
        raise OutputError(
            work, "holds an unfinished evaluation of other models or data", "empty it, or give another --work"
        )
