"""Benchmarks that compare methods, engines, layers and sizes. Only `quantize bench` uses them; no run needs them."""
