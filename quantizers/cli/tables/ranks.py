"""What `quantize bench count --ranks` prints, and `quantize plan` of several processes."""

from __future__ import annotations

from typing import Any

from quantizers.cost.sharing import PASSING
from quantizers.system.formatting import gib, text_table
from quantizers.system.progress import duration

SMALL = 0.05  # of all serial seconds: what is less is not named


def ranks_table(result: dict[str, Any]) -> str:
    """A row for each number of processes; then what does not become less, and the rates."""
    columns = ("processes", "TFLOP", "source GB", "sent GB", "received GB", "computing s", "passing on s", "files s",
               "layer s", "speed-up", "one card a machine")  # fmt: skip
    rows = [
        (
            f"{row['ranks']}" + (f" on {row['machines']} machines" if row["machines"] > 1 else ""),
            _tera(row["operations"]),
            *(f"{row[key] / 1e9:.2f}" for key in ("bytes_of_source", "bytes_sent", "bytes_received")),
            *(f"{row[key]:.2f}" for key in ("computing", PASSING)),
            f"{row['files']:.2f}",
            f"{row['layer']:.2f}" + (" *" if row["waits_for_files"] else ""),
            f"{row['speed_up']:.1f}",
            f"{row['apart']:.1f}",
        )
        for row in result["rows"]
    ]
    sizes, held, last = result["sizes"], result["held_out"], result["rows"][-1]["ranks"]
    waiting = any(row["waits_for_files"] for row in result["rows"])
    return "\n".join(
        [
            text_table(columns, rows),
            "",
            f"one layer of {result['like']}, as each process has it, the one that has most to do: {sizes['experts']} "
            f"experts of {sizes['hidden']} x {sizes['width']}, {result['tokens']:,} tokens in {result['sequences']} "
            f"sequences, {held['texts']} held-out texts of {held['tokens']:,} tokens; machines of {result['gpus']} "
            f"{result['card']}",
            *(["* it waits for files: give the rate of yours with --disk"] if waiting else []),
            f"what does not become less, from 1 to {last} processes: {serial_words(result['serial'])}; "
            f"{result['serial_share']:.1%} of one process's layer",
            "counted, not measured. Rates:",
            *(f"  {line}" for line in result["assumptions"]),
        ]
    )


def _tera(operations: int) -> str:
    return f"{operations / 1e12:,.0f}" if operations > 1e13 else f"{operations / 1e12:.2g}"


def serial_words(parts: dict[str, float]) -> str:
    """The seconds of the phases that matter, and of the rest together."""
    least = SMALL * sum(parts.values())
    named = {name: seconds for name, seconds in parts.items() if seconds > least}
    rest = sum(parts.values()) - sum(named.values())
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in (named | {"the rest": rest}).items())


def several_lines(numbers: dict[str, Any]) -> list[str]:
    """What a run by several processes needs and takes, if one was asked for."""
    machines, gpus = numbers["asked"]["machines"], numbers["asked"]["gpus"]
    if machines * gpus == 1:
        return []
    several = numbers["needs"]["several"]
    if several is None:
        return ["", f"by {machines * gpus} processes: unknown, as the time of one is"]
    layer, seconds, memory = several["layer"], several["seconds"], several["memory"]
    held = {(False, False): "no hidden states", (True, False): "the inputs of the experts", (True, True): "all states"}
    where = f"{machines} machines of {gpus} {several['card']}" if machines > 1 else f"{gpus} {several['card']}"
    between = f", {layer['bytes_between_machines'] / 1e9:.2f} GB of that between machines" if machines > 1 else ""
    rows = [
        ("time, counted", f"{duration(seconds['all'])}: layers {duration(seconds['layers'])}, proof "
         f"{duration(seconds['proof'])}; {several['speed_up']:.1f} times as fast as one"),
        ("memory of a card", f"{gib(memory['peak'])} at most, with {held[memory['inputs'], memory['states']]} and the "
         f"sums of {memory['resident']} of {memory['units']} units"),
        ("host memory", f"{gib(several['host'])} on each machine that its processes have in common, beside their own"),
        ("a layer with experts", f"{layer['layer']:.1f} s"
         + (f", waiting for files (computing takes {layer['computing']:.1f} s)" if layer["waits_for_files"] else "")
         + f"; each process {_tera(layer['operations'])} TFLOP, {layer['bytes_of_source'] / 1e9:.2f} GB of the "
         f"source"),
        ("passed on in a layer", f"each process sends {layer['bytes_sent'] / 1e9:.2f} GB and receives "
         f"{layer['bytes_received'] / 1e9:.2f} GB{between}, in {layer[PASSING]:.2f} s"),
        ("serial", f"{several['serial_share']:.1%} of one process's layer ({serial_words(several['serial'])}); and "
         f"rank 0 alone works {duration(several['by_rank_0'])} at the beginning and the end"),
    ]  # fmt: skip
    width = max(len(name) for name, _ in rows)
    return [
        "",
        f"by {where}",
        *(f"  {name:<{width}}  {words}" for name, words in rows),
        "assumed besides:",
        *(f"  {line}" for line in several["assumptions"]),
    ]
