"""Compares candidates with their source layer by layer: perplexity, KL, top-1, routing and weights.

Which limits they must keep is decided by the recipe, not here.
"""
