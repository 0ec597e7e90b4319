"""What `quantize bench count --ranks` prints."""

from __future__ import annotations

from typing import Any

from quantizers.cost.sharing import PASSING
from quantizers.system.text_table import plain


def ranks_table(result: dict[str, Any]) -> str:
    """A row for each number of processes; then what does not become less, and the rates."""
    columns = ("processes", "TFLOP", "source GB", "sent GB", "received GB", "computing s", "passing on s", "files s",
               "layer s", "speed-up", "one card a machine")  # fmt: skip
    rows = [
        (
            f"{row['ranks']}" + (f" on {row['machines']} machines" if row["machines"] > 1 else ""),
            f"{row['operations'] / 1e12:,.0f}",
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
            plain(columns, rows),
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


def serial_words(parts: dict[str, float]) -> str:
    """The seconds of each phase, or that there are none."""
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items()) or "nothing"
