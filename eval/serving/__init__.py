"""Predicts whether vLLM, SGLang and transformers would load a checkpoint correctly, from its config and headers.

No weight is read. server.py asks a server that has loaded one for log-probabilities.
"""
