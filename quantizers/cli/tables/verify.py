"""What `quantize verify` prints about the files."""

from __future__ import annotations

from typing import Any


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
    return "\n".join(
        [*lines, f"{len(audit['differences'])} differences:", *(f"  {line}" for line in audit["differences"])]
    )
