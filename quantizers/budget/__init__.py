"""Bits by budget: every candidate scheme measured on every layer, and the choice among them.

The candidates and their bytes follow from headers alone, see planning/allocation.py.
"""
