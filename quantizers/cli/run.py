"""`quantize run`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from quantizers.hooks import hooks
from quantizers.system.errors import InputError
from quantizers.system.formatting import collapse_lines, short_path, size
from quantizers.system.output_files import CALIBRATION_PICTURE, CARD, COVERAGE_PICTURE, PAGE, REPORT
from quantizers.system.progress import duration
from quantizers.system.shipped import shipped_model

from . import common
from .adapter import Call, command

if TYPE_CHECKING:
    from quantizers.commands.run import FinishedCheckpoint
    from quantizers.eval.report.schema import ConversionReport, RunReport


@command("quantizers.commands.run:run", before={"folder": "output", "yes": "device_memory"})
def run(
    call: Call,
    folder: Annotated[Path | None, Argument(metavar="OUTPUT", help="the same as --output")] = None,
    yes: Annotated[bool, Option("--yes", help="do not ask")] = False,
) -> None:
    """Quantize a checkpoint, stitch it, verify and measure it. Resumes automatically if interrupted.

    torchrun --nproc-per-node N -m quantizers run … uses N processes, on one or several machines, with the same output.

    Example: quantize run tiny-minimax-m2-fp8-int4 --output out/tiny
    """
    given: dict[str, Any] = call.options
    output: Path | None = given["output"]
    if folder is not None and output is not None and folder.absolute() != output.absolute():
        raise InputError("", f"two outputs are given, {folder} and --output {output}", "leave one out")
    output = output or folder
    discards = given["fresh"] and call.dist.is_main and output is not None and output.exists()
    if discards and not yes and not common.asked(f"discard the run in {output}?", "--fresh"):
        raise InputError(output, "left as it is", "choose another --output")
    made: FinishedCheckpoint = call(output=output)
    if not call.dist.is_main:
        return
    without = [f"calibration.without=[{', '.join(given['without'])}]"] if given["without"] else []
    changed = {
        "--source": given["source"] and [given["source"]],
        "--calibration": given["calibration"] and [given["calibration"]],
        "--set": [*(given["settings"] or ()), *without],
    }
    words = [str(word) for option, values in changed.items() for value in values or () for word in (option, value)]
    recipe, table = join([given["recipe"], *words]), ""
    if not call.as_json:
        from quantizers.eval.report.schema import ConversionReport, RunReport
        from quantizers.pipeline.report_files import parsed

        report = parsed(made.report, made.folder / REPORT)
        if isinstance(report, ConversionReport):
            table = conversion_table(report, made.folder, made.source, recipe, stream=given["stream"])
        else:
            assert isinstance(report, RunReport), "a stitch is another command's"
            table = run_table(report, made.folder, made.source, recipe, stream=given["stream"])
    common.emit(made.report, call.as_json, table, passed=made.passed)


def run_table(report: RunReport, output: Path, source: str, recipe: str, *, stream: bool = False) -> str:
    """The output of `quantize run`; `source` is a Hub id, with `stream` still there, or a folder.

    `recipe` is as the user typed it, with the options that change it.
    """
    from quantizers.eval.coverage.summary import gate_table
    from quantizers.eval.fidelity.figures import Fidelity
    from quantizers.eval.fidelity.tables import (
        fidelity_table,
        is_served,
        past_the_model,
        positions_table,
        served_table,
        worst_table,
    )
    from quantizers.eval.report.summary import scheme_lines, under_routed_line

    measured = report if isinstance(report, Fidelity) else None
    lines = [f"{output} was finished before; nothing was touched"] if report.already_done else []
    lines += ["", gate_table(report.gates), ""]
    if measured:
        lines += [fidelity_table([("output", measured)]), "", worst_table([("output", measured)]), ""]
        if len(measured.positions) > 1:
            lines += [positions_table(measured), ""]
        if is_served(measured):
            lines += [served_table([("output", measured)]), ""]
    plan = report.plan
    coverage = report.coverage
    apart = max(layer.proof for layer in report.layers)
    lines += [
        f"proof     every layer gives what transformers' own call of it gives, to {apart:.1e} of what it adds",
        f"audit     {common.accounted(report.audit)}",
        *(f"          {line}" for line in collapse_lines(report.audit.differences)[:10]),
        f"coverage  routed tokens per expert: min {coverage.min:,}, median {coverage.median:,.0f}; "
        f"{coverage.uncovered} of {coverage.pairs:,} below {coverage.min_routed_tokens}",
        *(f"held out  {line}" for line in (past_the_model(measured.evaluated_on) if measured else [])),
        f"size      {size(plan.source_bytes)} -> {size(plan.output_bytes)}",
        *(f"{'schemes' if n == 0 else '':10}{line}" for n, line in enumerate(scheme_lines(report))),
        _time_line(report),
    ]
    if under_routed := under_routed_line(report):
        lines.append(f"shares    {under_routed}")
    if fallbacks := sum(len(layer.fallbacks) for layer in report.layers):
        lines.append(f"fallbacks {fallbacks}, listed in report.json under layers")
    return "\n".join([*lines, *_where(report, output), "", *_what_next(report, output, source, recipe, stream)]).strip(
        "\n"
    )


def _time_line(report: RunReport | ConversionReport) -> str:
    """The line about time and memory; a resumed run's layers took the time of several commands."""
    resumed = report.seconds.layers > report.seconds.this_process
    own = f"{duration(report.seconds.this_process)}{' in this command' if resumed else ''}"
    layers = f"{duration(report.seconds.layers)} for {'all' if resumed else 'the'} layers"
    return f"time      {own}, {'' if resumed else 'of it '}{layers}; peak memory {size(report.peak_memory_bytes)}"


