"""What `quantize bench` prints."""

from __future__ import annotations

from typing import Any

from quantizers.system.formatting import gib, size, text_table
from quantizers.system.progress import duration


def compare_table(result: dict[str, Any]) -> str:
    """What `quantize bench compare` prints: one layer and the whole route, ours beside the library's."""
    layer, route = result["layer"], result["route"]
    header = ("", "ours", "llm-compressor", "ratio")

    def row(name: str, ours: float, library: float, form: str = "{:.2f}") -> tuple[str, ...]:
        return name, form.format(ours), form.format(library), f"{library / ours:.1f}x" if ours > 0 else ""

    def sized(name: str, ours: int, library: int) -> tuple[str, ...]:
        return name, size(ours), size(library), f"{library / ours:.1f}x" if ours > 0 else ""

    sizes = layer["sizes"]
    rows = [
        row("one layer, seconds", layer["ours"]["seconds"], layer["library"]["seconds"]),
        row("one layer, CPU seconds", layer["ours"]["cpu_seconds"], layer["library"]["cpu_seconds"]),
        sized("one layer, memory", layer["ours"]["memory_bytes"], layer["library"]["memory_bytes"]),
        row("whole route, seconds", route["ours"]["seconds"], route["library"]["seconds"]),
        row("whole route, CPU seconds", route["ours"]["cpu_seconds"], route["library"]["cpu_seconds"]),
        sized("whole route, memory", route["ours"]["memory_bytes"], route["library"]["memory_bytes"]),
        row("KL, nats", route["ours"]["kl"], route["library"]["kl"], "{:.4f}"),
    ]
    lines = [
        text_table(header, rows),
        "",
        f"layer: {sizes['experts']} experts of {sizes['hidden']} x {sizes['width']}, {layer['tokens']:,} tokens",
        f"route: {route['tokens']:,} tokens; FP8 files in, a mixed checkpoint out; KL is {route['kl_ratio']:.2f} times "
        "the library's",
    ]
    for who in ("ours", "library"):
        steps = ", ".join(f"{step} {seconds:.1f}" for step, seconds in route[who]["steps"].items())
        written = ", ".join(f"{name} {number:,}" for name, number in route[who]["bytes"].items())
        lines += [f"{who}: seconds: {steps}", f"{who}: bytes written: {written}"]
    lines.append(f"medians of {result['repeats']}; {result['machine']['threads']} threads; imports left out")
    return "\n".join(lines)


def layer_table(result: dict[str, Any]) -> str:
    """What `quantize bench layer` prints: the phases of one layer, and the time for the whole model."""
    shares, total = result["shares"], sum(result["seconds"].values())
    rows = [
        (phase, f"{seconds:.2f}", f"{seconds / total:.0%}", f"{shares[phase]:.0%}" if phase in shares else "")
        for phase, seconds in result["seconds"].items()
    ]
    rates, sizes, model = result["rates"], result["sizes"], result["whole_model"]
    return "\n".join(
        [
            text_table(("phase", "seconds", "of all", "of peak"), rows),
            "",
            f"{sizes['experts']} experts of {sizes['hidden']} x {sizes['width']}, {result['tokens']:,} tokens, "
            f"units of {result['unit']} experts, the sums of {result['resident']} at a time, on "
            f"{result['machine']['device']}",
            f"peak: matmul {rates['matmul'] / 1e12:.2f}e12 operations a second, in float32 "
            f"{rates['matmul_float32'] / 1e12:.2f}e12; copy {rates['copy'] / 1e9:.1f} GB/s",
            f"memory {size(result['peak_memory_bytes'])}; read {size(result['source_bytes'])}, written "
            f"{size(result['written_bytes'])}",
            f"all {model['layers']} layers with experts of {result['like']}, this many tokens: "
            f"{duration(model['seconds'])}; {duration(model['seconds_overlapped'])} with reading and writing meanwhile",
        ]
    )


