"""`quantize plan`: what a run would do and need, and whether its output fits."""

from __future__ import annotations

import gc
from typing import Any

from quantizers.hooks import hooks
from quantizers.system.formatting import gib, size, text_table
from quantizers.system.progress import duration

from . import common
from .adapter import Call, command

WAYS = {
    "cached": "on the disk, or in the Hub's cache",
    "streamed": "--stream, smallest --window",
    "published": "the same, --publish-as-you-go --remove-uploaded",
}


@command("quantizers.commands.plan:plan")
def plan(call: Call) -> None:
    """Show what a run would do and need, and where its output fits.

    Lists the action for every kind of tensor, disk, memory and time; with --vram, whether the output fits on GPUs.
    Reads headers only: of a folder, of the Hub's cache, or of the Hub itself; models with a
    built-in architecture spec need no network.

    Times are estimated from nominal rates; --nodes and --gpus divide them among processes.

    Example: quantize plan minimax-m2.1-fp8-int4 --vram 2x96GiB --vram 4x24GiB --context 196608
    """
    gc.disable()  # a plan is many objects without cycles; looking for them takes a tenth longer for a large model
    try:
        figures: dict[str, Any] = call().figures
    finally:
        gc.enable()
    serving = weights_table if "weights" in figures else fit_table
    table = serving if call.options["vram"] else tensors_table if call.options["tensors"] else plan_table
    common.emit(figures, call.as_json, f"planned from {figures['basis']}\n\n{table(figures)}")


def plan_table(numbers: dict[str, Any]) -> str:
    """Every kind of tensor, the output's size, and what a run needs."""
    rows = [
        (row["kind"], row["action"], f"{row['tensors']:,}", size(row["bytes_before"]), size(row["bytes_after"]))
        for row in numbers["kinds"]
    ]
    needs = numbers["needs"]
    made = f"converted to {numbers['converted_to']}" if "converted_to" in numbers else "quantized"
    schemes = numbers.get("schemes", {})
    converted = ""
    budgeted = []
    if numbers.get("attention"):
        of_experts = numbers["quantized_matrices"] if "converted_to" in numbers else 0
        matrices = f"{numbers['actions']['convert']['tensors'] - of_experts:,} other matrices"
        converted = f", {matrices} are converted ({numbers['attention']})"
    if "planned" in schemes:  # before a run has chosen within a budget
        planned, most = schemes["planned"], size(needs["output"])
        budgeted = [f"these are the sizes of {planned} in every layer: a run chooses, and may fill {most}"]
    lines = [
        text_table(("tensors (* = a number)", "action", "number", "before", "after"), rows),
        "",
        f"{numbers['layers']} layers, {dense_words(numbers)}{numbers['experts_per_layer']} experts each: "
        f"{numbers['quantized_matrices']:,} expert matrices {made}, "
        f"{numbers['kept_attention_tensors']:,} attention tensors keep their bytes{converted}",
        f"output {size(numbers['output_bytes'])} ({numbers['output_bytes']:,} bytes of shards and index) in "
        f"{len(numbers['shards'])} shards, {size(numbers['expert_bytes'])} of it experts; "
        f"source {size(numbers['source_bytes'])}",
        *budgeted,
        *remarks(numbers),
        "",
        *(_scheme_lines(schemes) if schemes else []),
        *_needs_lines(needs),
        "",
        *_source_lines(numbers["source_ways"]),
        *_time_lines(needs),
        "assumed:",
        *(f"  {line}" for line in needs["assumptions"]),
    ]
    if memory := numbers.get("device_memory"):
        lines.append(
            f"--device-memory: {gib(memory['peak'])} at most, with the Hessians of {memory['resident']} of "
            f"{memory['units']} batches of {memory['unit']} experts at a time ({memory['sweeps']} "
            f"sweep{'s' if memory['sweeps'] > 1 else ''} over a layer's inputs)"
        )
    return "\n".join(lines)


def dense_words(numbers: dict[str, Any]) -> str:
    """The number of layers without experts, if any."""
    dense = len(numbers["dense_layers"])
    return f"{dense} of them without experts, the others with " if dense else ""


def remarks(numbers: dict[str, Any]) -> list[str]:
    """A line about each special thing: files left behind, MTP layers, what servers do not take, what is not known."""
    lines = [numbers[key] for key in ("origin", "left_behind") if numbers.get(key)]
    if "mtp" in numbers:
        layers = numbers["mtp"]["layers"]
        which = f"layer{'s' if layers[1:] else ''} {', '.join(map(str, layers))}"
        passed = size(numbers["mtp"]["bytes"])
        lines.append(f"{which}, for multi-token prediction (MTP), passed through with their experts: {passed}")
    for remarks_on in hooks("plan_remarks"):
        lines += remarks_on(numbers)
    lines += numbers.get("limits", [])
    if numbers.get("cards_unknown"):
        lines.append(f"of GPUs to serve it, only the weights can be counted: {numbers['cards_unknown']}")
    return lines


