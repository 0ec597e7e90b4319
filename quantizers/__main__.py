"""`python -m quantizers` is `quantize`; torchrun needs it."""

from quantizers.cli.main import main

main()