def count_table(result: dict[str, Any]) -> str:
    """What `quantize bench count` prints: a layer's work by phase, then what it takes on each card."""
    cards, memory, held = result["cards"], result["memory"], result["held_out"]
    columns = ("phase", "launches", "read GB", "written GB", "TFLOP bf16", "fp32", "factor", "waits", "to GB",
               "from GB", "peak GiB", *(f"{name} s" for name in cards))  # fmt: skip

    def row(name: str, work: dict[str, Any], seconds: list[float]) -> tuple[str, ...]:
        flops = (work["flops"].get(kind, 0) / 1e12 for kind in ("bfloat16", "float32", "factorization"))
        return (
            name, f"{work['launches']:,}", *(f"{work[key] / 1e9:,.1f}" for key in ("bytes_read", "bytes_written")),
            *(f"{flop:,.1f}" if flop else "" for flop in flops), f"{work['synchronisations']:,}",
            *(f"{work[key] / 1e9:.2f}" for key in ("bytes_to_device", "bytes_to_host")),
            f"{work['peak_bytes'] / 2**30:.1f}", *(f"{second:.2f}" for second in seconds),
        )  # fmt: skip

    rows = [
        row(name, work, [card["phases"][name] for card in cards.values()]) for name, work in result["phases"].items()
    ]
    rows.append(row("layer", result["layer"], [card["layer"] for card in cards.values()]))
    sizes, first = result["sizes"], next(iter(cards.values()))
    small = [name for name, card in cards.items() if not card["fits"]]
    return "\n".join(
        [
            text_table(columns, rows),
            "",
            f"one layer of {result['like']}: {sizes['experts']} experts of {sizes['hidden']} x {sizes['width']}, "
            f"{result['tokens']:,} tokens in {result['sequences']} sequences, {held['texts']} held-out texts of "
            f"{held['tokens']:,} tokens through source and output",
            f"memory: {gib(result['peak_bytes'])} alive at most, {gib(memory['peak'])} set aside; the sums of "
            f"{memory['resident']} of {memory['units']} units of {memory['unit']} experts are held"
            + (f"; that is more than {', '.join(small)} has: give --card" if small else ""),
            f"files, beside the phases: {size(result['source_bytes'])} read and hashed in {first['reading']:.1f} s, "
            f"{size(result['written_bytes'])} hashed, written and read back in {first['writing']:.1f} s",
            f"all {result['layers']} layers with experts: "
            + ", ".join(f"{name} {duration(card['all_layers'])}" for name, card in cards.items()),
            "counted, not measured. Rates:",
            *(f"  {line}" for line in result["assumptions"]),
        ]
    )


def scaling_table(result: dict[str, Any]) -> str:
    """What `quantize bench scaling` prints: a table for each varied size, with the fitted exponents in its last row."""
    parts = []
    for name, part in result["varied"].items():
        phases = list(part["exponents"])
        rows = [(f"{row[name]:,}", *(f"{row[phase]:.3f}" for phase in phases)) for row in part["rows"]]
        rows.append(("exponent", *(f"{part['exponents'][phase]:.2f}" for phase in phases)))
        parts.append(text_table((name, *phases), rows))
    base = ", ".join(f"{value:,} {name}" for name, value in result["base"].items())
    return "\n\n".join([*parts, f"seconds; the others are {base}; hidden {result['hidden']}, width {result['width']}"])


def methods_table(result: dict[str, Any]) -> str:
    """What `quantize bench methods` prints; ratios are relative to the row that `base` names."""
    base = next(row for row in result["rows"] if row["method"] == result["base"])
    rows = [
        (
            row["method"],
            f"{row['kl']:.4f}",
            f"{row['kl'] / base['kl']:.2f}",
            f"{row['top1']:.1%}",
            f"{row['router']:.1%}",
            f"{row['increase']:+.2%}",
            f"{row['seconds']:.1f}",
            f"{base['seconds'] / row['seconds']:.1f}x",
        )
        for row in result["rows"]
    ]
    calibration = result["calibration"]
    reasons: dict[str, list[str]] = {}
    for name, why in result["left_out"].items():
        reasons.setdefault(why, []).append(name)
    return text_table(("method", "KL", "ratio", "top-1", "router", "perplexity", "seconds", "faster"), rows) + (
        f"\n\n{calibration['tokens']:,} calibration tokens, {result['held_out_tokens']:,} held-out; "
        f"{result['machine']['threads']} threads; seconds: observe + solve, median of {result['repeats']}"
        + "".join(f"\nleft out: {'; '.join(names)}: {why}" for why, names in reasons.items())
    )
