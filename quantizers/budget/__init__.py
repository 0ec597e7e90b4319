"""Bits by budget: every candidate scheme measured on every layer, and the choice among them.

Which candidates there are, and their bytes, is known from headers alone and lies in `plan/`.
"""
