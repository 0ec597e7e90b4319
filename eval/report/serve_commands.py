"""The commands that serve an output, from a report's `serving`."""

from __future__ import annotations

import json
import shlex
from typing import Any

# Options of a server whose need is not plain from their names.
REASONS = {
    "disable-shared-experts-fusion": "without it SGLang puts the passthrough shared experts into the INT4 tensors",
    "trust-remote-code": "the tokenizer is code of its own",
}
NAMELESS = "PATH_OR_ID"  # in the commands of a model card, until a repository is known


def repository(report: dict[str, Any]) -> str:
    """The name of the output in commands: the repository that it was last published in, or else NAMELESS."""
    return str(report.get("published", {}).get("repo", NAMELESS))


def knows_vllm(about: dict[str, Any]) -> bool:
    """Whether a known release of vLLM has a model of this family."""
    return "vllm" in about["servers"]


def without_vllm(about: dict[str, Any]) -> str:
    """A sentence on why there is no command for vLLM: it has no model of the family, or none is known here.

    Args:
        about: the report's `serving`, or another mapping with its `servers`.
    """
    if about["servers"]:
        return "No release of vLLM that was known when this was made has a model of this family."
    backend = "vLLM may take it with a model of its own or by its Transformers backend, which nobody has served here"
    return "Nothing is known here of the servers of this model type, so none was checked" + (
        f"; {backend}." if about.get("transformers", True) else "."
    )


def vllm_command(about: dict[str, Any], place: str) -> str:
    """The command for vLLM, over several lines.

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


def sglang_command(about: dict[str, Any], place: str) -> str | None:
    """The command for SGLang; None if it does not know the family."""
    if about["sglang"] is None:
        return None
    best = _best(about)
    ranks = [f"--tp-size {best['tensor_parallel']}"] if best and best["tensor_parallel"] > 1 else []
    words = [f"python -m sglang.launch_server --model-path {place}", *ranks, *_flags(about["sglang"])]
    return " \\\n    ".join(words)


def _flags(options: dict[str, Any]) -> list[str]:
    """Options as they are typed; `true` stands for one without a value."""
    return [
        f"--{option}" if value is True else f"--{option} {shlex.quote(str(value))}" for option, value in options.items()
    ]


def _best(about: dict[str, Any]) -> dict[str, Any] | None:
    """The division of the model that fits on the fewest GPUs."""
    fitting = [row for row in about["fits"] if row["fits"]]
    return min(fitting, key=lambda row: row["tensor_parallel"] * row["pipeline_parallel"], default=None)
