"""Compares candidates with their source layer by layer, in lock-step: perplexity, KL, top-1, routing and weights.

Which limits they must keep is decided by the recipe, not here.
"""
