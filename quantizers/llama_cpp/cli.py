"""`quantize imatrix`: parse, call, print, exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantizers.cli import common
from quantizers.cli.adapter import Call, command

if TYPE_CHECKING:
    from quantizers.llama_cpp.imatrix import Imatrix


@command("quantizers.llama_cpp.imatrix:imatrix")
def imatrix(call: Call) -> None:
    """Write an importance matrix for llama.cpp's llama-quantize, from the source's activations.

    Example: quantize imatrix tiny-minimax-m2-fp8-int4 -o tiny.imatrix.gguf
    """
    from quantizers.llama_cpp.imatrix_file import imatrix_table

    made: Imatrix = call()
    if call.dist.is_main:
        common.emit(made.figures, call.as_json, imatrix_table(made.figures))
