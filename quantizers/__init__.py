"""Mixture-of-experts checkpoints: FP8 in, FP8 + INT4 out, with proof. See the README."""

__version__ = "0.1.0"
