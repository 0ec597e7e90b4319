"""`quantize imatrix`: parse, call, print, exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import common
from .adapter import Call, command

if TYPE_CHECKING:
    from quantizers.commands.imatrix import Imatrix


@command("quantizers.commands.imatrix:imatrix")
def imatrix(call: Call) -> None:
    """Write an importance matrix for llama.cpp's llama-quantize, from the source's activations.

    Example: quantize imatrix tiny-minimax-m2-fp8-int4 -o tiny.imatrix.gguf
    """
    from quantizers.importance.llama_cpp import imatrix_table

    made: Imatrix = call()
    if call.dist.is_main:
        common.emit(made.figures, call.as_json, imatrix_table(made.figures))
