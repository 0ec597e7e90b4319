"""A server's log-probabilities against this program's evaluation of what it should serve: `quantizers.serve_check`.

The server is asked first, text by text. Then source and candidate are evaluated layer by layer in float32 on the CPU,
and compared with its answers position by position.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import ValidationError

from quantizers.architectures.architecture import Architecture
from quantizers.calibration.load_set import load_set, print_notes
from quantizers.calibration.samples import identity
from quantizers.checkpoint.loaded_tensors import load_tensors, outside_names
from quantizers.checkpoint.reader import CONFIG, Checkpoint, open_checkpoint, read_json
from quantizers.checkpoint.source_identity import source_digest
from quantizers.commands import options as opt
from quantizers.commands.evaluate import through_layers
from quantizers.commands.verify import source_of
from quantizers.device.determinism import ordered
from quantizers.device.devices import use_threads, versions
from quantizers.eval.fidelity.kv_cache import CachedModel
from quantizers.eval.fidelity.metrics import Text
from quantizers.eval.fidelity.scoring import held_out
from quantizers.formats.fp8 import has_kv_scales
from quantizers.formats.stored_matrices import architecture_of
from quantizers.formats.tensor_names import published_names
from quantizers.formats.unsupported import refuse_swapped_arguments
from quantizers.model.activation_stream import ActivationStream
from quantizers.model.streamed_model import StreamedModel
from quantizers.output.manifest import output_facts, read_record, refuse_incomplete
from quantizers.recipe.portable import is_hub_id
from quantizers.recipe.read import find_set
from quantizers.system.errors import CheckpointError, InputError
from quantizers.system.files import ready_file, write_json
from quantizers.system.interrupts import interruptible
from quantizers.system.output_files import REPORT, SERVE_CHECK
from quantizers.system.progress import progress
from quantizers.system.strict_yaml import Refused, parse_value

from .schema import ServeCheckReport
from .served import UNLIKE, compare_text, figures, verdict
from .server import Returned, Server, kernel_lines, over_http, score
from .server import offline as engine_of

TOP_K, TIMEOUT = 20, 300.0


@dataclass(frozen=True)
class ServeCheck:
    """The result of `serve_check`.

    Attributes:
        report: what is in the file, a ServeCheckReport.
        path: of the file.
    """

    report: ServeCheckReport
    path: Path

    @property
    def passed(self) -> bool:
        """Whether the server is within its limit, or none was applied."""
        return self.report.verdict.passed

    def as_dict(self) -> dict[str, Any]:
        """Output of `quantize serve-check --json`, a ServeCheckReport."""
        return self.report.as_dict()


@opt.documented
def serve_check(
    candidate: Annotated[str | Path, opt.Argument("the checkpoint that is served, a folder or Hub id", "CANDIDATE")],
    data: opt.EvaluationSet,
    *,
    server: Annotated[
        str | None, opt.Option("a running vLLM or SGLang; its key is taken from OPENAI_API_KEY", "URL")
    ] = None,
    offline: Annotated[
        str | Path | None,
        opt.Option("no server: the interpreter of an environment whose vLLM is used", "PYTHON"),
    ] = None,
    engine: Annotated[
        Sequence[str],
        opt.Option("with --offline: an argument of vllm.LLM, as dtype=float32; may be repeated", "KEY=VALUE"),
        "with `offline`, arguments of vllm.LLM as KEY=VALUE",
    ] = (),
    source: opt.SourceModel = None,
    source_check: Annotated[
        str | Path | None,
        opt.Option("what this wrote when the same server served the source: sets a limit", "FILE"),
    ] = None,
    exact: Annotated[
        bool, opt.Option("the server computes in float32 with weights as stored: KL at most 1e-6")
    ] = False,
    top_k: Annotated[
        int, opt.Option("log-probabilities at each position; above 20 vLLM needs --max-logprobs", min=1)
    ] = 20,
    timeout: Annotated[float, opt.Option("seconds without an answer to a text", min=0.1)] = 300,
    server_log: Annotated[
        str | Path | None, opt.Option("the server's log, for the kernels that it names", "FILE")
    ] = None,
    output: Annotated[
        str | Path | None,
        opt.Option(
            "file to write; serve-check.json by default, beside report.json if there is one", "FILE", ("--output",)
        ),
    ] = None,
    facts: Annotated[
        opt.Facts, "the user's own architecture spec; the one that the candidate carries by default"
    ] = None,
    trust_remote_code: opt.TrustRemoteCode = False,
) -> ServeCheck:
    """Ask a server of a checkpoint for log-probabilities, and compare them with our evaluation; writes a JSON file.

    Raises:
        InputError: something given is wrong, or the server does not answer as it should.
        QuantizeError: a model's hidden states are not finite.
        Interrupted: by a signal.
    """

    if server is None and offline is None:
        raise InputError("", "give --server URL, or --offline PYTHON for a vLLM without a server")
    if server is not None and offline is not None:
        raise InputError("", "--server and --offline ask two servers", "leave out --server or --offline")
    if offline is None and engine:
        raise InputError("", "--engine is for --offline", "give a server its options when it is started")
    if offline is not None and server_log is not None:
        raise InputError("", "--server-log is for --server", "leave it out: with --offline the log is known")
    if exact and source_check is not None:
        raise InputError("", "--exact has a limit of its own", "leave out --source-check")
    refuse_incomplete(Path(candidate))
    path = _output(output, Path(candidate))
    ready_file(path, "--output")
    data_set, arguments = find_set(str(data), "held-out"), dict(map(_argument, engine))
    opened = open_checkpoint(str(candidate))
    origin = _source(opened, str(source) if source is not None else None)
    checkpoints = [opened, *([origin] if origin else [])]
    if origin:
        refuse_swapped_arguments(origin, opened, f"give {origin.name} as CANDIDATE and {opened.name} as --source")
    first = checkpoints[-1]  # the source, if there is one: its tokenizer made the texts of every candidate
    own = Path(facts) if facts is not None else output_facts(opened.folder)
    architecture = architecture_of(first, own)
    if opened.config.get("model_type") != architecture.model_type or not architecture.is_of(opened.config):
        raise CheckpointError(opened.folder / CONFIG, f"is another model than {first.name}", "give its own source")
    names = [{"model": _name(checkpoint), "digest": source_digest(checkpoint)} for checkpoint in checkpoints]
    before = _record(Path(source_check), names, top_k) if source_check is not None else None
    samples = print_notes(load_set(data_set, first.folder, trust_remote_code), "held out")
    connection = (
        over_http(str(server), timeout, Path(server_log) if server_log is not None else None)
        if offline is None
        else engine_of(str(offline), opened.folder, arguments, top_k, timeout)
    )
    with connection as answering:
        if before and (answering.kind, answering.version) != (before.server.kind, before.server.version):
            raise InputError(
                source_check,
                f"is of {before.server.kind} {before.server.version}, and this server is "
                f"{answering.kind} {answering.version}",
                "serve the source on this one, and check it again",
            )
        held = _texts(samples, first, architecture, answering.max_model_len, trust_remote_code)
        pairs = zip(samples.samples, held.texts, strict=True)
        sent = identity([replace(sample, tokens=text.tokens.numpy()) for sample, text in pairs])
        if before and before.data.identity != sent:
            raise InputError(source_check, "was made with other texts", "give the same --data and --max-model-len")
        returned = _ask(answering, held.texts, top_k, architecture.vocab_size)
        about = {
            "kind": answering.kind, "version": answering.version, "model": answering.model,
            "max_model_len": answering.max_model_len, "offline": offline is not None,
            "kernels": kernel_lines(answering.log()),
        }  # fmt: skip
    with interruptible("give the same command again") as check, ordered():
        tables = _compare(checkpoints, architecture, held.texts, returned, check)
    measured = figures(tables, [text.category for text in held.texts])
    lost = held.about.past_the_model
    data_sent = {"name": held.about.name, "identity": sent, "cut": lost.texts, "cut_tokens": lost.tokens}
    source_figures = before.figures.as_dict() if before else None
    report = ServeCheckReport.model_validate(
        {
            "candidate": names[0], "server": about, "data": data_sent, "top_k": top_k, "figures": measured,
            "verdict": verdict(measured, exact=exact, source_figures=source_figures),
            "version": versions()["moe-quantizers"],
        }
        | ({"source": names[1]} if origin else {})
        | ({"source_check": before.verdict.as_dict()} if before else {})
    )  # fmt: skip
    write_json(path, report.as_dict())
    return ServeCheck(report, path)


def _argument(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    try:
        if key and equals:
            return key.strip().replace("-", "_"), parse_value(value)
    except Refused as refused:
        raise InputError(f"--engine {text}", refused.problem, refused.remedy) from None
    raise InputError(f"--engine {text}", "is not key=value", "write it as --engine dtype=float32")


def _source(candidate: Checkpoint, given: str | None) -> Checkpoint | None:
    """The source of a checkpoint: the one given, or the one that its report.json names; None if it has no report."""
    if given is None and not read_record(candidate.folder):
        print(
            f"{candidate.name}: no {REPORT} names a source, and none is given with --source; it is compared by itself",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        return None
    if given is not None:
        refuse_incomplete(Path(given))
    return source_of(candidate.folder, given, None)


def _name(checkpoint: Checkpoint) -> str:
    return checkpoint.name if is_hub_id(checkpoint.name) else checkpoint.folder.resolve().name


def _output(given: str | Path | None, candidate: Path) -> Path:
    """The file to write: serve-check.json beside report.json, or in the current folder, if none is given."""
    if given is None:
        return candidate / SERVE_CHECK if (candidate / REPORT).is_file() else Path(SERVE_CHECK)
    return Path(given)


def _record(path: Path, names: Sequence[dict[str, str]], top_k: int) -> ServeCheckReport:
    """The record of the source on the same server; an InputError if it is another one's, or of a server that is off."""
    try:
        record = ServeCheckReport.model_validate(read_json(path))
    except ValidationError as failure:
        place = ".".join(map(str, failure.errors()[0]["loc"]))
        raise InputError(
            f"{path}: {place}",
            "is not what `quantize serve-check` writes",
            "make it with `quantize serve-check SOURCE`",
        ) from None
    if len(names) < 2:
        raise InputError(path, "is the source's, which is not known here", "say where that is with --source")
    if record.candidate.digest != names[1]["digest"]:
        raise InputError(
            path,
            f"is of {record.candidate.model}, which is not the source {names[1]['model']}",
            f"serve that, and make it with `quantize serve-check {names[1]['model']} … --output {path}`",
        )
    if record.figures.top1 < UNLIKE:
        raise InputError(
            path,
            f"the source's server agreed with it at {record.figures.top1:.1%} of the positions, so it served "
            "something else, and no limit follows",
            "serve the source, and check it again",
        )
    if record.top_k != top_k:
        raise InputError(path, f"was made with --top-k {record.top_k}", "give the same here")
    return record


