"""Formats of stored weights: FP8, packed integers, files of AWQ and GPTQ, and how their tensors are named."""
