"""Compares candidates with their source layer by layer, in lock-step: perplexity, KL, top-1, routing and weights."""
