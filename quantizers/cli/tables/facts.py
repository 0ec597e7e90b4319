"""What `quantize new --facts` prints."""

from __future__ import annotations

from pathlib import Path

from quantizers.checkpoint.safetensors_header import printed
from quantizers.plan.fit_facts import Fitted
from quantizers.system.formatting import text_table

HEADER = ("what differs", "name (* = a number)", "tensors", "kept facts", "this checkpoint", "new facts")
REFUSED = "no words: refused"


def facts_table(fitted: Fitted, path: Path) -> str:
    """Every difference from the kept facts, what the user has to check, and what comes next."""
    lines = [f"nothing differs from the facts kept for {fitted.family}"]
    if fitted.differences:
        rows = [
            (
                one.what,
                printed(one.name),
                f"{one.tensors:,}" if one.tensors else "",
                one.kept,
                one.found,
                REFUSED if one.written is None else one.written,
            )
            for one in fitted.differences
        ]
        lines = [f"differences from the facts kept for {fitted.family}:", "", text_table(HEADER, rows), ""]
    if fitted.suspects:
        norm = fitted.values["norm"]["tensor"]
        lines += [
            f"nothing is known about these tensors of decoder layers, so they are named as readers of {norm}, and AWQ "
            "folds nothing into it; take those that do not read it out of norm.readers:",
            *(f"  {printed(name)}" for name in fitted.suspects),
        ]
    lines += [
        f"{one.name}: the kept facts rely on {one.kept}; check that transformers computes this model with {one.found}"
        for one in fitted.differences
        if one.what == "assert"
    ]
    if not fitted.fits:
        lines.append("`quantize plan` still refuses this checkpoint: facts have no words for the rows marked so")
    return "\n".join([*lines, f"wrote {path}; next: name it in a recipe, source: {{model: ..., facts: {path}}}"])
