"""Would vLLM, SGLang and transformers read a checkpoint as it is meant? Their rules, applied to config and headers."""
