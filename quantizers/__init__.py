"""Quantizes the routed experts of mixture-of-experts checkpoints, and leaves every other byte as it is.

Each command of `quantize` is a function with the same options, which returns a dataclass (that of `quantize stitch` is
`stitch_experts`):

    import quantizers

    made = quantizers.run("tiny-minimax-m2-fp8-int4", "out/tiny")
    print(made.passed, made.kl, made.perplexity)

`layer` has no command: it gives the experts of one layer with their inputs, for experiments.

Every error is a `QuantizeError` with a one-line message; an `InputError` means that something given was wrong.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quantizers.hooks import functions
from quantizers.system.errors import InputError, QuantizeError
from quantizers.system.version import __version__ as __version__

if TYPE_CHECKING:
    from quantizers.commands.doctor import doctor
    from quantizers.commands.evaluate import evaluate
    from quantizers.commands.layer import layer
    from quantizers.commands.plan import plan
    from quantizers.commands.run import run
    from quantizers.commands.verify import verify
    from quantizers.hub.publish import publish
    from quantizers.llama_cpp.imatrix import imatrix as imatrix
    from quantizers.repair.stitch import stitch_experts as stitch_experts
    from quantizers.serving.serve_check import serve_check as serve_check
    from quantizers.sets.compare import compare as compare
    from quantizers.sets.coverage import coverage as coverage

__all__ = [
    "InputError",
    "QuantizeError",
    "doctor",
    "evaluate",
    "layer",
    "plan",
    "publish",
    "run",
    "verify",
]
__all__.extend(functions())  # of rooms that are there
__all__.sort()


def __dir__() -> list[str]:
    """The public names: editors and IPython complete them, although none is imported yet."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import a command's function when it is first used: torch takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = {"publish": "quantizers.hub.publish"} | functions()
    module = modules.get(name, f"quantizers.commands.{name}")
    return getattr(import_module(module), name)
