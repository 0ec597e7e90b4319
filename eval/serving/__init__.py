"""Checks whether vLLM, SGLang and transformers would read a checkpoint correctly, from its config and headers.

No weight is read here.
"""