def _scheme_lines(schemes: dict[str, Any]) -> list[str]:
    """The choice within a budget once it is made, until then the candidates."""
    from quantizers.eval.report.schema import PlannedSchemes, Schemes
    from quantizers.eval.report.summary import candidate_lines, choice_lines, layer_rows

    if "layers" in schemes:
        choice = Schemes.model_validate(schemes)
        return [*candidate_lines(choice), "", *choice_lines(choice), "", text_table(*layer_rows(choice)), ""]
    return [
        *candidate_lines(PlannedSchemes.model_validate(schemes)),
        "the run measures, then chooses for each layer",
        "",
    ]


def _needs_lines(needs: dict[str, Any]) -> list[str]:
    """Disk and memory of a run."""
    rows = []
    for device in ("CPU", "GPU"):
        states = "?" if needs["states"] is None else size(needs["states"][device])
        least, most = needs["memory"][device]
        rows.append((device, size(needs["output"]), states, f"{size(least)} to {size(most)}"))
    if needs["tokens"] == 0:
        return [
            f"a run needs about {size(needs['output'])} of disk for the output, {size(needs['memory']['GPU'][0])} of a "
            f"GPU's memory if it has one, and {size(needs['host'])} of host memory",
        ]
    tokens = "calibration set of unknown size" if needs["tokens"] is None else f"{needs['tokens']:,} tokens at most"
    if needs["held_out"] != 0:
        number = "an unknown number of" if needs["held_out"] is None else f"{needs['held_out']:,}"
        tokens += f" and {number} evaluation tokens"
    for_each = f" for each of {needs['processes']:,} processes" if needs["processes"] > 1 else ""
    return [
        f"a run with its {tokens} needs about",
        text_table(("on a", "disk for the output", "activations", "memory of the device"), rows),
        f"and {size(needs['host'])} of host memory{for_each}. Activations are kept in host memory if they fit, else on "
        "disk.",
    ]


def _source_lines(ways: list[dict[str, Any]]) -> list[str]:
    """Disk and traffic of each way for the source to get to the run."""
    keys = ("source", "output", "download", "upload")
    rows = [(WAYS[way["name"]], *("?" if way[key] is None else size(way[key]) for key in keys)) for way in ways]
    lines = [text_table(("source", "on the disk", "output on the disk", "from the Hub", "to the Hub"), rows)]
    if any(way["source"] is None for way in ways):
        lines.append("?: as shards and layers lie; --hub reads the headers")
    return [*lines, ""]


def _time_lines(needs: dict[str, Any]) -> list[str]:
    """The estimated time on each device, of one process, and of several if they were asked for."""
    if needs["seconds"] is None:
        return ["time: unknown before the sets are read, and for experts.engine: llmcompressor"]
    several, header = needs["several"], ["on", "time, estimated", "layers", "verification"]
    header += [f"by {needs['processes']:,} processes"] if several else []
    rows = []
    for name, seconds in needs["seconds"].items():
        rows.append([name, *(_about(seconds[stage]) for stage in ("all", "layers", "verification"))])
        if several:
            rows[-1].append(_about(several[name]["all"]) if name in several else "")
    lines = [text_table(header, rows)]
    if needs["measuring"] is not None:
        lines.append(f"besides, to measure for the budget: {_about(needs['measuring'])} to read the source once more")
    return lines


def _about(seconds: float) -> str:
    return "under a minute" if seconds < 60 else duration(seconds)


def tensors_table(numbers: dict[str, Any]) -> str:
    """One line for every source tensor."""
    rows = []
    for row in numbers["tensors"]:
        module = row["source"].rpartition(".")[0]
        outputs = (
            f"{'same name,' if name == row['source'] else name.removeprefix(module)} {dtype} {shape}"
            for name, (dtype, shape) in row["outputs"].items()
        )
        rows.append((row["source"], f"{row['dtype']} {row['shape']}", row["action"], "; ".join(outputs)))
    return text_table(("tensor", "source", "action", "output"), rows)


def fit_table(result: dict[str, Any]) -> str:
    """One row for each set of GPUs."""
    rows = [
        (
            row["cards"],
            _split(row),
            *(gib(row[key]) for key in ("budget", "weights", "kv_cache", "activations", "runtime", "left")),
            f"{row['longest']:,}",
            "fits" if row["fits"] else "does NOT fit",
        )
        for row in result["fits"]
    ]
    header = ("GPUs", "split", "usable", "weights", "KV cache", "activations", "runtime", "left", "longest", "")
    first, counted = result["fits"][0], []
    if "counted" in result:
        whole = size(result["counted"])
        counted = [f"weights: all of the budget, {whole}; a run may choose less, which --output DIR counts after it"]
    lines = [
        f"memory of the fullest GPU at {first['context']:,} tokens, KV cache in "
        f"{'16 bit' if first['kv'] == 'auto' else 'FP8'} ({result['kv_bytes_per_token']:,} bytes a token "
        f"{'over all GPUs' if result['kv_divided'] else 'on every GPU'}); longest: the context that fits",
        text_table(header, rows),
        *counted,
        *remarks(result),
        *result["notes"],
        "",
        *(_fit_line(row, result["longest"]) for row in result["fits"]),
        "",
        *(
            f"to serve it on {row['cards']}, OUT being its folder (not tried):\n{row['command']}\n"
            for row in result["fits"]
            if row["command"]
        ),
        *(line for row in result["fits"] for line in _ways_lines(row)),
        *(line for row in result.get("host", ()) for line in _host_lines(row)),
        "assumed:",
        *(f"  {line}" for line in result["assumptions"]),
    ]
    return "\n".join(lines)


