"""Benchmarks: methods, engines, layers and sizes measured against each other. No other room needs them."""
