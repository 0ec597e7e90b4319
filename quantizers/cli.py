"""The commands: parse, call, print, exit code. No logic, and no heavy import before it is needed."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import InputError, QuantizeError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="FP8 mixture-of-experts checkpoints to FP8 attention + INT4 experts, stitched byte for byte and proven.",
)
GATE_FAILED = 3

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="a recipe's path, or the name of a shipped one")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="one JSON object on standard output, all else on standard error")
]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto: the first GPU where there is one")]
DebugOption = Annotated[bool, typer.Option("--debug", help="a traceback with every error")]


def _quiet() -> None:
    """Keep libraries' chatter out of our output; warnings and errors still come through."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _emit(data: dict[str, Any], as_json: bool, text: str) -> None:
    if as_json:
        print(json.dumps(data, indent=1, sort_keys=True))
    else:
        print(text)


def _show(data: dict[str, Any], as_json: bool, renderable: Any) -> None:
    from rich.console import Console

    if as_json:
        print(json.dumps(data, indent=1, sort_keys=True))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(renderable)


@app.command()
def run(
    recipe: RecipeArgument,
    output: Annotated[Path, typer.Option(help="folder for the finished checkpoint; new, empty, or an unfinished run")],
    device: DeviceOption = "auto",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="discard what the folder holds of an earlier run, after asking")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Quantize a checkpoint, stitch it, verify and measure it. Goes on by itself where it was cut off.

    Example: quantize run tiny-minimax-m2-fp8-int4 --output out/tiny
    """
    from .session import prepare

    job = prepare(recipe)
    if fresh:
        from .journal import discard

        if output.exists() and not yes and not typer.confirm(f"discard the run in {output}?", err=True):
            raise InputError(f"{output}: left as it is; give --output another folder")
        discard(output)
    from .pipeline import Options
    from .pipeline import run as run_job
    from .session import choose_device, use_threads

    use_threads(job.sizes)
    report = run_job(job, Options(output, choose_device(device)))
    from .tables import run_table

    _emit(report, as_json, run_table(report, output, recipe))
    if not all(gate["passed"] for gate in report["gates"]):
        raise typer.Exit(GATE_FAILED)


@app.command()
def plan(recipe: RecipeArgument, as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Show what a run would do to every kind of tensor, and how large its output is. Reads headers only.

    Example: quantize plan minimax-m2.1-fp8-int4
    """
    from .plan import summary
    from .session import prepare
    from .tables import plan_table

    job = prepare(recipe, offline_facts=True)
    numbers = summary(job.plan, job.sizes) | {"basis": job.basis, "recipe": str(job.path)}
    _emit(numbers, as_json, plan_table(numbers))


