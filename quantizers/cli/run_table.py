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
    """The output of `quantize run`; `source` is a Hub id or a folder, `recipe` as the user typed it."""
    lines = [f"{output} was finished before; nothing was touched"] if report.get("already_done") else []
    lines += ["", gate_table(report["gates"]), ""]
    if "kl" in report:
        lines += [fidelity_table([("output", report)]), ""]
        if len(report.get("positions", ())) > 1:
            lines += [positions_table(report), ""]
    plan, seconds, coverage = report["plan"], report["seconds"], report["coverage"]
    apart = max(layer["proof"] for layer in report["layers"])
    lines += [
        f"proof     every layer gives what transformers' own call of it gives, to {apart:.1e} of what it adds",
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
    if under_routed := under_routed_line(report):
        lines.append(f"shares    {under_routed}")
    if fallbacks := sum(len(layer["fallbacks"]) for layer in report["layers"]):
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
    model = str(report["source"]["model"])  # by which `quantize verify` finds it on the Hub or among the shipped models
    found = model == source if is_hub_id(model) else (shipped("models") / model).is_dir()
    verify = f"quantize verify {folder}" + ("" if found else f" --source {source}")
    commands = [verify, f"quantize eval {source} {folder} --data held-out"]
    advice: dict[str, list[str]] = {}  # and the gates that it is for
    for gate in report["gates"]:
        if not gate["passed"]:
            text = _advice(gate["name"], report["settings"]["recipe"]["experts"], shlex.quote(recipe), verify)
            advice.setdefault(text, []).append(gate["name"])
    if not advice and "vllm" in report["serving"]["servers"]:
        commands.append(f"vllm serve {folder}")
    todo = "\n       ".join(f"{', '.join(names)}: {text}" for text, names in advice.items())
    return [*([f"to do: {todo}", ""] if advice else []), "next: " + "\n      ".join(commands)]


def _advice(gate: str, experts: dict[str, Any], recipe: str, verify: str) -> str:
    """What to do after a failed gate; `verify` is the command that verifies the output."""
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
    """Changes of a recipe's experts that bring the output closer to its source, the cheapest first."""
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
