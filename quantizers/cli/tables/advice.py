"""What to do after a gate failed, by gate: what to look at, and what in the recipe to change."""

from __future__ import annotations

from typing import Any


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
