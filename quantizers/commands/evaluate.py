"""Perplexity, KL and routing of finished checkpoints against their source, on a held-out set: `quantizers.evaluate`.

Nothing but files is read, each layer of each checkpoint once, in the same loop as that of a run.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantizers.architectures.families import Own, architecture_for
from quantizers.calibration.load_set import load_set, said
from quantizers.calibration.samples import CalibrationData, identity
from quantizers.checkpoint.loaded_tensors import LoadedTensors, layer_names, load_tensors, outside_names
from quantizers.checkpoint.reader import Checkpoint, open_checkpoint
from quantizers.checkpoint.source_identity import source_stats
from quantizers.device.determinism import ordered
from quantizers.device.devices import choose_device, fingerprint, forward_dtype, use_threads
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup, rank_0_progress
from quantizers.eval.fidelity.as_served import ServedModel, ServedTexts, as_served, as_stored, kernels_of, pairs
from quantizers.eval.fidelity.comparison import Comparison, weight_errors
from quantizers.eval.fidelity.figures import Fidelity as FidelityFigures
from quantizers.eval.fidelity.kv_cache import KINDS, WITH_ONES, CachedModel, kv_figures
from quantizers.eval.fidelity.metrics import Measured, Text
from quantizers.eval.fidelity.paired import paired
from quantizers.eval.fidelity.scoring import held_out, score
from quantizers.formats.fp8 import has_kv_scales
from quantizers.formats.tensor_names import published_names
from quantizers.formats.unsupported import refuse_swapped_arguments
from quantizers.layers.loop import LayerStep, all_tensors, layer_steps
from quantizers.model.activation_stream import ActivationStream
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.output.journal import begun_with
from quantizers.output.manifest import output_facts, refuse_incomplete
from quantizers.recipe.read import find_set
from quantizers.recipe.schema import Card, known_cards
from quantizers.system.errors import CheckpointError, InputError, OutputError
from quantizers.system.files import json_finite, write_json
from quantizers.system.interrupts import interruptible

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
        """What `quantize eval --json` prints, an EvalReport."""
        return {
            "source": self.source,
            "candidates": [{"model": one.model} | one.figures for one in self.candidates],
            "notes": list(self.notes),
        } | ({"paired": list(self.paired)} if self.paired else {})


def evaluate(
    source: str | Path,
    candidates: str | Path | Sequence[str | Path],
    data: str | Path,
    *,
    facts: str | Path | None = None,
    as_served: Sequence[str] = (),
    device: str = "auto",
    work: str | Path | None = None,
    stream: bool = False,
    trust_remote_code: bool = False,
    dist: ProcessGroup = SINGLE_PROCESS,
) -> Evaluation:
    """Measure perplexity, KL and more of candidates against a source; one layer of each is in memory at a time.

    Args:
        source: a folder or Hub id.
        candidates: one or more checkpoints of the same model, in any format that `quantize eval --help` names.
        data: evaluation set: a file, or the name of a shipped set such as held-out.
        facts: the user's own architecture spec; the one that a candidate carries by default.
        as_served: cards on which source and candidates are measured as well, as vLLM's kernels there would compute
            them: ampere, ada, hopper, hopper-no-e8m0, blackwell or vllm-cpu.
        device, dist: as in `quantizers.run`.
        work: folder for activations and a journal, from which an interrupted evaluation resumes; a temporary one by
            default.
        stream: leave the shards of Hub ids on the Hub, and read each layer's bytes from there.
        trust_remote_code: allow custom tokenizer code.

    Raises:
        InputError: a set or checkpoint is wrong, or `work` holds another evaluation.
        QuantizeError: a model's hidden states are not finite.
        Interrupted: by a signal.
    """
    cards = known_cards(as_served)
    names = [str(source), *map(str, [candidates] if isinstance(candidates, str | Path) else candidates)]
    for name in names:
        refuse_incomplete(Path(name))
    data_set = find_set(str(data), "held-out")
    remote = [stream and not Path(name).expanduser().is_dir() for name in names]
    if stream and not any(remote):
        raise InputError("--stream: all checkpoints are folders, which are read where they lie; leave it out")
    opened = dist.in_turn(lambda: [open_checkpoint(n, stream=one) for n, one in zip(names, remote, strict=True)])
    own = Path(facts) if facts is not None else None
    if own is None:
        own = next(filter(None, (output_facts(candidate.folder) for candidate in opened[1:])), None)
        if own is not None and dist.is_main:
            print(f"facts: {own}", file=sys.stderr, flush=True)
    where = str(opened[0].folder / "config.json")
    architecture = architecture_for(opened[0].config, where, own, opened[0].tensors)
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
    results = tuple(Fidelity(name, one.as_dict()) for name, one in zip(names[1:], figures, strict=dist.is_main))
    return Evaluation(names[0], results, tuple(differences), (as_stored(on),))


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
    where = str(source.folder / "config.json")
    facts = architecture_for(source.config, where, own, source.tensors)
    opened = [published_names(checkpoint, facts) for checkpoint in (source, *candidates)]
    for candidate in candidates:
        config_path = str(candidate.folder / "config.json")
        if candidate.config.get("model_type") != facts.model_type or not facts.is_of(candidate.config):
            raise CheckpointError(f"{config_path}: is another model than {source.name}; give checkpoints of one model")
    read = said(load_set(data_set, source.folder, trust_remote_code), "held out") if dist.is_main else None
    data: CalibrationData = dist.broadcast_object(read)
    held = held_out(data, source, facts, trust_remote_code)
    parts = [load_tensors(one, outside_names(one, facts)) for one in opened]
    models = [StreamedModel(part, facts, device, forward_dtype(device)) for part in parts]
    models += [ServedModel(part, facts, device, card) for card in cards for part in parts]
    of = list(range(len(opened))) * (1 + len(cards))
    first_cached, dtype = len(models), models[0].dtype
    for number, part in enumerate(parts):
        if number and has_kv_scales(part.config):
            models += [CachedModel(part, facts, device, dtype, ones=kind == WITH_ONES) for kind in KINDS]
            of += [number for _ in KINDS]
    if dist.is_main:
        work.mkdir(parents=True, exist_ok=True)
        _same_evaluation(work, opened, data, device, cards)
    dist.barrier()
    streams, entries = through_layers(models, of, opened, held.texts, work, check, dist=dist)
    kept = work if dist.node == 0 else None  # other machines have no such folder
    stage = partial(rank_0_progress, check=check, dist=dist)
    compared = pairs(len(opened), len(cards))
    with_cache = [(0, number) for number in range(first_cached, len(models))]
    scores = score(streams, held.texts, stage, kept, dist, pairs=[*compared, *with_cache])
    if not dist.is_main:
        return []
    served = [model for model in models if isinstance(model, ServedModel)]
    kernels = [{model.card: kernels_of(model, one) for model in served} for one in opened[1:]]
    on_cards = as_served(scores[: len(compared)], len(opened), cards, held.texts, kernels)
    cached = scores[len(compared) :]
    caches = {
        of[first_cached + at]: kv_figures(cached[at : at + len(KINDS)], scores[0], held.texts)
        for at in range(0, len(cached), len(KINDS))
    }
    shutil.rmtree(work, ignore_errors=True)
    found = []
    for number, candidate in enumerate(candidates):
        layers = [entry[number] for entry in entries]
        measured = Measured(scores[0][0], *scores[number + 1], layers, on_cards[number], caches.get(number + 1))
        found.append(held.figures(measured, candidate.name))
    return found


class _FromFiles:
    """A finished checkpoint as a candidate of the comparison."""

    part: LoadedTensors  # of the layer that was read last; with `reread` until the next one, else until they are used

    def __init__(self, stream: ActivationStream, checkpoint: Checkpoint, weights: bool, reread: bool) -> None:
        self.stream, self.checkpoint, self.weights, self.reread = stream, checkpoint, weights, reread
        self.weight_error: dict[str, float] = {}

    def prepare(self, step: LayerStep, layer: DecoderLayer) -> None:
        """Nothing is made of the source's weights."""

    @contextlib.contextmanager
    def layer(self, step: LayerStep) -> Iterator[DecoderLayer]:
        """The layer as it lies in the files, each tensor read once."""
        model = self.stream.model
        self.part = load_tensors(self.checkpoint, layer_names(self.checkpoint, model.facts, step.number))
        if self.weights:
            errors = weight_errors(step.source, self.part, model.facts, step.number, model.device)
            self.weight_error = errors
        with model.layer(step.number, self.part) as layer:
            if not self.reread:
                del self.part
            yield layer


