"""Rules by which vLLM, SGLang and transformers choose a scheme for a module and a kernel for it, from their sources.

What follows from them for a checkpoint is found in `quantizers.serving`.
"""
