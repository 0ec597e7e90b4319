"""Benchmarks that compare methods, engines, layers and sizes. Only the `quantize bench` command uses them."""
