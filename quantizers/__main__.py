"""`python -m quantizers` is `quantize`; torchrun needs it."""

from .cli import main

main()
