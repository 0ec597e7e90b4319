"""How to run the output: the section of the card with the servers' commands, and what fits on which cards."""

from __future__ import annotations

import json
from typing import Any

from quantizers.system.byte_size import gib


def serving(report: dict[str, Any]) -> str:
    """The section with the commands, and the memory of a card by arithmetic."""
    about = report["serving"]
    if "vllm" not in about.get("servers", ["vllm"]):  # reports of older versions have only families that it knows
        return (
            "## How to run it\n\nNo release of vLLM that was known when this was made has a model of this family. "
            "transformers loads it, and dequantizes the experts when it does."
        )
    fitting = [row for row in about["fits"] if row["fits"]]
    best = min(fitting, key=lambda row: row["tensor_parallel"] * row["pipeline_parallel"], default=None)
    options = [f"--{option} {value}" for option, value in about["parsers"].items()]
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
    lines = ["## How to run it", "", "```", " \\\n    ".join(["vllm serve PATH_OR_ID", *options]), "```"]
    if about.get("sglang") is not None:
        words = [f"--tp-size {best['tensor_parallel']}"] if best and best["tensor_parallel"] > 1 else []
        words += [f"--{option} {value}" for option, value in about["sglang"].items()]
        command = " \\\n    ".join(["python -m sglang.launch_server --model-path PATH_OR_ID", *words])
        lines += ["", "or with SGLang, whose rules for such a checkpoint were checked as vLLM's were:", ""]
        lines += ["```", command, "```"]
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
    return "\n".join(lines)