def through_layers(
    models: Sequence[StreamedModel],
    of: Sequence[int],
    opened: Sequence[Checkpoint],
    texts: Sequence[Text],
    work: Path,
    check: Callable[[], None],
    *,
    dist: ProcessGroup = SINGLE_PROCESS,
) -> tuple[list[ActivationStream], list[list[dict[str, Any]]]]:
    """Run all models over the texts, journaled layer by layer.

    Args:
        models: of each checkpoint `opened`, the source first; then perhaps others of the same.
        of: the number of each model's checkpoint.
        work: an existing folder for states and journal, from which a call resumes.

    Returns:
        The models' streams, whose states are those that leave the last layer; and by layer what `comparison.compare`
        found of each candidate, in rank 0.
    """
    layers, count = models[0].facts.num_layers, len(opened)
    journal = [work / f"layer-{number:05d}.json" for number in range(layers)]
    done = dist.broadcast_object(next((n for n in range(layers) if not journal[n].exists()), layers))
    lengths = [len(text.tokens) for text in texts]
    streams = [
        ActivationStream(opened[of[n]].name, model, n, lengths, work, durable=True, check=check, dist=dist)
        for n, model in enumerate(models)
    ]
    for stream in streams:
        if done == 0:
            stream.embed([text.tokens for text in texts])
        else:
            stream.resume(done)
    candidates = [
        _FromFiles(stream, one, dist.is_main, len(models) > count)
        for stream, one in zip(streams[1:count], opened[1:], strict=True)
    ]
    files: list[Callable[[LayerStep], Checkpoint]] = [lambda step: step.on_device]
    files += [partial(lambda one, _: one.part, candidate) for candidate in candidates]
    entries = [json.loads(file.read_text()) for file in journal[:done] if dist.is_main]
    comparison = Comparison(streams[0], candidates, texts, dist)
    on_cards = ServedTexts(streams[count:], [files[n] for n in of[count:]])
    tensors = all_tensors(models[0], opened[0], done)
    steps = layer_steps(opened[0], tensors, [comparison, on_cards], models[0], check=check, dist=dist)
    with rank_0_progress("evaluating", layers, done, check, dist) as shown_step, contextlib.closing(steps):
        for step in steps:
            if dist.is_main:
                found = [
                    compared | {"weight_error": candidate.weight_error}
                    for compared, candidate in zip(comparison.found, candidates, strict=True)
                ]
                entries.append(found)
                write_json(journal[step.number], json_finite(found))
            for stream in streams:
                stream.forget(step.number)
            shown_step(f"layer {step.number}")
    return streams, entries


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
            f"{work}: holds an unfinished evaluation of other models or data; empty it, or give another --work"
        )
