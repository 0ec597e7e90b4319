"""What `quantize verify` prints about the files."""

from __future__ import annotations

from typing import Any

from quantizers.system.formatting import collapse_lines


def audit_table(audit: dict[str, Any]) -> str:
    """The part of `quantize verify`'s output that compares the files with the source and report.json."""
    lines = [
        f"{audit['tensors']:,} source tensors accounted for, {audit['kept_tensors']:,} compared byte for byte",
        "what the run wrote: "
        + (
            "compared with the digests in report.json"
            if audit["digests_checked"]
            else "not compared, for report.json has no digests of it"
        ),
        *audit["notes"],
        *audit.get("account", []),
    ]
    if audit["weight_error"]:
        lines.append(f"experts: largest relative weight error {max(audit['weight_error']):.3f}")
    if not audit["differences"]:
        return "\n".join([*lines, "no differences"])
    found = len(audit["differences"])
    listed = collapse_lines(audit["differences"])
    heading = f"{found:,} difference{'s' if found > 1 else ''}"
    return "\n".join([*lines, f"{heading}:", *(f"  {line}" for line in listed)])
