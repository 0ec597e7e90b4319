"""Engines that read an output: whether they would as it is stored, on which GPUs it fits, and a server asked.

Everything here is about vLLM, SGLang, transformers and KTransformers, whose sources were read. No weight is read but by
`serve_check.py`, which compares a server's log-probabilities with the program's own evaluation.
"""
