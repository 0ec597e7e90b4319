"""What `quantize run` prints at its end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from eval.coverage.summary import gate_table
from eval.fidelity.tables import fidelity_table, past_the_model, positions_table
from eval.report.summary import scheme_lines, under_routed_line
from quantizers.recipe.portable import is_hub_id
from quantizers.system.formatting import collapse_lines, short_path, size
from quantizers.system.output_files import CALIBRATION_PICTURE, CARD, COVERAGE_PICTURE, PAGE, REPORT
from quantizers.system.package_data import shipped
from quantizers.system.progress import duration


def run_table(report: dict[str, Any], output: Path, source: str, recipe: str) -> str:
    """What `quantize run` prints at its end.

    Args:
        source: the source's Hub id, or its folder, for the suggested next commands.
        recipe: as the user typed it.
    """
    lines = []
    if report.get("already_done"):
        lines.append(f"{output} was finished before; nothing was touched")
    lines += ["", gate_table(report["gates"]), ""]
    if "kl" in report:
        lines += [fidelity_table([("output", report)]), ""]
        if len(report.get("positions", ())) > 1:
            lines += [positions_table(report), ""]
    plan, seconds = report["plan"], report["seconds"]
    coverage = report["coverage"]
    lines += [
        f"audit     {report['audit']['tensors']:,} source tensors accounted for, "
        f"{report['audit']['kept_tensors']:,} kept byte for byte",
        *(f"          {line}" for line in collapse_lines(report["audit"]["differences"])[:10]),
        f"coverage  routed tokens per expert: min {coverage['min']:,}, median {coverage['median']:,.0f}; "
        f"{coverage['uncovered']} of {coverage['pairs']:,} below {coverage['min_routed_tokens']}",
        *(f"held out  {line}" for line in past_the_model(report)),
        f"size      {size(plan['source_bytes'])} -> {size(plan['output_bytes'])}",
        *(f"{'schemes' if n == 0 else '':10}{line}" for n, line in enumerate(scheme_lines(report))),
        f"time      {duration(seconds['this_process'])}, of it {duration(seconds['layers'])} for the layers; "
        f"peak memory {size(report['peak_memory_bytes'])}",
    ]
    leaning = under_routed_line(report)
    if leaning:
        lines.append(f"shares    {leaning}")
    fallbacks = sum(len(layer["fallbacks"]) for layer in report["layers"])
    if fallbacks:
        lines.append(f"fallbacks {fallbacks}, listed in report.json under layers")
    return "\n".join([*lines, *_where(report, output), "", *_what_next(report, output, source, recipe)]).strip("\n")


def _where(report: dict[str, Any], output: Path) -> list[str]:
    """The paths of the output, the report, the model card and the pictures."""
    folder, files = Path(short_path(output)), report["files"]
    rows = [("report", [PAGE, REPORT]), ("card", [CARD]), ("pictures", [CALIBRATION_PICTURE, COVERAGE_PICTURE])]
    named = [(word, [str(folder / name) for name in names if name in (*files, REPORT)]) for word, names in rows]
    return [f"output    {folder}", *(f"{word:<10}{', '.join(paths)}" for word, paths in named if paths)]


def _what_next(report: dict[str, Any], output: Path, source: str, recipe: str) -> list[str]:
    """Suggested next commands; after a failed gate what to change, and not how to serve the output."""
    folder, source = shlex.quote(short_path(output)), shlex.quote(short_path(source))
    verify = f"quantize verify {folder}" + ("" if _is_found(report, source) else f" --source {source}")
    commands = [verify, f"quantize eval {source} {folder} --data held-out"]
    todo = advice(report, shlex.quote(recipe), verify)
    if not todo and "vllm" in report["serving"]["servers"]:  # a family that vLLM does not know has no such line
        commands.append(f"vllm serve {folder}")
    return [
        *(f"{'' if n else 'to do:':<7}{line}" for n, line in enumerate(todo)),
        *([""] if todo else []),
        *(f"{'' if n else 'next:':<6}{line}" for n, line in enumerate(commands)),
    ]


def _is_found(report: dict[str, Any], source: str) -> bool:
    """Whether `quantize verify` finds the source by its name in the report: on the Hub, or shipped."""
    model = str(report["source"]["model"])
    return model == source if is_hub_id(model) else (shipped("models") / model).is_dir()


def advice(report: dict[str, Any], recipe: str, verify: str) -> list[str]:
    """A line for each failed gate; gates that ask for the same thing share one.

    Args:
        recipe: as the user typed it.
        verify: the command that verifies the output.
    """
    failed = [gate["name"] for gate in report["gates"] if not gate["passed"]]
    experts = report["settings"]["recipe"]["experts"]
    lines = {name: _for(name, experts, recipe, verify) for name in failed}
    together: dict[str, list[str]] = {}
    for name, text in lines.items():
        together.setdefault(text, []).append(name)
    return [f"{', '.join(names)}: {text}" for text, names in together.items()]


def _for(gate: str, experts: dict[str, Any], recipe: str, verify: str) -> str:
    kind, _, category = gate.partition(" ")
    if kind in ("audit", "consumers"):
        return f"`{verify}` lists everything; make it again with --fresh, and report it if it comes back"
    if kind in ("coverage", "entropy"):
        texts = f"of {category} " if category else ""
        return (
            f"`quantize coverage {recipe}` shows which experts get few tokens; add samples {texts}to the calibration "
            "set, of fields and languages that it lacks"
        )
    return f"change the recipe: {' or '.join(closer(experts))}"


def closer(experts: dict[str, Any]) -> list[str]:
    """What brings an output closer to its source, the cheapest first, of what a recipe does not do yet.

    Args:
        experts: the settings of the recipe.
    """
    if experts.get("budget") or experts.get("bits_per_weight"):
        key = "budget" if experts.get("budget") else "bits_per_weight"
        return [f"a larger experts.{key}", "more calibration tokens"]
    steps = [
        ("experts.rounding: gptq", experts.get("rounding") == "nearest"),
        ("experts.awq: {grid: 20}", experts.get("awq") is False),
        ("experts.group_size: 32", experts.get("group_size", 0) > 32),
        ("more calibration tokens", True),
        ("experts.budget, which gives some layers 8 bits", experts.get("bits") == 4),
        ("experts.bits: 8", experts.get("bits") == 4),
    ]
    return [step for step, helps in steps if helps]