@app.command()
def verify(
    candidate: Annotated[Path, typer.Argument(metavar="CANDIDATE", help="a finished checkpoint")],
    source: Annotated[str, typer.Option(help="what it was made from: a folder or Hub id")],
    revision: Annotated[str, typer.Option(help="of the source on the Hub")] = "main",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check a finished checkpoint against its source from the files alone; exit 3 when something differs.

    Example: quantize verify out/tiny --source models/tiny-minimax-m2
    """
    from stitch.audit import verify as audit_files

    from .checkpoint import open_checkpoint
    from .progress import progress
    from .session import choose_device
    from .tables import audit_table

    opened = open_checkpoint(source, revision)
    with progress("verifying", int(opened.config.get("num_hidden_layers", 1))) as step:
        audit = audit_files(candidate, opened, choose_device(device), step=step)
    _emit(audit.as_dict(), as_json, audit_table(audit.as_dict()))
    if audit.differences:
        raise typer.Exit(GATE_FAILED)


@app.command(name="eval")
def evaluate(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="a folder or Hub id")],
    candidate: Annotated[
        list[str], typer.Argument(metavar="CANDIDATE…", help="one or more checkpoints of the same model")
    ],
    data: Annotated[str, typer.Option(help="a held-out set: a file, or the name of a shipped one")],
    device: DeviceOption = "auto",
    work: Annotated[
        Path | None, typer.Option(help="where hidden states are kept meanwhile; a temporary folder by default")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Perplexity, bits per byte, KL, top-1 and routing of candidates against a source, layer by layer.

    Example: quantize eval models/tiny-minimax-m2 out/tiny --data held-out
    """
    import tempfile

    from .checkpoint import open_checkpoint
    from .proof import measure
    from .session import choose_device
    from .shipped import find
    from .tables import eval_table

    data_set = find(data, "calibration")
    if not data_set.is_file():
        raise InputError(f"{data}: no such set; give a file, or the name of a shipped set such as held-out")
    opened = [open_checkpoint(name) for name in (source, *candidate)]
    with tempfile.TemporaryDirectory(dir=work) as folder:
        results = measure(opened[0], opened[1:], data_set, choose_device(device), Path(folder) / "eval")
    report = {"source": source, "candidates": [{"model": c} | r for c, r in zip(candidate, results, strict=True)]}
    _emit(report, as_json, eval_table(report))


@app.command()
def calibration(
    words: Annotated[
        list[str],
        typer.Argument(metavar="SET | lock SET | diff SET SET", help="a set's file, or the name of a shipped one"),
    ],
    tokenizer: Annotated[str | None, typer.Option(help="a model's folder or Hub id; the tiny model by default")] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="a set that shares no text with it; held-out.yaml beside it by default")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="print so many rendered samples, evenly spread")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="sources loaded at the same time")] = 8,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check what a calibration set holds; exit 3 when a language is missing or texts are duplicates.

    `lock SET` writes the exact version of every source beside the set; `diff SET SET` compares two.

    Example: quantize calibration embedded
    """
    from .commands import check_calibration, diff_calibration, lock_calibration
    from .shipped import shipped

    verb, *sets = words
    if verb == "lock" and len(sets) == 1:
        report, shown = lock_calibration(sets[0], workers)
    elif verb == "diff" and len(sets) == 2:
        report, shown = diff_calibration(*sets)
    elif not sets:
        model = tokenizer or str(shipped("models") / "tiny-minimax-m2")
        report, shown = check_calibration(verb, model, held_out, show, workers)
    else:
        raise InputError(f"calibration {' '.join(words)}: give SET, `lock SET`, or `diff SET SET`")
    _show(report, as_json, shown)
    if not report.get("ok", True):
        raise typer.Exit(GATE_FAILED)


@app.command()
def recipes(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List the shipped recipes.

    Example: quantize recipes
    """
    from .recipe import read_recipe
    from .shipped import shipped

    rows = []
    for path in sorted(shipped("recipes").glob("*.yaml")):
        recipe, _ = read_recipe(str(path))
        experts = recipe.experts
        rows.append(
            {
                "name": path.stem,
                "source": recipe.source.model,
                "calibration": Path(recipe.calibration).stem,
                "experts": f"INT{experts.bits}, groups of {experts.group_size}, {experts.engine}",
            }
        )
    from .tables import plain

    _emit({"recipes": rows}, as_json, plain(list(rows[0]), [list(row.values()) for row in rows]))


bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure methods and machines.")
app.add_typer(bench, name="bench")


@bench.command(name="methods")
def bench_methods(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="source, calibration and held-out set")] = (
        "tiny-minimax-m2-fp8-int4"
    ),
    repeats: Annotated[int, typer.Option(min=1, help="runs of each method; seconds are the median")] = 1,
    tokens: Annotated[
        int, typer.Option(min=1, help="of the calibration set, about, taken evenly")
    ] = 16384,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Nearest, llm-compressor's AWQ and ours on the same tokens in one process: KL, top-1, routing, seconds.

    Example: quantize bench methods tiny-minimax-m2-fp8-int4
    """
    from .session import choose_device, prepare, use_threads

    job = prepare(recipe)
    use_threads(job.sizes)
    if job.recipe.verify is None or job.recipe.verify.perplexity is None:
        raise InputError(f"{recipe}: verify.perplexity.data is missing; the methods are measured on it")
    from .bench import compare
    from .tables import methods_table

    result = compare(job, choose_device(device), repeats, tokens)
    _emit(result, as_json, methods_table(result))


def main() -> None:
    """Entry point: every error of ours is one line and an exit code; a traceback only with --debug."""
    _quiet()
    try:
        sys.exit(app(standalone_mode=False) or 0)  # an Exit comes back as its code
    except typer.Abort:
        sys.exit(130)
    except QuantizeError as failure:
        if "--debug" in sys.argv:
            traceback.print_exc()
        print(f"quantize: {failure}", file=sys.stderr)
        sys.exit(failure.exit_code)
    except Exception as failure:
        if type(failure).__module__.startswith("click") or hasattr(failure, "format_message"):
            print(f"quantize: {failure.format_message()}", file=sys.stderr)  # type: ignore[attr-defined]
            sys.exit(2)
        if "--debug" in sys.argv:
            traceback.print_exc()
        else:
            first = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
            print(f"quantize: {type(failure).__name__}: {first} (a traceback with --debug)", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
