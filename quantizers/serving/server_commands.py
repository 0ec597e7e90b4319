"""Commands that start vLLM or SGLang on an output, from the section `serving` of report.json."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from quantizers.architectures.architecture import Options
from quantizers.eval.report.schema import Fit, Report, Serving

# Options of a server whose need is not plain from their names.
REASONS = {
    "disable-shared-experts-fusion": "without it SGLang puts the passthrough shared experts into the INT4 tensors",
    "trust-remote-code": "the tokenizer is code of its own",
}


def why_not_vllm(servers: Sequence[str], *, transformers: bool = True) -> str:
    """The sentence in place of a command for vLLM: it has no model of the family, or nothing is known of servers.

    Args:
        servers: those that know the family.
        transformers: whether transformers knows the model type.
    """
    if servers:
        return "No release of vLLM that was known when this was made has a model of this family."
    backend = "vLLM may take it with a model of its own or by its Transformers backend, which nobody has served here"
    return "Nothing is known here of the servers of this model type, so none was checked" + (
        f"; {backend}." if transformers else "."
    )


def vllm_command(about: Serving, place: str, attention: str = "") -> str | None:
    """The command that starts vLLM, over several lines; None if no known release has a model of the family.

    It divides the model among the fewest GPUs of `about.fits`.

    Args:
        about: the section `serving`.
        place: the checkpoint's folder or Hub id.
        attention: an option that the GPUs need for their attention backend, if they need one.
    """
    if "vllm" not in about.servers:
        return None
    best, options = _best(about), vllm_options(about.parsers)
    if best:
        divided = {"pipeline": best.pipeline_parallel, "tensor": best.tensor_parallel}
        options = [f"--{kind}-parallel-size {ranks}" for kind, ranks in divided.items() if ranks > 1] + options
        options += [f"--kv-cache-dtype {best.kv}"] if best.kv != "auto" else []
        options += [attention] if attention else []
        options += [f"--max-model-len {best.context}", f"--gpu-memory-utilization {best.utilisation}"]
    if about.sampling:
        options.append(f"--override-generation-config '{json.dumps(about.sampling)}'")
    return " \\\n    ".join([f"vllm serve {place}", *options])


def sglang_command(about: Serving, place: str) -> str | None:
    """The command that starts SGLang, over several lines; None if it does not know the family. See `vllm_command`."""
    if about.sglang is None:
        return None
    best = _best(about)
    ranks = [f"--tp-size {best.tensor_parallel}"] if best and best.tensor_parallel > 1 else []
    words = [f"python -m sglang.launch_server --model-path {place}", *ranks, *flags(about.sglang)]
    return " \\\n    ".join(words)


def vllm_options(parsers: Options) -> list[str]:
    """Arguments of `vllm serve` that the model's family wants, such as parsers of tool calls and of reasoning."""
    tools = ["--enable-auto-tool-choice"] if "tool-call-parser" in parsers else []
    return tools + flags(parsers)


def flags(options: Options) -> list[str]:
    """Arguments of a command for these options, by name without dashes; the value `True` is that of a bare flag."""
    return [
        f"--{option}" if value is True else f"--{option} {shlex.quote(str(value))}" for option, value in options.items()
    ]


def next_commands(report: Report, folder: str) -> list[str]:
    """The command that serves a finished output, for the last lines of `run`; none if vLLM does not know the family."""
    return [f"vllm serve {folder}"] if "vllm" in report.serving.servers else []


def plan_remarks(numbers: dict[str, Any]) -> list[str]:
    """The reason why `plan` gives no command for vLLM; none if it does."""
    return [] if "vllm" in numbers["servers"] else [why_not_vllm(numbers["servers"])]


def _best(about: Serving) -> Fit | None:
    """The row that fits on the fewest GPUs; None if none fits."""
    fitting = [row for row in about.fits if row.fits]
    return min(fitting, key=lambda row: row.tensor_parallel * row.pipeline_parallel, default=None)
