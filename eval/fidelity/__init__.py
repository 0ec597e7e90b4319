"""Perplexity, KL, top-1, routing and weights of candidates against their source, layer by layer in lock-step."""