def _split(row: dict[str, Any]) -> str:
    """Format the parallelism of a row, such as `TP 4 x PP 2`."""
    stages = row["pipeline_parallel"]
    return f"TP {row['tensor_parallel']}{f' x PP {stages}' if stages > 1 else ''}"


def _ways_lines(row: dict[str, Any]) -> list[str]:
    """List the schemes, the same in every layer, that fit on a set of GPUs, and the largest scheme and budget."""
    header = ("experts", "weights", "split", "16-bit KV", "FP8 KV", "fits with", "tiny KL")
    names = {"auto": "16 bit", "fp8": "FP8"}
    ways = row["ways"]
    rows = []
    for way in (way for way in ways if max(way["longest"].values())):
        longest = (f"{tokens:,}" for tokens in way["longest"].values())
        cache = next((name for kv, name in names.items() if way["budget"][kv]), "-")
        kl = f"{way['tiny_kl']:.4f}" if way["tiny_kl"] else ""
        rows.append((way["scheme"], size(way["bytes"]), _split(way), *longest, cache, kl))
    lines, staged = [], False
    for kv, name in names.items():
        if fitting := [way for way in ways if way["budget"][kv]]:
            mixed = [way for way in fitting if way["mixture"][kv] and way["budget"][kv] < ways[-1]["output"]]
            best = max(mixed, key=lambda way: int(way["budget"][kv]), default=None)
            budget = f", or experts.budget: {best['mixture'][kv]}" if best else ""
            lines.append(f"largest with a KV cache in {name}: {fitting[-1]['scheme']}{budget}")
            staged |= best is not None and best["pipeline_parallel"] > 1
            if fitting[-1] is ways[-1]:
                break
    if staged:
        lines.append("budgets fit if pipeline stages get equal parts: see --output after a run")
    return [
        f"what {row['cards']} take at {row['context']:,} tokens, and the longest context by KV cache:",
        *([text_table(header, rows)] if rows else []),
        *(lines or [no_scheme(row)]),
        "",
    ]


def no_scheme(row: dict[str, Any]) -> str:
    """That no scheme fits at the context asked for, and the longest context that one takes."""
    contexts = [(longest, kv, way["scheme"]) for way in row["ways"] for kv, longest in way["longest"].items()]
    longest, kv, scheme = max(contexts, key=lambda context: context[0], default=(0, "", ""))
    if not longest:
        return "no scheme fits, whatever the context: the weights alone are too large"
    return f"no scheme fits; {scheme} does with --context {longest}{' --kv fp8' if kv == 'fp8' else ''}"


def _host_lines(row: dict[str, Any]) -> list[str]:
    """The ways with experts in host memory, and the command of each that is possible."""
    if not row["ways"]:
        return [f"{row['cards']}: no experts need lie in host memory", ""]
    rows = [
        (way["name"], size(way["ram"]), f"{way['on_gpu']:.0%}", way["problem"] or f"possible {way['needs']}".rstrip())
        for way in row["ways"]
    ]
    header = ("experts in host memory", "they take", "on GPU", "by arithmetic, not tried")
    commands = [f"  {way['command']}" for way in row["ways"] if way["command"]]
    return [f"with experts in host memory, {row['cards']}:", text_table(header, rows), *commands, ""]


def weights_table(result: dict[str, Any]) -> str:
    """One row for each set of GPUs, where only the weights are known."""
    rows = [
        (row["cards"], *(gib(row[key]) for key in ("usable", "weights", "left")), "" if row["left"] > 0 else "too few")
        for row in result["weights"]
    ]
    header = ("GPUs together", "usable", "weights", "left at most, for KV cache, activations and runtime", "")
    return "\n".join([text_table(header, rows), *remarks(result)])


def _fit_line(row: dict[str, Any], limit: int) -> str:
    """Under the table, for each set of GPUs: the longest context, or what would make it fit."""
    if row["fits"]:
        end = ", the model's longest" if row["longest"] == limit else ""
        return f"{row['cards']} fits with up to {row['longest']:,} tokens of context{end}"
    if not row["to_fit"]:
        return f"{row['cards']}: neither a shorter context, nor fewer bits, nor more such GPUs would make it fit"
    return f"{row['cards']}, to fit: {'; or '.join(remedy['say'] for remedy in row['to_fit'])}"
