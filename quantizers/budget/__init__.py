"""Bits by budget: every candidate scheme measured on every layer, and the choice among them."""
