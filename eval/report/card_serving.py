"""How to run the output: the section of the card with the servers' commands, and what fits on which cards."""

from __future__ import annotations

import json
from typing import Any

from quantizers.system.formatting import gib

# Options of a server whose need is not plain from their names.
REASONS = {
    "disable-shared-experts-fusion": "without it SGLang puts the kept shared experts into the tensor of the INT4 ones",
    "trust-remote-code": "the tokenizer is code of its own",
}
NAMELESS = "PATH_OR_ID"  # in the commands of a card, until a repository is known


def repository(report: dict[str, Any]) -> str:
    """What the commands call the output: the repository that it was last published in, or else NAMELESS."""
    return str(report.get("published", {}).get("repo", NAMELESS))


def serving(report: dict[str, Any]) -> str:
    """The section with the commands, and the memory of a card by arithmetic."""
    about, name = report["serving"], repository(report)
    transformers = [
        "```python",
        "from transformers import AutoModelForCausalLM",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{name}", device_map="auto")',
        "```",
    ]
    if not knows_vllm(about):
        return (
            "## How to run it\n\nNo release of vLLM that was known when this was made has a model of this family. "
            "transformers loads it, and dequantizes the experts when it does:\n\n" + "\n".join(transformers)
        )
    lines = ["## How to run it", "", "```", vllm_command(about, name), "```", *_reasons(about["parsers"])]
    best = _best(about)
    if about.get("sglang") is not None:
        words = [f"--tp-size {best['tensor_parallel']}"] if best and best["tensor_parallel"] > 1 else []
        words += _flags(about["sglang"])
        command = " \\\n    ".join([f"python -m sglang.launch_server --model-path {name}", *words])
        lines += ["", "or with SGLang, whose rules for such a checkpoint were checked as vLLM's were:", ""]
        lines += ["```", command, "```", *_reasons(about["sglang"])]
    if about.get("transformers", True):
        lines += [
            "",
            "or with transformers, which dequantizes the experts when it loads, so it suits small models:",
            "",
        ]
        lines += transformers
    else:
        lines += ["", "transformers does not know this type of model."]
    if about["fits"]:
        rows = [
            f"| {row['cards']} | {row['tensor_parallel']} x {row['pipeline_parallel']} | "
            f"{'16 bit' if row['kv'] == 'auto' else 'FP8'} | {gib(row['weights'])} | {gib(row['kv_cache'])} | "
            f"{gib(row['left'])} | {row['longest']:,} |"
            for row in about["fits"]
        ]
        lines += [
            "",
            f"Memory of a card, by arithmetic, at {about['fits'][0]['context']:,} tokens; *longest* is the context "
            "that fits:",
            "",
            "| cards | tensor x pipeline | KV cache in | weights | KV cache | left | longest |",
            "|---|---|---|---:|---:|---:|---:|",
            *rows,
            "",
            "Assumed: " + "; ".join(about["assumptions"]) + ".",
        ]
    elif "cards_unknown" in about:
        lines += ["", f"The memory of a card is not known: {about['cards_unknown']}."]
    return "\n".join(lines)


def vllm_command(about: dict[str, Any], place: str) -> str:
    """The command that serves the output with vLLM, over several lines.

    Args:
        about: the report's `serving`.
        place: the checkpoint's folder or Hub id.
    """
    best = _best(about)
    options = _flags(about["parsers"])
    if "tool-call-parser" in about["parsers"]:
        options.insert(0, "--enable-auto-tool-choice")
    if best and best["tensor_parallel"] > 1:
        options.insert(0, f"--tensor-parallel-size {best['tensor_parallel']}")
    if best and best["pipeline_parallel"] > 1:
        options.insert(0, f"--pipeline-parallel-size {best['pipeline_parallel']}")
    if best and best["kv"] != "auto":
        options.append(f"--kv-cache-dtype {best['kv']}")
    if best:
        options += [f"--max-model-len {best['context']}", f"--gpu-memory-utilization {best['utilisation']}"]
    if about["sampling"]:
        options.append(f"--override-generation-config '{json.dumps(about['sampling'])}'")
    return " \\\n    ".join([f"vllm serve {place}", *options])


def knows_vllm(about: dict[str, Any]) -> bool:
    """Whether a known release of vLLM has a model of this family; reports of older versions have only such families."""
    return "vllm" in about.get("servers", ["vllm"])


def _flags(options: dict[str, Any]) -> list[str]:
    """Options as they are typed; `true` stands for one without a value."""
    return [f"--{option}" if value is True else f"--{option} {value}" for option, value in options.items()]


def _reasons(options: dict[str, Any]) -> list[str]:
    """A line on each option of a server whose need is not plain from its name."""
    return [line for option in options if option in REASONS for line in ("", f"`--{option}`: {REASONS[option]}.")]


def _best(about: dict[str, Any]) -> dict[str, Any] | None:
    """The way to divide the model that fits on the fewest cards."""
    fitting = [row for row in about["fits"] if row["fits"]]
    return min(fitting, key=lambda row: row["tensor_parallel"] * row["pipeline_parallel"], default=None)