def conversion_table(report: ConversionReport, output: Path, source: str, recipe: str, *, stream: bool = False) -> str:
    """The output of `quantize run` with a recipe that converts; see `run_table`."""
    from quantizers.eval.coverage.summary import gate_table
    from quantizers.eval.report.summary import conversion_line

    plan = report.plan
    lines = [f"{output} was finished before; nothing was touched"] if report.already_done else []
    lines += [
        "",
        gate_table(report.gates),
        "",
        f"proof     {conversion_line(report)}",
        f"audit     {common.accounted(report.audit)}",
        *(f"          {line}" for line in collapse_lines(report.audit.differences)[:10]),
        f"size      {size(plan.source_bytes)} -> {size(plan.output_bytes)}",
        _time_line(report),
    ]
    return "\n".join([*lines, *_where(report, output), "", *_what_next(report, output, source, recipe, stream)]).strip(
        "\n"
    )


def _where(report: RunReport | ConversionReport, output: Path) -> list[str]:
    """The paths of the output, the report, the model card and the pictures."""
    folder = Path(short_path(output))
    files = report.files
    published = report.published
    rows = [("report", [PAGE, REPORT]), ("card", [CARD]), ("pictures", [CALIBRATION_PICTURE, COVERAGE_PICTURE])]
    named = [(word, [str(folder / name) for name in names if name in (*files, REPORT)]) for word, names in rows]
    there = [f"on Hub    {published.repo}"] if published else []
    return [f"output    {folder}", *(f"{word:<10}{', '.join(paths)}" for word, paths in named if paths), *there]


def _what_next(report: RunReport | ConversionReport, output: Path, source: str, recipe: str, stream: bool) -> list[str]:
    """Suggested next commands; after a failed gate what to change, and not how to serve the output."""
    from quantizers.recipe.portable import is_hub_id

    model = report.source.model  # by which commands find it on the Hub or among the shipped models
    kept = shipped_model(model)
    ours = kept is not None and Path(source).resolve() == kept.resolve()
    is_named = ours or (is_hub_id(model) and model == source)  # so that the report is enough
    folder, source = quote(short_path(output)), quote(model if ours else short_path(source))
    there = " --stream" if stream else ""
    published = report.published
    repo, removed = (published.repo, published.removed) if published else (folder, None)
    back = [f"hf download {repo} --local-dir {folder}"] if removed else []
    verify = f"quantize verify {folder}" + ("" if is_named else f" --source {source}") + there
    remote = bool(back) and stream and all(gate.passed for gate in report.gates)  # this needs no shards here
    evaluate = f"quantize eval {source} {repo if remote else folder} --data held-out{there}"
    commands = [evaluate, *back, verify] if remote else [*back, verify, evaluate]
    advice: dict[str, list[str]] = {}  # and the gates that it is for
    for gate in report.gates:
        if not gate.passed:
            text = _advice(gate.name, report.settings.recipe["experts"], recipe, verify)
            advice.setdefault(text, []).append(gate.name)
    if not advice:
        for next_commands in hooks("next_commands"):
            commands += next_commands(report, folder)
    todo = "\n       ".join(f"{', '.join(names)}: {text}" for text, names in advice.items())
    return [*([f"to do: {todo}", ""] if advice else []), "next: " + "\n      ".join(commands)]


def _advice(gate: str, experts: dict[str, Any], recipe: str, verify: str) -> str:
    """Suggest a remedy for a failed gate; `verify` is the command that verifies the output."""
    kind, _, category = gate.partition(" ")
    if kind in ("audit", "consumers", "conversion"):
        return f"`{verify}` lists everything; make it again with --fresh, and report it if it comes back"
    if kind in ("coverage", "entropy"):
        texts = f"of {category} " if category else ""
        return (
            f"`quantize coverage {recipe}` shows which experts get few tokens; add samples {texts}to the calibration "
            "set, of fields and languages that it lacks"
        )
    return f"change the recipe: {' or '.join(closer(experts))}"


def closer(experts: dict[str, Any]) -> list[str]:
    """Changes of a recipe's experts that bring the output closer to its source, the cheapest first."""
    if experts.get("budget") or experts.get("bits_per_weight"):
        key = "budget" if experts.get("budget") else "bits_per_weight"
        return [f"a larger experts.{key}", "more calibration tokens"]
    bits = experts.get("bits", 8)
    steps = [
        ("experts.rounding: gptq", experts.get("rounding") == "nearest"),
        ("experts.awq: {grid: 20}", experts.get("awq") is False),
        ("experts.group_size: 32", experts.get("group_size", 0) > 32),
        ("experts.scales_sign: both", experts.get("scales_sign") == "positive"),
        ("more calibration tokens", True),
        ("experts.budget, which gives some layers 8 bits", bits == 4),
        ("experts.bits: 8 instead of experts.format", "format" in experts),
        (f"experts.bits: {4 if bits < 4 else 8}", bits < 8),
    ]
    return [step for step, helps in steps if helps]
