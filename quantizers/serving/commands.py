"""Commands that serve an output, from the section `serving` of report.json."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from quantizers.architectures.architecture import Options
from quantizers.eval.report.schema import Fit, Serving

# Options of a server whose need is not plain from their names.
REASONS = {
    "disable-shared-experts-fusion": "without it SGLang puts the passthrough shared experts into the INT4 tensors",
    "trust-remote-code": "the tokenizer is code of its own",
}


def without_vllm(servers: Sequence[str], *, transformers: bool = True) -> str:
    """A sentence on why there is no command for vLLM: it has no model of the family, or none is known here.

    Args:
        servers: those that know the family; `transformers`: whether it knows the type of model.
    """
    if servers:
        return "No release of vLLM that was known when this was made has a model of this family."
    backend = "vLLM may take it with a model of its own or by its Transformers backend, which nobody has served here"
    return "Nothing is known here of the servers of this model type, so none was checked" + (
        f"; {backend}." if transformers else "."
    )


def vllm_command(about: Serving, place: str, attention: str = "") -> str | None:
    """The command for vLLM, over several lines; None if no known release has a model of the family.

    Args:
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
    """The command for SGLang; None if it does not know the family."""
    if about.sglang is None:
        return None
    best = _best(about)
    ranks = [f"--tp-size {best.tensor_parallel}"] if best and best.tensor_parallel > 1 else []
    words = [f"python -m sglang.launch_server --model-path {place}", *ranks, *flags(about.sglang)]
    return " \\\n    ".join(words)


def vllm_options(parsers: Options) -> list[str]:
    """The options of vLLM that the model's family wants, parsers of tool calls and reasoning among them."""
    tools = ["--enable-auto-tool-choice"] if "tool-call-parser" in parsers else []
    return tools + flags(parsers)


def flags(options: Options) -> list[str]:
    """Options as they are typed; `true` stands for one without a value."""
    return [
        f"--{option}" if value is True else f"--{option} {shlex.quote(str(value))}" for option, value in options.items()
    ]


def _best(about: Serving) -> Fit | None:
    """The division of the model that fits on the fewest GPUs."""
    fitting = [row for row in about.fits if row.fits]
    return min(fitting, key=lambda row: row.tensor_parallel * row.pipeline_parallel, default=None)