def _texts(samples: Any, source: Checkpoint, facts: Architecture, longest: int | None, trust_remote_code: bool) -> Any:
    """The held-out texts, cut where model or server ends; one token of the server's is for its answer."""
    limits = [limit for limit in (facts.positions, longest and longest - 1) if limit]
    limited = facts.model_copy(update={"positions": min(limits) if limits else None})
    if limited.positions is not None and limited.positions < 2:
        raise InputError(
            "", f"max_model_len is {longest}, too short for any text", "serve it with a larger --max-model-len"
        )
    held = held_out(samples, source, limited, trust_remote_code)
    if lost := held.about.past_the_model.texts:
        print(
            f"{lost} of {len(held.texts)} texts are longer than the {limited.positions:,} tokens that "
            f"{'the model' if limited.positions == facts.positions else 'the server'} takes, and are cut there",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return held


def _ask(server: Server, texts: Sequence[Text], top_k: int, vocabulary: int) -> list[Returned]:
    answers = []
    with progress("asking the server", len(texts), unit="text") as step:
        for number, text in enumerate(texts, 1):
            size = f"{len(text.tokens):,} tokens"
            which = f"text {number} of {len(texts)} ({size})"
            answers.append(score(server, text.tokens.tolist(), top_k, vocabulary, which))
            step(size)
    return answers


def _compare(
    checkpoints: Sequence[Checkpoint],
    facts: Architecture,
    texts: Sequence[Text],
    returned: Sequence[Returned],
    check: Callable[[], None],
) -> list[np.ndarray]:
    """`served.compare_text` of every text, with the candidate and, if there is one, its source."""
    use_threads(facts)
    named = [published_names(checkpoint, facts) for checkpoint in reversed(checkpoints)]  # the source first
    lengths, streams = [len(text.tokens) for text in texts], []
    with tempfile.TemporaryDirectory() as folder:
        for number, checkpoint in enumerate(named):
            outside = load_tensors(checkpoint, outside_names(checkpoint, facts))
            own = outside, facts, torch.device("cpu"), torch.float32
            # A server caches in FP8 by itself where a checkpoint has scales for it.
            model = CachedModel(*own, ones=False) if has_kv_scales(outside.config) else StreamedModel(*own)
            stream = ActivationStream(checkpoint.name, model, number, lengths, Path(folder), durable=True, check=check)
            streams.append(stream)
        through_layers(streams, named, texts, Path(folder), check)
        streams.reverse()
        heads = [(stream.model, stream.model.head()) for stream in streams]
        states, tables = [stream.states(facts.num_layers) for stream in streams], []
        with progress("comparing", len(texts), unit="text") as step:
            for number, (text, answer) in enumerate(zip(texts, returned, strict=True)):
                check()
                rows = [model_states[number] for model_states in states]
                tables.append(compare_text(heads, text.tokens, rows, answer))
                step(f"{len(text.tokens):,} tokens")
    return tables
